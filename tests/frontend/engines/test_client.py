"""Attempts of one engine, with messages in an order that a network gives rarely."""

import asyncio

import pytest
import zmq

from noria.config import FrontendConfig
from noria.errors import GenerationFailed, NoriaError
from noria.frontend.engines.attempt import AttemptLostError
from noria.frontend.engines.client import EngineClient, EngineStatus
from noria.frontend.engines.crash_attribution import ExitReport
from noria.frontend.services.images.request_validation import validate
from noria.protocol.messages import (
    Cancel,
    CancelMount,
    EngineLoad,
    EngineState,
    Failed,
    Hello,
    LoadAck,
    Mount,
    MountResult,
    Preview,
    Progress,
    Release,
    Resume,
    Timings,
)
from noria.protocol.request import EngineRequest, ImageRequestBody
from noria.protocol.transport import EngineEndpoint
from noria.testing.fake_engine import FAKE_MODEL
from noria.testing.requests import make_image_request


class Connection:
    """Keeps what is sent, unless it is lost."""

    def __init__(self):
        self.sent, self.is_lost, self.is_closed = [], False, False

    def send(self, message, _data=None):
        if self.is_lost:
            raise zmq.Again
        self.sent.append(message)

    def close(self):
        self.is_closed = True


def test_a_message_that_arrives_while_a_request_is_cancelled_is_not_lost():
    async def scenario():
        connection = Connection()
        client = EngineClient(connection, "frontend-0", EngineEndpoint("engine-0", "ipc://unused"))
        client.send_hello()
        client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
        request = validate(ImageRequestBody("p"), FAKE_MODEL, FrontendConfig(), "name", lambda: 1, "alice")
        call = asyncio.create_task(client.submit(request, None))
        await asyncio.sleep(0)
        attempt_id = connection.sent[-1].attempt_id
        call.cancel()
        client.receive(Progress(attempt_id, 0, 0, 20, 0.0, 0.5), None)  # in the same turn of the event loop
        client.receive(Failed(attempt_id, "cancelled", "by the caller", timings=Timings(0.25)), None)
        (attempt,) = client._attempts.values()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call, 60)
        assert [type(each) for each in connection.sent[-2:]] == [EngineRequest, Cancel]
        assert attempt.predicted_s == 0.5
        assert attempt.failure.timings == Timings(0.25)

    asyncio.run(scenario())


def test_an_engine_gets_an_answer_to_its_load_so_that_it_sends_the_next_one():
    async def scenario():
        connection = Connection()
        client = EngineClient(connection, "frontend-0", EngineEndpoint("engine-0", "ipc://unused"))
        assert not client.receive(EngineLoad(2.0, 1, 3, 8), None)  # it has not connected
        client.send_hello()
        assert client.receive(EngineLoad(2.0, 1, 3, 8), None)
        assert connection.sent[-1] == LoadAck() not in connection.sent[:-1]

    asyncio.run(scenario())


def test_an_attempt_that_was_not_sent_before_its_engine_ended_waits_for_no_report():
    async def scenario():
        connection = Connection()
        client = EngineClient(connection, "frontend-0", EngineEndpoint("engine-0", "ipc://unused"))
        client.send_hello()
        client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
        request = validate(ImageRequestBody("p"), FAKE_MODEL, FrontendConfig(), "name", lambda: 1, "alice")
        calls = [
            asyncio.create_task(client.submit(request, None, resume=resume)) for resume in (None, None, Resume(request))
        ]
        await asyncio.sleep(0)
        sent, *unsent = connection.sent[1:]
        release = Release(sent.attempt_id)  # says nothing about the request itself
        client.handle_disconnect([*unsent, release])
        losses = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in losses} == {AttemptLostError}
        assert [each.exit_report is None for each in losses] == [False, True, True]

    asyncio.run(scenario())


def new_client(address="ipc://unused"):
    connection = Connection()
    client = EngineClient(connection, "frontend-0", EngineEndpoint("engine-0", address))
    client.send_hello()
    return client, connection


