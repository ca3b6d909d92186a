"""Messages between an engine's channel and a client's connection, over a real socket."""

import asyncio

import pytest
import zmq

from noria.protocol.messages import EngineLoad, Failed, Hello, LoadAck
from noria.protocol.transport import Connected, Disconnected, EngineConnection
from noria.testing.fake_engine import open_channel
from waiting import TIMEOUT_S

LOAD = EngineLoad(1.0, 2, 3, 4)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e"


def run(scenario):
    async def limited():
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    asyncio.run(limited())


def test_single_messages_and_groups_arrive_in_order_with_their_data(address):
    channel, inbox = open_channel(address)

    async def scenario():
        connection = EngineConnection(address)
        events = connection.events()
        assert await anext(events) == Connected()
        await connection.send(Hello("a"), b"beside it")
        client, message, data = await asyncio.to_thread(inbox.get)
        assert (message, bytes(data)) == (Hello("a"), b"beside it")
        failures = [Failed(str(number), "cancelled", "") for number in range(5)]
        channel.send(client, failures[0])
        channel.send(client, failures[1], b"one")
        channel.send_group(client, [(failures[2], b"two"), (failures[3], None), (failures[4], b"four")])
        received = [await anext(events) for _ in failures]
        assert [message for message, _ in received] == failures
        assert [None if data is None else bytes(data) for _, data in received] == [None, b"one", b"two", None, b"four"]
        connection.close()

    run(scenario)
    channel.close()


def test_no_message_is_missed_while_both_sides_send(address):
    (channel, inbox), count = open_channel(address), 2000

    def answer():
        for _ in range(count):
            client, _, _ = inbox.get()
            channel.send(client, LOAD)

    async def scenario():
        connection = EngineConnection(address)
        events = connection.events()
        assert await anext(events) == Connected()
        answering = asyncio.create_task(asyncio.to_thread(answer))
        for _ in range(count // 8):
            for _ in range(8):
                await connection.send(LoadAck())
            for _ in range(8):
                assert await anext(events) == (LOAD, None)
        await answering
        connection.close()

    run(scenario)
    channel.close()


def test_a_lost_engine_is_noticed_and_found_again(address):
    async def scenario():
        connection = EngineConnection(address)
        with pytest.raises(zmq.Again):
            await connection.send(Hello("a"))
        events, (channel, _) = connection.events(), open_channel(address)
        assert await anext(events) == Connected()
        channel.close()
        assert await anext(events) == Disconnected()
        channel, inbox = open_channel(address)
        assert await anext(events) == Connected()
        await connection.send(Hello("a"))
        await asyncio.to_thread(inbox.get)
        connection.close()
        channel.close()

    run(scenario)
