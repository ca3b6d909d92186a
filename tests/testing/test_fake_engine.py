"""Answers of the fake engine to changes of its models."""

import msgspec
import pytest

from engine_client import Client
from noria.protocol.messages import EngineState, Finished, Hello, Mount, MountResult, Unmount
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from noria.testing.requests import make_image_request
from waiting import wait_until

NEWER = msgspec.structs.replace(FAKE_MODEL, fingerprint="newer0000000")


@pytest.fixture
def engine(tmp_path):
    with FakeEngine(f"ipc://{tmp_path}/e") as engine:
        yield engine


@pytest.fixture
def client(engine):
    client = Client(engine.address)
    client.send(Hello("test"))
    client.receive()
    yield client
    client.close()


def test_models_come_and_go(engine, client):
    client.send(Mount("a", NEWER), Unmount("b", FAKE_MODEL.name, FAKE_MODEL.fingerprint))
    both, mounted, one, unmounted = client.receive(4)
    assert (both.models, mounted) == ((FAKE_MODEL, NEWER), MountResult("a"))
    assert (one.models, unmounted) == ((NEWER,), MountResult("b"))
    assert [each.change_id for each in engine.model_changes] == ["a", "b"]
    engine.set_state("dead")
    engine.set_state("ready")
    wait_until(engine._state_commands.empty)
    client.send(Hello("test"))
    assert client.receive()[0].models == (FAKE_MODEL,)  # as after the restart of an engine


def test_a_mount_fails_with_the_given_sentence(engine, client):
    engine.mount_error = "it does not fit"
    client.send(Mount("a", NEWER), Hello("test"))
    result, state = client.receive(2)
    assert (result, state.models) == (MountResult("a", "it does not fit"), (FAKE_MODEL,))


def test_withheld_mounts_wait_while_requests_are_served(engine, client):
    engine.withholds_mounts = True
    client.send(Mount("a", NEWER))
    wait_until(lambda: engine.model_changes)
    client.send(make_image_request("1", "tiny"))
    assert isinstance(client.receive(2)[1], Finished)
    engine.withholds_mounts = False
    state, result = client.receive(2)
    assert (type(state), result) == (EngineState, MountResult("a"))
