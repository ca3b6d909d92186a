"""Attempts of one engine, with messages in an order that a network gives rarely."""

import asyncio

import pytest

from noria.config import FrontendConfig
from noria.frontend.engines.attempt import AttemptLostError
from noria.frontend.engines.client import EngineClient
from noria.frontend.services.images.request_validation import validate
from noria.protocol.messages import Cancel, EngineLoad, EngineState, Failed, LoadAck, Progress, Release, Resume, Timings
from noria.protocol.request import EngineRequest, ImageRequestBody
from noria.protocol.transport import EngineEndpoint
from noria.testing.fake_engine import FAKE_MODEL


class Connection:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message, _data=None):
        self.sent.append(message)


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
