"""Outcomes of requests are counted from 0 on, with bounded labels."""

import subprocess
import sys

from prometheus_client.parser import text_string_to_metric_families

from noria.errors import RequestError, ServingError, all_codes
from noria.observe.metrics import declarations
from noria.observe.metrics.outcomes import OTHER, REJECTION_REASONS, count_request, init_model_series

# Codes of requests about existing images, or rejected before their bodies are parsed: HTTP requests, but no image
# requests.
NEVER_AN_IMAGE_REQUEST_OUTCOME = {
    "user_code_failed",
    "user_code_busy",
    "registry_unavailable",
    "registry_conflict",
    "foreign_run",
    "source_rejected",
    "invalid_body",
    "unauthorized",
    "host_not_allowed",
    "cross_origin",
    "missing_scope",
    "unsupported_media_type",
    "not_supported",
    "unreadable_image",
    "body_too_large",
    "not_found",
    "method_not_allowed",
    "job_not_found",
}


def series_after(calls):
    """Return the samples of a new process after these calls, by name and label values."""
    script = (
        "from noria.observe.metrics.exposition import exposition\n"
        "from noria.observe.metrics.outcomes import *\n"
        f"{calls}; print(exposition()[0].decode())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(run.stdout)
        for sample in family.samples
    }


def test_all_outcomes_of_a_model_are_0_before_its_first_request():
    found = series_after("init_model_series(['tiny'])")
    outcomes = {labels[1] for name, *labels in found if name == "noria_requests_total"}
    kinds = {code for code, kind in all_codes().items() if issubclass(kind, RequestError | ServingError)}
    assert outcomes == {"ok"} | kinds - NEVER_AN_IMAGE_REQUEST_OUTCOME - {"model_not_found"}
    reasons = {labels[1] for name, *labels in found if name == "noria_rejected_total"}
    assert reasons == set(REJECTION_REASONS) - {"model_not_found"}
    for name in ("noria_images_total", "noria_deadline_missed_total"):
        assert found[name, "tiny"] == 0.0
    assert {found[name, *labels] for name, *labels in found if "tiny" in labels and name.endswith("_total")} == {0.0}


def test_rejections_without_a_model_are_0_before_the_first_request():
    found = series_after("init_unknown_model_series()")
    for name in ("noria_requests_total", "noria_rejected_total"):
        values = {labels[1]: value for (found_name, *labels), value in found.items() if found_name == name}
        assert values == {"engine_unavailable": 0.0, "model_not_found": 0.0}


def test_a_model_that_is_not_served_is_counted_as_other():
    counter = declarations.REQUESTS.labels(OTHER, "cancelled")._value
    before = counter.get()
    for model in (None, "a model of last year's"):
        count_request(model, "cancelled")
    assert counter.get() - before == 2
    assert not any("a model of last year's" in labels for labels in declarations.REQUESTS._metrics)


def test_a_rejection_counts_as_request_and_rejection_and_a_failure_as_request():
    init_model_series(["counted"])
    for outcome in ("queue_full", "generation_failed", "ok"):
        count_request("counted", outcome)
    assert {
        outcome
        for (model, outcome), each in declarations.REQUESTS._metrics.items()
        if model == "counted" and each._value.get()
    } == {"queue_full", "generation_failed", "ok"}
    assert [
        outcome
        for (model, outcome), each in declarations.REJECTED._metrics.items()
        if model == "counted" and each._value.get()
    ] == ["queue_full"]
