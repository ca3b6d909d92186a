"""Messages between an engine's channel and a client's connection, over a real socket."""

import asyncio
import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from noria.protocol.messages import Cancel, EngineLoad, Failed, Hello, LoadAck
from noria.protocol.transport import (
    Connected,
    Disconnected,
    EngineChannel,
    EngineConnection,
    make_secret_key,
    pack,
    unpack,
)
from noria.testing.fake_engine import open_channel
from waiting import TIMEOUT_S, wait_until_async

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
        connection.send(Hello("a"), b"beside it")
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


@given(st.lists(st.tuples(st.binary(min_size=1), st.binary()), min_size=1))
def test_frames_say_which_data_belongs_to_each_message(messages):
    assert [(bytes(content), bytes(data or b"")) for content, data in unpack(pack(messages))] == messages


def test_lengths_that_are_cut_lose_messages_and_raise_nothing():
    lengths, contents, data = pack([(b"one", b""), (b"two", b"data")])
    assert [bytes(content) for content, _ in unpack([lengths[:-1], contents, data])] == [b"one"]


def test_messages_are_sent_together_and_in_order_until_a_turn_of_the_loop_has_none(address, monkeypatch):
    channel, inbox = open_channel(address)
    num_sends, send = 0, zmq.Socket.send

    def counted(self, frame, flags=0, **named):
        nonlocal num_sends
        num_sends += self.type == zmq.DEALER and not flags & zmq.SNDMORE
        return send(self, frame, flags, **named)

    monkeypatch.setattr(zmq.Socket, "send", counted)

    async def scenario():
        connection = EngineConnection(address)
        assert await anext(connection.events()) == Connected()
        sent = [(Hello("a"), None), (LoadAck(), b"beside it"), (Cancel("x"), None)]
        for message, data in sent:
            connection.send(message, data)
            await asyncio.sleep(0)
        received = [await asyncio.to_thread(inbox.get) for _ in sent]
        assert [(message, data and bytes(data)) for _, message, data in received] == sent
        assert num_sends == 1
        connection.close()

    run(scenario)
    channel.close()


def block_while_connected(connection, is_connected):
    """Block the loop as long as the connection has an engine, or has none."""
    while bool(connection._socket.get(zmq.EVENTS) & zmq.POLLOUT) == is_connected:
        time.sleep(0.001)


@pytest.mark.parametrize("is_tried", [False, True])
def test_what_waits_for_a_lost_engine_is_named_and_not_sent_to_its_successor(address, is_tried):
    channel, _ = open_channel(address)

    async def scenario():
        nonlocal channel
        connection = EngineConnection(address)
        events = connection.events()
        assert await anext(events) == Connected()
        connection.send(Cancel("lost"))
        channel.close()
        block_while_connected(connection, True)
        if is_tried:
            connection._send_now()  # as the loop may, before it reads that the engine has ended
        channel, inbox = open_channel(address)
        block_while_connected(connection, False)
        assert [await anext(events), await anext(events)] == [Disconnected((Cancel("lost"),)), Connected()]
        connection.send(Hello("a"))
        _, message, _ = await asyncio.to_thread(inbox.get)
        assert message == Hello("a")
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
                connection.send(LoadAck())
            for _ in range(8):
                assert await anext(events) == (LOAD, None)
        await answering
        connection.close()

    run(scenario)
    channel.close()


def test_what_arrives_while_the_engine_sends_wakes_its_thread_once(address):
    channel, inbox, may_read = EngineChannel(address), queue.Queue(), threading.Event()

    def on_message(client, message, _data):
        inbox.put((client, message))
        may_read.wait(TIMEOUT_S)

    channel.start(on_message)

    async def scenario():
        connection = EngineConnection(address)
        events = connection.events()
        assert await anext(events) == Connected()
        connection.send(Hello("a"))
        client, _ = await asyncio.to_thread(inbox.get)
        connection.send(LoadAck())
        while not is_awake(channel):
            channel.send(client, LOAD)
            await asyncio.sleep(0.01)
        may_read.set()
        assert (await asyncio.to_thread(inbox.get))[1] == LoadAck()
        await wait_until_async(lambda: not is_awake(channel))
        connection.close()

    run(scenario)
    channel.close()


def is_awake(channel):
    return bool(select.select([channel._wake], [], [], 0)[0])


def test_a_lost_engine_is_noticed_and_found_again(address):
    async def scenario():
        connection = EngineConnection(address)
        with pytest.raises(zmq.Again):
            connection.send(Hello("a"))
        events, (channel, _) = connection.events(), open_channel(address)
        assert await anext(events) == Connected()
        channel.close()
        assert await anext(events) == Disconnected()
        channel, inbox = open_channel(address)
        assert await anext(events) == Connected()
        connection.send(Hello("a"))
        await asyncio.to_thread(inbox.get)
        connection.close()
        channel.close()

    run(scenario)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "eth0", "[::]"])
def test_a_channel_that_other_machines_reach_needs_a_key(host):
    with pytest.raises(ValueError, match="needs a secret key"):
        EngineChannel(f"tcp://{host}:0")


def test_a_channel_with_a_key_takes_only_connections_that_have_it():
    """The same listening socket serves the engine's next process, too."""
    key, listener = make_secret_key(), socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    channel, inbox = open_channel(address, key, listener.dup())

    async def scenario():
        for wrong in ("", make_secret_key()):
            stranger = EngineConnection(address, wrong)
            events = stranger.events()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    async for event in events:
                        assert event == Disconnected()
            stranger.close()
        friend = EngineConnection(address, key)
        events = friend.events()
        assert await anext(events) == Connected()
        friend.send(Hello("a"), b"beside it")
        assert (await asyncio.to_thread(inbox.get))[1] == Hello("a")
        assert inbox.empty()
        channel.close()
        assert await anext(events) == Disconnected()
        again, second_inbox = open_channel(address, key, listener)
        while await anext(events) != Connected():
            pass
        friend.send(Hello("a"))
        assert (await asyncio.to_thread(second_inbox.get))[1] == Hello("a")
        friend.close()
        again.close()

    run(scenario)


def test_only_connections_between_machines_have_heartbeats(address):
    async def scenario():
        for where, interval_ms in (("tcp://127.0.0.1:*", 1000), (address, 0)):
            channel = EngineChannel(where)
            connection = EngineConnection(channel._socket.last_endpoint.decode())
            assert [each._socket.get(zmq.HEARTBEAT_IVL) for each in (channel, connection)] == [interval_ms] * 2
            connection.close()
            channel.close()

    run(scenario)


@pytest.mark.slow  # a silent machine counts as lost after three seconds
def test_a_machine_that_falls_silent_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, fd = f"tcp://127.0.0.1:{listener.getsockname()[1]}", listener.fileno()
        os.set_inheritable(fd, True)
        code = (
            "import socket, time; from noria.testing.fake_engine import open_channel; "
            f"open_channel({address!r}, '', socket.socket(fileno={fd})); time.sleep(600)"
        )
        engine = subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd])

    async def scenario():
        connection = EngineConnection(address)
        events = connection.events()
        while await anext(events) != Connected():
            pass
        engine.send_signal(signal.SIGSTOP)  # the kernel keeps its connections open
        stopped = time.monotonic()
        assert await anext(events) == Disconnected()
        assert 2 < time.monotonic() - stopped < 30
        connection.close()

    try:
        run(scenario)
    finally:
        engine.kill()
        engine.wait()