def test_an_engine_on_another_machine_gets_a_lease():
    for address, lease_s in (("ipc://unused", None), ("tcp://192.0.2.1:1", 20.0)):
        assert new_client(address)[1].sent == [Hello("frontend-0", lease_s)]


async def test_an_engine_is_what_it_last_reported_until_it_is_lost():
    client, _ = new_client()
    nothing = EngineStatus("unknown", None, None), False, False, ()
    assert (client.status(), client.ready, client.is_restarting, client.models) == nothing
    for state, device, is_ready, is_restarting in (
        ("loading", "auto", False, False),
        ("ready", "cpu", True, False),
        ("draining", "cpu", False, False),
        ("loading", "auto", False, True),
    ):
        client.receive(EngineState("a", state, (FAKE_MODEL,) if state == "ready" else (), device), None)
        assert client.status() == EngineStatus(state, None if device == "auto" else device, "a")
        assert (client.ready, client.is_restarting) == (is_ready, is_restarting)
        assert client.models == ((FAKE_MODEL,) if is_ready else ())
    client.receive(EngineState("a", "ready", (), "cpu", replaced=(FAKE_MODEL,)), None)
    assert (client.known_models, client.models) == ((FAKE_MODEL,), ())
    client.handle_disconnect()
    assert (client.status(), client.ready, client.is_restarting, client.is_connected) == (
        nothing[0],
        False,
        True,
        False,
    )
    client.is_leaving = True
    assert not client.is_restarting


async def test_an_engine_that_leaves_holds_no_model_for_new_requests():
    client, _ = new_client()
    client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
    client.is_leaving = True
    assert (client.models, client.known_models) == ((), (FAKE_MODEL,))


async def test_a_load_says_how_long_a_result_takes_and_counts_results_from_zero():
    client, _ = new_client()
    assert (client.reported_backlog_s, client.result_s) == (0.0, 0.0)
    client.num_results_since_load = 3
    for load, backlog_s, result_s in (
        (EngineLoad(2.0, 1, 3, 8), 2.0, 0.5),
        (EngineLoad(3.0, 2, 0, 8), 3.0, 1.5),
        (EngineLoad(0.0, 0, 0, 8), 0.0, 1.5),
    ):
        client.receive(load, None)
        assert (client.reported_backlog_s, client.result_s, client.num_results_since_load) == (backlog_s, result_s, 0)
    client.handle_disconnect()
    assert (client.reported_backlog_s, client.result_s) == (0.0, 1.5)


async def test_results_in_flight_are_those_of_requests_that_have_not_ended():
    client, connection = new_client()
    client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
    calls = [asyncio.create_task(client.submit(make_image_request("a", n=n), None)) for n in (2, 3)]
    await asyncio.sleep(0)
    first, second = connection.sent[-2:]
    assert (first.request_id, len({first.attempt_id, second.attempt_id, "a"})) == ("a", 3)
    assert (client.num_results_in_flight, client.num_results_since_load) == (5, 5)
    client.receive(Failed(first.attempt_id, "out_of_memory", "no", "n", 2.0), None)
    with pytest.raises(NoriaError) as raised:
        await calls[0]
    assert (raised.value.message, raised.value.field, raised.value.retry_after_s) == ("no", "n", 2.0)
    assert (client.num_results_in_flight, client.num_results_since_load) == (3, 5)
    client.handle_disconnect()
    with pytest.raises(AttemptLostError):
        await calls[1]
    assert client.num_results_in_flight == 0


async def test_a_request_that_cannot_be_sent_is_lost_and_the_engine_with_it():
    client, connection = new_client("tcp://192.0.2.1:1")
    client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
    connection.is_lost = True
    with pytest.raises(AttemptLostError) as raised:
        await client.submit(make_image_request(), None)
    assert (raised.value.exit_report, raised.value.is_remote) == (None, True)
    assert (client.is_connected, client.num_results_in_flight) == (False, 0)


