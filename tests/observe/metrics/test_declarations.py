"""The metrics' names and labels are a contract: the declared metrics are exported, and docs/metrics.md lists them."""

import os
import pathlib
import re
import subprocess
import sys
from typing import get_args

from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from noria.config import StatisticsConfig
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.jobs.records import TERMINAL_STATUSES
from noria.observe.metrics import declarations
from noria.observe.metrics.declarations import DECLARATIONS, REGISTRY
from noria.observe.metrics.docs_page import QUERIES, metrics_page
from noria.observe.metrics.exemplars import Exemplars, exemplar_labels
from noria.observe.metrics.exposition import exposition, keep_exemplar
from noria.observe.metrics.process_metrics import process_metrics
from noria.observe.request_scope import RequestScope
from noria.protocol.messages import ExitCause
from noria.scheduling.types import Phase
from noria.statistics.variables import BUILT_IN

DOCS = pathlib.Path(__file__).parents[3] / "docs"


def test_the_docs_page_is_generated_from_the_declarations():
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == metrics_page()


def test_exactly_the_declared_metrics_are_exported():
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in (*REGISTRY.collect(), *process_metrics())
        if not family.name.startswith("noria_stat_")  # those that a configuration declares
    }
    read = ("DCGM_", "noria_stat_")
    assert exported == {each.name: each.kind for each in DECLARATIONS.values() if not each.name.startswith(read)}


def test_built_in_variables_are_exported_as_they_are_declared():
    StatisticsRecorder(StatisticsConfig(builtin=tuple(BUILT_IN)))
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in REGISTRY.collect()
    }
    declared = {each.name: each.kind for each in DECLARATIONS.values() if each.name.startswith("noria_stat_")}
    assert len(declared) == sum(map(len, BUILT_IN.values()))
    assert declared.items() <= exported.items()


def test_queries_in_the_docs_use_metrics_that_exist():
    series = {name for declared in DECLARATIONS.values() for name in declared.series}
    for query in QUERIES.values():
        names = re.findall(r"noria_\w+", query)
        assert names and set(names) <= series, query


def test_counters_start_at_0():
    # No query sees the first increase of a series that starts at 1.
    script = (
        "from noria.observe.metrics.exposition import exposition\n"
        "from noria.observe.metrics.engine_series import init_engine_series\n"
        "init_engine_series(['engine-0', 'engine-1']); print(exposition()[0].decode())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(run.stdout)
        for sample in family.samples
    }
    for name, values in (
        ("noria_jobs_total", TERMINAL_STATUSES),
        ("noria_webhook_attempts_total", ("delivered", "failed")),
    ):
        assert [found[name, value] for value in values] == [0.0] * len(values)
    for engine in ("engine-0", "engine-1"):
        assert found["noria_engine_up", engine] == 0.0
        assert [found["noria_engine_starts_total", engine, cause] for cause in get_args(ExitCause)] == [0.0] * 3
        assert [found["noria_out_of_memory_total", engine, phase] for phase in get_args(Phase)] == [0.0] * 5
        assert [found[f"noria_{name}_total", engine] for name in ("iterations", "joins", "engine_busy_seconds")] == [
            0.0
        ] * 3
    assert found["noria_engines_configured",] == 2.0


def test_prometheus_can_parse_the_exposition():
    text, content_type = exposition()
    assert content_type.startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"noria_iterations", "noria_batch_size", "noria_engine_up", "noria_process_cpu_seconds"} <= families


def test_openmetrics_has_the_latest_request_of_each_bucket():
    for seconds, name in ((0.3, "first"), (0.5, "second"), (3000.0, "slow"), (0.7, "x" * 128)):
        declarations.QUEUE_SECONDS.labels("exemplary").observe(seconds)
        keep_exemplar(exemplar_labels(name), (declarations.QUEUE_SECONDS, seconds, ("exemplary",)))
    text, content_type = exposition("application/openmetrics-text;version=1.0.0,text/plain;q=0.3")
    assert content_type.startswith("application/openmetrics-text")
    families = openmetrics.text_string_to_metric_families(text.decode())
    found = {
        sample.labels["le"]: sample.exemplar
        for family in families
        for sample in family.samples
        if sample.name == "noria_queue_seconds_bucket" and sample.labels["model"] == "exemplary"
    }
    assert found["0.5"].labels == {"request_id": "second"}
    assert found["0.5"].value == 0.5
    assert found["+Inf"].labels == {"request_id": "slow"}
    assert found["1.0"] is None  # an id that would not fit


def test_an_exemplar_without_room_for_both_ids_has_the_trace_id():
    trace_id, longest_id = "a" * 32, "x" * (128 - len("trace_id" + "a" * 32 + "request_id"))
    for flags, request_id, expected in (
        (TraceFlags.SAMPLED, longest_id, {"trace_id": trace_id, "request_id": longest_id}),
        (TraceFlags.SAMPLED, longest_id + "x", {"trace_id": trace_id}),
        (TraceFlags.DEFAULT, longest_id + "x", {"request_id": longest_id + "x"}),  # nobody records this trace
    ):
        span = NonRecordingSpan(SpanContext(int(trace_id, 16), 1, is_remote=True, trace_flags=TraceFlags(flags)))
        with RequestScope("x", span):
            assert exemplar_labels(request_id) == expected


def test_an_exemplar_in_openmetrics_format():
    exemplars, bucket = Exemplars(), ("noria_seconds_bucket", frozenset({("le", "1.0")}))
    exemplars.record(bucket, {"trace_id": "a", "request_id": 'b"'}, 0.5, 123.25)
    exemplars.record(bucket, {}, 0.75, 456.0)
    assert exemplars.openmetrics_suffix(*bucket) == r' # {request_id="b\"",trace_id="a"} 0.5 123.25'


def test_values_of_several_processes_are_summed(tmp_path):
    count = (
        "from noria.observe.metrics import declarations as metrics; "
        "from noria.observe.metrics.exposition import exposition, samples; "
        "metrics.JOBS_ACCEPTED.inc(3); metrics.REQUESTS_IN_FLIGHT.set(8); metrics.EVENT_LOOP_LAG_SECONDS.observe(2);"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    # The gauge of the first process, which has ended, counts until the supervisor removes its file.
    report = "print(exposition()[0].decode(), *(f'# {each.name} {each.value}' for each in samples()), sep='\\n')"
    for script in (count, count + report):
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(run.stdout)
        for sample in family.samples
        if not sample.labels
    }
    assert [
        values[f"noria_{name}"]
        for name in ("jobs_accepted_total", "requests_in_flight", "event_loop_lag_seconds_count")
    ] == [6, 16, 2]
    assert {"# noria_jobs_accepted_total 6.0", "# noria_requests_in_flight 16.0"} <= set(run.stdout.splitlines())
