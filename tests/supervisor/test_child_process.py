"""Facts that the supervisor learns of an engine from its states."""

import msgspec

from noria.config import EngineConfig
from noria.protocol.messages import EngineState
from noria.protocol.tasks import EngineTask
from noria.supervisor.child_process import engine_child
from noria.testing.fake_engine import FAKE_MODEL

NEWER = msgspec.structs.replace(FAKE_MODEL, fingerprint="newer0000000")


def test_an_engine_becomes_ready_once_in_each_run_however_often_its_models_change():
    task = EngineTask(EngineConfig(), (FAKE_MODEL,), "cpu", "ipc://e", "engine-0", "/nowhere/crash_journal")
    engine = engine_child(task, lambda: [NEWER])
    engine.started(0.0)
    assert not engine.update_state(EngineState("a", "loading", (), "cpu"))
    assert engine.update_state(EngineState("a", "ready", (FAKE_MODEL,), "cpu"))
    assert not engine.update_state(EngineState("a", "ready", (FAKE_MODEL, NEWER), "cpu"))
    assert engine.incarnation == "a"
    engine.ended(-9, 1.0)
    assert not engine.update_state(EngineState("a", "ready", (FAKE_MODEL,), "cpu"))  # sent before it ended
    engine.prepare()
    assert engine.task.models == (NEWER,)  # what is deployed by then
    engine.started(2.0)
    assert engine.update_state(EngineState("b", "ready", (FAKE_MODEL,), "cpu"))
