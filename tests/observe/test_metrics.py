"""The metrics' names and labels are a contract: docs/metrics.md lists each one, and nothing else."""

import pathlib
import re
import subprocess
import sys

from prometheus_client.parser import text_string_to_metric_families

from noria.observe import metrics

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_docs_list_every_metric_and_no_other():
    declared = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in metrics.REGISTRY.collect()
    }
    rows = re.findall(r"^\| `(noria_\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == declared


def test_queries_in_the_docs_name_metrics_that_exist():
    text = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Questions")[2]
    declared = {family.name for family in metrics.REGISTRY.collect()}
    for name in re.findall(r"noria_\w+", text):
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in declared


def test_exposition_is_what_prometheus_reads():
    families = {family.name for family in text_string_to_metric_families(metrics.exposition().decode())}
    assert {"noria_turns", "noria_batch_size", "noria_engine_up"} <= families


def test_values_of_several_processes_are_summed(tmp_path):
    count = (
        "from noria.observe import metrics; metrics.TURNS.inc(3); metrics.SLOTS.set(8); metrics.BATCH_SIZE.observe(2);"
    )
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    # The last to count also tells: it lives, so its gauge counts, and the dead one's does until the supervisor has forgotten it.
    for script in (count, count + "print(metrics.exposition().decode())"):
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(run.stdout)
        for sample in family.samples
        if not sample.labels
    }
    assert (values["noria_turns_total"], values["noria_slots"], values["noria_batch_size_count"]) == (6, 16, 2)
