"""The model of a request, and the record of its outcome."""

import asyncio
import contextlib

import msgspec
import pytest

from noria.errors import DeadlineExceeded, EngineUnavailable, GenerationFailed, InvalidField, ModelNotFound
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.submission import RequestOutcome, Submission, not_served
from noria.frontend.engines.versions.version_choice import RequestVersions, VersionChooser
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations, outcomes
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.routes import Route, Routes, Target
from noria.protocol.text import EncoderModelSpec
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL

RERANKER = msgspec.structs.replace(FAKE_ENCODER, name="ranker", task="reranking")
OTHER = msgspec.structs.replace(FAKE_MODEL, name="other")


def submission_of(*specs):
    pool = EnginePool([])
    for spec in specs:
        pool.add_on_demand(spec)
    return Submission(pool)


@pytest.mark.parametrize(
    ("name", "spec_type", "expected"),
    [
        (None, DiffusionModelSpec, FAKE_MODEL),
        ("", DiffusionModelSpec, FAKE_MODEL),
        ("noria", DiffusionModelSpec, FAKE_MODEL),
        ("other", DiffusionModelSpec, OTHER),
        (None, EncoderModelSpec, FAKE_ENCODER),
        ("ranker", EncoderModelSpec, RERANKER),
    ],
)
def test_a_request_gets_the_model_it_names_or_the_default_of_its_kind(name, spec_type, expected):
    assert submission_of(FAKE_MODEL, OTHER, FAKE_ENCODER, RERANKER).resolve_model(spec_type, name) is expected


def test_a_model_may_be_named_as_the_alias_of_the_default_one():
    named = msgspec.structs.replace(FAKE_MODEL, name="noria")
    assert submission_of(FAKE_MODEL, named).resolve_model(DiffusionModelSpec, "noria") is named


@pytest.mark.parametrize(
    ("name", "spec_type", "tasks", "message"),
    [
        (
            "tiny", EncoderModelSpec, ("reranking",),
            "model 'tiny' is an image model; this route needs a reranking model: 'ranker'.",
        ),
        (
            "tiny", EncoderModelSpec, ("reranking", "embedding"),
            "model 'tiny' is an image model; this route needs a reranking model or an embedding model: 'ranker', "
            "'fake-encoder'.",
        ),
        (
            "tiny", EncoderModelSpec, ("classification",),
            "model 'tiny' is an image model; this route needs a classification model: none is served here.",
        ),
        (
            "tiny", EncoderModelSpec, (),
            "model 'tiny' is an image model; this route needs a text encoder: 'fake-encoder', 'ranker'.",
        ),
        (
            "ranker", DiffusionModelSpec, (),
            "model 'ranker' is a reranking model; this route needs an image model: 'tiny'.",
        ),
        (
            "x", DiffusionModelSpec, (),
            "model 'x' is not served here; allowed are 'tiny' (or leave it out, or send 'noria').",
        ),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_answered_with_those_that_do(name, spec_type, tasks, message):
    with pytest.raises(ModelNotFound) as raised:
        submission_of(FAKE_MODEL, FAKE_ENCODER, RERANKER).resolve_model(spec_type, name, tasks)
    assert (raised.value.message, raised.value.field) == (message, "model")


def test_a_kind_of_model_that_is_not_served_is_told_from_one_that_is_not_known_yet():
    with pytest.raises(ModelNotFound) as raised:
        submission_of(FAKE_MODEL).resolve_model(EncoderModelSpec, None)
    message = "this needs a model of kind encoder; this server has 'tiny' (diffusion)."
    assert (raised.value.message, raised.value.field) == (message, "model")
    for name in (None, "x"):
        with pytest.raises(EngineUnavailable):
            submission_of().resolve_model(EncoderModelSpec, name)
    assert "allowed are none (" in not_served("x", []).message


def deployed(spec):
    """The versions of a request that the first deployment of a model answers."""
    chooser = VersionChooser(lambda *_: None)
    chooser.follow(Routes(1, (Route(spec.name, Target(7, f"{spec.name}@3", "sha256:0", spec.fingerprint, ())),)))
    versions = RequestVersions("key")
    assert chooser.choose(spec, versions) is spec
    return versions


def metrics(code):
    """Return the counts of requests for `tiny` with this outcome, by deployment and model, and of those in flight."""
    buckets = declarations.DEPLOYMENT_REQUEST_SECONDS.labels("tiny", "tiny@3")._buckets
    return (
        declarations.DEPLOYMENT_REQUESTS.labels("tiny", "tiny@3", code)._value.get(),
        sum(bucket.get() for bucket in buckets),
        # Whether the model is known in this process depends on the tests before.
        sum(declarations.REQUESTS.labels(model, code)._value.get() for model in ("tiny", outcomes.OTHER)),
        declarations.DEADLINES_MISSED.labels("tiny")._value.get(),
        declarations.REQUESTS_IN_FLIGHT._value.get(),
    )


@pytest.mark.parametrize(
    ("error", "has_deadline", "code", "judged", "changes"),
    [
        (None, False, "ok", "ok", [1, 1, 1, 0, 0]),
        (GenerationFailed("no"), False, "generation_failed", "error", [1, 0, 1, 0, 0]),
        (InvalidField("no", field="n"), False, "invalid_field", None, [1, 0, 1, 0, 0]),
        (DeadlineExceeded("no"), True, "deadline_exceeded", None, [1, 0, 1, 1, 0]),
        (DeadlineExceeded("no"), False, "deadline_exceeded", None, [1, 0, 1, 0, 0]),
        (GenerationFailed("no"), True, "generation_failed", "error", [1, 0, 1, 0, 0]),
        (asyncio.CancelledError(), False, "cancelled", "none", [1, 0, 1, 0, 0]),
        (ZeroDivisionError(), False, "internal", "error", [1, 0, 1, 0, 0]),
    ],
)
def test_an_outcome_is_logged_and_counted_once_for_the_model_and_its_deployment(
    error, has_deadline, code, judged, changes
):
    log_record, versions, before = RequestLogRecord(), deployed(FAKE_MODEL), metrics(code)
    with contextlib.ExitStack() as stack:
        if error is not None:
            stack.enter_context(pytest.raises(type(error)))
        stack.enter_context(RequestOutcome("tiny", log_record, versions, has_deadline=has_deadline))
        assert declarations.REQUESTS_IN_FLIGHT._value.get() == before[-1] + 1
        if error is not None:
            raise error
    seconds = log_record.pop("total_s", None)
    assert (seconds is None) is (error is None) and 0 <= (seconds or 0) < 60
    message = {"error": "no"} if hasattr(error, "message") else {}
    assert dict(log_record) == {"deployment": 7, "version": "tiny@3", "outcome": code} | message
    assert [after - old for after, old in zip(metrics(code), before, strict=True)] == changes
    if judged is not None:
        assert versions.of("tiny").outcome == judged


def test_an_attempt_of_a_job_is_logged_and_not_counted_as_a_request():
    log_record, before = RequestLogRecord(), metrics("generation_failed")
    with pytest.raises(GenerationFailed), RequestOutcome("tiny", log_record):
        raise GenerationFailed("no")
    assert 0 <= log_record.pop("total_s") < 60
    assert dict(log_record) == {"outcome": "generation_failed", "error": "no"}
    assert metrics("generation_failed") == before
