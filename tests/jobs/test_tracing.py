"""Jobs and webhooks in the trace of the request that created the job, with and without a tracer."""

import json
import time

import pytest
from opentelemetry.trace import get_current_span

from jobs.fake_executor import FakeExecutor
from jobs.running_worker import running_worker
from jobs.webhook_receiver import Receiver, send
from noria.errors import EngineUnavailable, GenerationFailed
from noria.jobs.records import TERMINAL_STATUSES
from noria.jobs.results import ResultStore
from noria.jobs.tracing import stored_trace_context
from noria.jobs.webhooks.outbox import Outbox, WebhookDelivery
from noria.observe.request_scope import CURRENT_REQUEST
from noria.observe.traces.tracer import GLOBAL_TRACER, parse, trace_headers
from waiting import wait_until_async


def stored_request(caller):
    request = {"seed": 7, "traceparent": caller.traceparent, "tracestate": "vendor=x"}
    return json.dumps({"request": request, "metadata": True}).encode()


def test_the_trace_context_is_read_from_a_stored_request_if_it_has_one(caller):
    stored = stored_trace_context(stored_request(caller))
    assert trace_headers(get_current_span(stored)) == {"traceparent": caller.traceparent, "tracestate": "vendor=x"}
    assert stored_trace_context('{"request": {"seed": 7}}') == {}
    assert stored_trace_context('{"request": {"seed": 7, "traceparent": "nonsense"}}') == {}


class RecordingExecutor(FakeExecutor):
    """Records the request scope of each call."""

    def __init__(self, *errors):
        super().__init__(*errors)
        self.contexts = []

    async def execute(self, record, report_progress, log_record):
        self.contexts.append((CURRENT_REQUEST.get(), trace_headers(get_current_span())["traceparent"]))
        return await super().execute(record, report_progress, log_record)


async def run_job(store, results, new, executor, tracer, is_done=lambda record: record.status in TERMINAL_STATUSES):
    """Execute the job until `is_done`; returns its record."""
    record, _ = store.accept(new, 9, time.time())
    async with running_worker(store, results, executor, tracer=tracer):
        await wait_until_async(lambda: is_done(store.get(record.id)))
    return store.get(record.id)


async def test_a_job_runs_in_the_scope_of_its_creator_even_without_a_tracer(store, tmp_path, job, caller):
    executor = RecordingExecutor()
    new = job(request=stored_request(caller))
    record = await run_job(store, ResultStore("auto", tmp_path), new, executor, GLOBAL_TRACER)
    assert executor.contexts == [(record.id, caller.traceparent)]


async def test_each_attempt_of_a_job_is_a_span_with_its_outcome(store, tmp_path, job, caller, tracer, collector):
    executor = RecordingExecutor(EngineUnavailable("later", retry_after_s=0.1), GenerationFailed("no"))
    new = job(request=stored_request(caller))
    assert (await run_job(store, ResultStore("auto", tmp_path), new, executor, tracer)).status == "failed"
    tracer.span_processor.force_flush()
    spans = sorted(collector.of_trace(caller.trace_id), key=lambda span: span.began)
    assert [(span.name, span.kind, span.parent_id) for span in spans] == [
        ("process job", "consumer", caller.span_id)
    ] * 2
    spans_reported = [
        (span.attributes["noria.job.attempt"], span.failed, span.attributes["error.type"]) for span in spans
    ]
    assert spans_reported == [(1, True, "engine_unavailable"), (2, True, "generation_failed")]
    assert [header.split("-")[2] for _, header in executor.contexts] == [span.span_id for span in spans]


def test_a_delivery_has_the_trace_of_its_job(store, engine, job, caller):
    of_trace, _ = store.accept(job(request=stored_request(caller), webhook="https://example.com/"), 9, 0.0)
    store.accept(job(webhook="https://example.com/"), 9, 0.0)
    store.claim("s/f/1", {("shapes", "v1")}, 2, 0.0)
    traces = {json.loads(each.body)["id"]: each.trace for each in Outbox(engine).claim_due(9, 1.0)}
    assert trace_headers(get_current_span(traces.pop(of_trace.id)))["traceparent"] == caller.traceparent
    assert list(traces.values()) == [{}]


def delivery_to(url, caller=None, num_tries=1):
    trace = {} if caller is None else {"trace": parse([caller.traceparent], ["vendor=x"])}
    return WebhookDelivery("msg_1", url, "{}", num_tries, "job_1", **trace)


async def test_a_webhook_forwards_the_trace_context_even_without_a_tracer(caller):
    with Receiver() as receiver:
        for delivery in (delivery_to(receiver.address(), caller), delivery_to(receiver.address())):
            assert await send(delivery) is None
    (_, with_trace, _), (_, without, _) = receiver.received
    assert (with_trace["traceparent"], with_trace["tracestate"]) == (caller.traceparent, "vendor=x")
    assert not {"traceparent", "tracestate"} & without.keys()


async def test_each_try_of_a_webhook_is_a_span_without_secrets(caller, tracer, collector):
    with Receiver([503]) as receiver:
        delivery = delivery_to(f"{receiver.address()}in?token=secret", caller, num_tries=2)
        assert await send(delivery, tracer=tracer) == "it answered 503"
    tracer.span_processor.force_flush()
    (span,) = collector.of_trace(caller.trace_id)
    assert (span.name, span.kind, span.parent_id, span.failed) == ("POST", "client", caller.span_id, True)
    assert span.attributes == {
        "http.request.method": "POST",
        "http.request.resend_count": 1,
        "http.response.status_code": 503,
        "error.type": "503",
        "url.full": f"{receiver.address()}in",
        "server.address": "hooks.example",
        "server.port": receiver.server_port,
        "noria.webhook.id": "msg_1",
    }
    assert receiver.received[0][1]["traceparent"] == f"00-{caller.trace_id}-{span.span_id}-01"


@pytest.mark.parametrize(("allow_private", "code"), [(False, "invalid_field"), (True, "ConnectError")])
async def test_a_webhook_that_was_not_sent_has_a_span_with_the_reason(caller, tracer, collector, allow_private, code):
    assert await send(delivery_to("http://hooks.example:9/", caller), tracer=tracer, allow_private=allow_private)
    tracer.span_processor.force_flush()
    (span,) = collector.of_trace(caller.trace_id)
    assert (span.failed, span.attributes["error.type"]) == (True, code)