async def test_an_invalid_reply_fails_its_request_alone(caplog):
    client, connection = new_client()
    client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
    calls = [asyncio.create_task(client.submit(make_image_request(name), None)) for name in "ab"]
    await asyncio.sleep(0)
    attempt_id = connection.sent[-2].attempt_id
    client.receive(Preview(attempt_id, 0, 1, 8, 8), None)  # without its pixels
    with pytest.raises(GenerationFailed, match="the engine's reply is invalid; the log has the details"):
        await calls[0]
    (record,) = caplog.records
    assert record.noria_fields == {"event": "invalid_engine_reply", "request_id": "a", "attempt_id": attempt_id}
    assert client.is_connected and not calls[1].done()
    client.receive(Failed(attempt_id, "cancelled", "late"), None)  # its attempt has ended
    client.handle_disconnect()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_how_an_engine_ended_is_known_from_its_next_process():
    for next_state, expected in (
        (EngineState("b", "loading", (), "auto", "crashed", ("x",)), ExitReport("crashed", frozenset("x"))),
        (EngineState("a", "ready", (FAKE_MODEL,), "cpu", "crashed", ("x",)), ExitReport("killed", frozenset())),
        (None, None),
    ):
        client, connection = new_client()
        client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
        call = asyncio.create_task(client.submit(make_image_request(), None))
        await asyncio.sleep(0)
        attempt_id = connection.sent[-1].attempt_id
        client.handle_disconnect()
        with pytest.raises(AttemptLostError) as raised:
            await call
        assert not raised.value.exit_report.done()
        if next_state is None:
            client.remove()
            report = ExitReport("killed", frozenset({attempt_id}))
        else:
            client.send_hello()
            client.receive(next_state, None)
        assert raised.value.exit_report.result() == (expected or report)
        assert connection.is_closed is (next_state is None)


async def test_a_mount_ends_with_the_engines_answer_or_with_the_engine():
    client, connection = new_client()
    client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
    calls = [asyncio.create_task(client.mount(FAKE_MODEL, 2)) for _ in range(4)]
    await asyncio.sleep(0)
    mounts = connection.sent[-4:]
    assert mounts == [Mount(each.change_id, FAKE_MODEL, max_loaded=2) for each in mounts]
    assert len({each.change_id for each in mounts}) == 4
    client.receive(MountResult(mounts[0].change_id, ""), None)
    client.receive(MountResult(mounts[1].change_id, "no memory"), None)
    client.receive(MountResult("unknown", "no"), None)
    calls[2].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert connection.sent[-1] == CancelMount(mounts[2].change_id)
    client.handle_disconnect()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [*results[:2], results[3]] == ["", "no memory", "engine-0 has ended"]
    assert isinstance(results[2], asyncio.CancelledError)
    connection.is_lost = True
    assert await client.mount(FAKE_MODEL, 2) == "engine-0 has ended"


async def test_requests_are_handed_over_once_and_only_where_another_engine_serves_them():
    client, connection = new_client()
    client.receive(EngineState("a", "ready", (FAKE_MODEL,), "cpu"), None)
    requests = [make_image_request(name, FAKE_MODEL.name, model_version=FAKE_MODEL.fingerprint) for name in "ab"]
    calls = [asyncio.create_task(client.submit(request, None)) for request in requests]
    await asyncio.sleep(0)
    first, second = connection.sent[-2:]
    assert client.movable_requests(0.0) == []  # until it has reported its load
    client.receive(EngineLoad(2.0, 1, 1, 8), None)
    assert client.movable_requests(0.0) == [second, first]
    connection.sent.clear()
    client.release(lambda _: True)  # it holds their model
    assert connection.sent == []
    client.is_leaving = True
    client.release(lambda request: request.request_id == "b")
    client.release(lambda request: request.request_id == "b")
    client.move([second, make_image_request("unknown")])
    assert connection.sent == [Release(second.attempt_id)]
    assert client.movable_requests(0.0) == []
    client.handle_disconnect()
    await asyncio.gather(*calls, return_exceptions=True)
