"""A client that requests ever new combinations of a scheduler and a number of steps, and abandons most of them."""

import itertools
import queue
import threading
import time

import msgspec
import pytest

from noria.config import FrontendConfig
from noria.engine.commands import SubmitCommand
from noria.engine.compile_queue import MAX_WAITING
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.monitoring.watchdog import HangWatchdog
from noria.engine.receiver import RequestReceiver
from noria.engine.runtime import StepRuntime
from noria.images.scheduler_names import choices_of_family
from noria.models.catalog import open_model
from noria.protocol.messages import Cancel, Failed, Ping, Pong
from noria.sampling import compile as compiler
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import VirtualClock
from waiting import TIMEOUT_S, wait_until

MODEL = "noria-shapes"
CONNECTION = b"front end"


def request(attempt_id, steps, client="", scheduler="ddim"):
    made = make_image_request(attempt_id, MODEL, inference_steps=steps, scheduler=scheduler)
    return msgspec.structs.replace(made, client=client)


class CompilingExecutor(FakeExecutor):
    """A fake device with the real compiler; `go_on` blocks it. Remembers which thread compiled what."""

    def __init__(self):
        super().__init__(VirtualClock())
        self.go_on = threading.Event()
        self.go_on.set()
        self.compiled, self.threads = [], set()

    def is_compiled(self, request):
        return compiler.is_compiled(request.payload.scheduler, {}, request.payload.inference_steps)

    def prepare(self, request, data=None):
        if not self.is_compiled(request):
            self.compiled.append(request.attempt_id)
            self.threads.add(threading.current_thread().name)
            assert self.go_on.wait(TIMEOUT_S)
        compiler.compile_sampler(request.payload.scheduler, {}, request.payload.inference_steps)
        return super().prepare(request, data)


class Channel:
    """The channel of an engine, whose clients are the test."""

    def __init__(self):
        self.sent = queue.SimpleQueue()

    def send(self, client, message, data=None):
        self.sent.put(message)

    def receive(self):
        return self.sent.get(timeout=TIMEOUT_S)


class Engine(RequestReceiver):
    """A receiver with its compiler, which ends with its test."""

    def __init__(self, folder, journal):
        self.channel = Channel()
        super().__init__(
            self.channel,
            [open_model(str(folder))],
            "cpu",
            watchdog=HangWatchdog(60.0, time.monotonic),
            crash_journal=CrashJournal(journal),
        )
        self.executor = CompilingExecutor()
        self.set_ready(StepRuntime(self.executor, StepScheduler(4)))

    def stop(self):
        self.executor.go_on.set()
        self._preparer._thread.shutdown()
        self.crash_journal.close()

    def submit(self, *requests):
        with self._turn():  # as the channel does
            for each in requests:
                self.receive(CONNECTION, each)

    def cancel(self, attempt_id):
        self.receive(CONNECTION, Cancel(attempt_id))

    def answers_a_ping(self):
        """Whether the ping is answered after all messages so far; returns them too."""
        self.receive(CONNECTION, Ping())
        return list(
            itertools.takewhile(lambda message: not isinstance(message, Pong), iter(self.channel.receive, None))
        )

    def prepared(self, count):
        """The ids of the next `count` requests that reach the loop."""
        commands = [self.commands.get(timeout=TIMEOUT_S) for _ in range(count)]
        assert all(isinstance(command, SubmitCommand) for command in commands)
        return [command.prepared.request.attempt_id for command in commands]


@pytest.fixture
def engine(tmp_path, bundled_folder, monkeypatch):
    monkeypatch.setattr(compiler, "_cache", compiler._Cache(10 * compiler._ENTRY_BYTES))
    engine = Engine(bundled_folder, tmp_path / "in-flight")
    yield engine
    engine.stop()


def test_combinations_that_the_cache_has_dropped_are_not_compiled_by_the_thread_that_answers_pings(engine):
    requests = [request(f"first-{steps}", steps) for steps in range(1, 31)]
    engine.submit(*requests)
    engine.prepared(len(requests))
    engine.executor.compiled.clear()
    engine.submit(*(msgspec.structs.replace(each, attempt_id=f"again-{each.attempt_id}") for each in requests[:10]))
    engine.prepared(10)
    assert len(engine.executor.compiled) == 10
    assert not [name for name in engine.executor.threads if not name.startswith("compiler")]


def test_pings_are_answered_while_the_longest_queue_is_compiled(engine):
    engine.executor.go_on.clear()
    engine.submit(*(request(str(steps), steps) for steps in range(1, MAX_WAITING + 1)))
    assert engine.answers_a_ping() == []


def test_abandoned_requests_are_never_compiled(engine):
    engine.executor.go_on.clear()
    engine.submit(request("first", 2))
    wait_until(lambda: engine.executor.compiled)
    for number in range(200):
        engine.submit(request(str(number), 100 + number))
        engine.cancel(str(number))
    answers = engine.answers_a_ping()
    assert [(each.attempt_id, each.code) for each in answers] == [(str(number), "cancelled") for number in range(200)]
    engine.submit(request("quiet", 3))
    engine.executor.go_on.set()
    assert engine.prepared(2) == ["first", "quiet"]
    assert engine.executor.compiled == ["first", "quiet"]


@pytest.mark.parametrize(("attacker", "quiet"), [("mallory", "alice"), ("", "")], ids=["with keys", "without keys"])
def test_the_queue_is_bounded_and_the_next_turn_is_that_of_a_client_with_one_request(engine, attacker, quiet):
    engine.executor.go_on.clear()
    engine.submit(request("first", 2, attacker))
    wait_until(lambda: engine.executor.compiled)
    engine.submit(*(request(str(number), 30 + number % 100, attacker) for number in range(300)))
    engine.submit(request("quiet", 20, quiet))
    answers = engine.answers_a_ping()
    assert len(answers) == 301 - MAX_WAITING
    assert {(type(each), each.code) for each in answers} == {(Failed, "queue_full")}
    assert all(each.retry_after_s > 0 and each.attempt_id != "quiet" for each in answers)
    engine.executor.go_on.set()
    assert "quiet" in engine.prepared(3)
    engine.prepared(MAX_WAITING - 2)


def test_every_combination_of_the_default_range_fits_the_cache():
    num_bytes, max_steps = 0, FrontendConfig().max_steps
    for choice in choices_of_family("diffusion"):
        table = compiler.compile_sampler(choice, {}, 10)
        key = None, 10, compiler.DEFAULT_SCHEDULE, None  # only the schedule counts
        per_step = (compiler._size_bytes(key, table) - compiler._ENTRY_BYTES) / table.num_steps
        num_bytes += sum(compiler._ENTRY_BYTES + per_step * steps for steps in range(1, max_steps + 1))
    assert num_bytes <= compiler._MAX_CACHE_BYTES
