"""An engine without a model, for tests of front ends and of clients: real messages over a real channel, flat images.

    with FakeEngine("ipc://engine.sock") as engine:
        app = noria.frontend.app.build_app(Config(), EnginePool([engine.address]))

It runs in a thread of this process. By default it accepts each request and each change of its models, and answers at
once; its attributes make it withhold replies, fail, or crash. They may be changed while it runs, and take effect with
the next message.
"""

import contextlib
import functools
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import (
    Cancel,
    CancelMount,
    EngineLoad,
    EngineState,
    EngineView,
    ExitCause,
    Failed,
    FromEngine,
    HandedOver,
    Hello,
    ImageDone,
    ImageState,
    LoadAck,
    ModelPrecision,
    Mount,
    MountResult,
    NotHeld,
    Progress,
    Release,
    Resume,
    ShapeCosts,
    StateRefused,
    ToEngine,
    Unmount,
    ViewRequest,
)
from noria.protocol.request import AnyRequest, EngineRequest
from noria.protocol.text import EncoderModelSpec, TextPayload
from noria.protocol.transport import ClientId, EngineChannel
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_replies import Reply, image_replies, progress_replies, text_reply

FakeEngineState = Literal["ready", "loading", "draining", "dead"]

FAKE_MODEL = DiffusionModelSpec(
    name="tiny",
    folder="/nowhere",
    fingerprint="0123456789ab",
    family="stable-diffusion",
    pipeline="StableDiffusionPipeline",
    default_width_px=64,
    default_height_px=48,
    min_side_px=16,
    max_side_px=128,
    multiple_px=8,
    default_scheduler="ddim",
    schedulers=("ddim", "euler", "pndm"),
    default_steps=12,
    default_guidance=6.5,
    prompt_syntaxes=("plain", "a1111"),
    max_clip_skip=12,
    family_clip_skip=1,
    default_clip_skip=1,
    num_parameters=1000,
)
"""The model that a fake engine serves."""

FAKE_LOAD = EngineLoad(
    backlog_s=1.5,
    num_running=2,
    num_waiting=3,
    num_slots=4,
    costs=(ShapeCosts("tiny", 64, 48, {1: 0.01, 2: 0.015}, {1: 0.002}, 0.001, 8),),
    precisions=(ModelPrecision("fake-encoder", FAKE_ENCODER.fingerprint, "int8", 0.999),),
)
"""The load that a fake engine reports by default."""

_POLL_INTERVAL_S = 0.01
_CRASH_DELAY_S = 0.1  # so that requests submitted at the same time are in flight when it crashes

Inbox = queue.SimpleQueue[tuple[ClientId, ToEngine, memoryview | None]]


def open_channel(
    address: str, secret_key: str = "", listener: socket.socket | None = None
) -> tuple[EngineChannel, Inbox]:
    """Return an engine's channel, as `EngineChannel` opens it, and the queue of the messages that it receives."""
    channel, inbox = EngineChannel(address, secret_key, listener), Inbox()
    channel.start(lambda *received: inbox.put(received))
    return channel, inbox


class FakeEngine:
    """Answers each request at once with images in one colour, which depends on the seed. A context manager."""

    def __init__(
        self,
        address: str,
        state: FakeEngineState = "ready",
        models: tuple[AnyModelSpec, ...] = (FAKE_MODEL,),
        load: EngineLoad = FAKE_LOAD,
    ) -> None:
        """Listen at `address`, such as "ipc://engine.sock", in `state`; `set_state` changes it a moment later.

        It reports `load` to each front end, once.
        """
        self.address, self.models, self._load = address, models, load
        self._first_state = state
        self._delayed: list[tuple[float, bytes, FromEngine, bytes | None]] = []  # when to send it, and to whom
        self._state_commands: queue.SimpleQueue[FakeEngineState] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.reset()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Forget all messages and behave by default again. The state stays."""
        # What it has received.
        self.submitted: list[AnyRequest] = []  # one for each attempt
        self.data: list[bytes | None] = []  # the frames beside them
        self.resumed: list[Resume] = []  # those of `submitted` that other engines have handed over
        self.cancelled: list[str] = []
        self.view_requests: list[ViewRequest] = []
        self.hello_names: list[str] = []  # the names of the front ends that connected
        self.num_load_acks = 0
        self.model_changes: list[Mount | Unmount] = []
        self.cancelled_mounts: list[str] = []  # their change ids, once they are no longer answered
        self.in_flight: list[str] = []  # withheld requests; reported as in flight after a crash
        # How it answers.
        self.never_answers = False  # accepts requests and sends nothing more
        self.sends_no_images = False  # sends progress and previews, and nothing more
        self.sends_invalid_replies = False  # finishes without having sent an image
        self.failure: Mapping[str, Any] | None = None  # fails every request; the fields of `Failed`
        self.failures: dict[str, Mapping[str, Any]] = {}  # as `failure`, of single versions, by fingerprint
        self.delays_s: dict[str, float] = {}  # until answers are sent, of single versions; it counts as computing time
        self.shades: dict[str, int] = {}  # the blue of their images, 0 to 255; others have 200
        self.safety_scores: dict[int, float] = {}  # scores of images by seed; those from 0.5 are refused
        self.states: tuple[ImageState, ...] = ()  # states of the images of a withheld request that is released
        self.states_data = b""  # their bytes
        self.refuses_states = False
        self.answers_cancel = True
        # more fields of the `Failed` that answers a `Cancel`
        self.cancel_progress: Mapping[str, Any] = MappingProxyType({})
        self.mount_error = ""  # the sentence with which every `Mount` fails; empty: none does
        self.withholds_mounts = False  # until it is false again, mounts wait
        self.num_not_held = 0  # answers so many requests with `NotHeld`
        self.max_models: int | None = None  # a `Mount` beside so many fails; None: memory holds all
        # Returns its reply to a `ViewRequest` and the bytes of the thumbnails, given its incarnation; None: no reply.
        self.make_view: Callable[[ViewRequest, str], tuple[EngineView, bytes | None] | None] = lambda *_: None
        # When it crashes.
        self.num_crashes_left = 0  # at each submit, until this is 0
        self.crash_seed: int | None = None  # at each submit of this seed
        self.restarts = True  # at once after such a crash
        self.exit_cause: ExitCause = "crashed"  # cause of every end, as reported after the restart

    def colour(self, seed: int, version: str = "") -> tuple[int, int, int]:
        """Return the RGB colour of the image of `seed`."""
        return seed % 251, seed % 13, self.shades.get(version, 200)

    def set_state(self, state: FakeEngineState) -> None:
        """Change the state. "dead" closes the channel; any other state after it is a restart: a new incarnation."""
        self._state_commands.put(state)

    def stop(self) -> None:
        """Close the channel and end the thread."""
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        state, channel, inbox = self._first_state, *open_channel(self.address)
        clients: set[bytes] = set()
        run = _Run(self.models)
        mounts: list[tuple[bytes, Mount | Unmount]] = []  # to answer
        while not self._stopped.is_set():
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                _, client, late, frame = self._delayed.pop(0)
                channel.send(client, late, frame)
            with contextlib.suppress(queue.Empty):
                state = self._state_commands.get_nowait()
                if state == "dead":
                    channel.close()
                    state = self._wait_for_restart()
                    (channel, inbox), clients = open_channel(self.address), set()
                    run, self.in_flight = _Run(self.models, self.exit_cause, tuple(self.in_flight)), []
                    mounts, self._delayed = [], []
                for client in clients:
                    channel.send(client, run.state_message(state))
            with contextlib.suppress(queue.Empty):
                client, message, data = inbox.get(timeout=_POLL_INTERVAL_S)
                if isinstance(message, Hello):
                    self.hello_names.append(message.name)
                    clients.add(client)
                    channel.send(client, run.state_message(state))
                    channel.send(client, self._load)
                if isinstance(message, EngineRequest | Resume):
                    self.data.append(None if data is None else bytes(data))
                if isinstance(message, Mount | Unmount):
                    self.model_changes.append(message)
                    mounts.append((client, message))
                    if run.replace(message):
                        for each in clients:
                            channel.send(each, run.state_message(state))
                self._cancel_mount(mounts, message)
                self._handle(channel, client, message, data, run)
            while mounts and not (self.withholds_mounts and isinstance(mounts[0][1], Mount)):
                client, change = mounts.pop(0)
                before, error = run.models, self._change_models(run, change)
                for each in clients if run.models != before or not error else ():
                    channel.send(each, run.state_message(state))
                channel.send(client, MountResult(change.change_id, error))
        channel.close()

    def _cancel_mount(self, mounts: list[tuple[bytes, Mount | Unmount]], message: object) -> None:
        if isinstance(message, CancelMount):
            mounts[:] = [each for each in mounts if each[1].change_id != message.change_id]
            self.cancelled_mounts.append(message.change_id)

    def _change_models(self, run: "_Run", change: Mount | Unmount) -> str:
        """Change the models until the next restart; return why not, if it fails."""
        replaced, run.replaced = run.replaced, ()
        error = self._try_change(run, change)
        if error:
            run.models += replaced
        return error

    def _try_change(self, run: "_Run", change: Mount | Unmount) -> str:
        match change:
            case Mount(model=spec) if self.mount_error:
                return self.mount_error
            case Mount() if self.max_models is not None and len(run.models) >= self.max_models:
                return "it does not fit the memory."
            case Mount(model=spec):
                run.models = (*(each for each in run.models if each.key != spec.key), spec)
            case Unmount(name=name, version=version) if {each.key for each in run.models} == {(name, version)}:
                return "it is the only model of this engine; mount another one first."
            case Unmount(name=name, version=version):
                run.models = tuple(each for each in run.models if each.key != (name, version))
        return ""

    def _wait_for_restart(self) -> FakeEngineState:
        state: FakeEngineState = "dead"
        while state == "dead" and not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                state = self._state_commands.get(timeout=_POLL_INTERVAL_S)
        return state

    def _handle(
        self, channel: EngineChannel, client: bytes, message: object, data: memoryview | None, run: "_Run"
    ) -> None:
        match message:
            case LoadAck():
                self.num_load_acks += 1
            case ViewRequest():
                self.view_requests.append(message)
                if (reply := self.make_view(message, run.incarnation)) is not None:
                    channel.send(client, *reply)
            case Cancel(attempt_id=attempt_id):
                self.cancelled.append(attempt_id)
                if self.answers_cancel:
                    channel.send(client, Failed(attempt_id, "cancelled", "cancelled", **self.cancel_progress))
            case Release(attempt_id=attempt_id) if attempt_id in self.in_flight:
                self.in_flight.remove(attempt_id)
                version = self.models[0].fingerprint
                channel.send(client, HandedOver(attempt_id, self.states, version), self.states_data or None)
            case EngineRequest() if self.num_not_held:
                self.num_not_held -= 1
                self.submitted.append(message)
                channel.send(client, NotHeld(message.attempt_id))
            case EngineRequest():
                self._submit(channel, client, message, data, run)
            case Resume(request=request):
                self.resumed.append(message)
                if message.images and self.refuses_states:
                    channel.send(client, StateRefused(request.attempt_id, "another table"))
                else:
                    self._submit(channel, client, request, data, run, message.done)

    def _submit(
        self,
        channel: EngineChannel,
        client: bytes,
        request: AnyRequest,
        data: memoryview | None,
        run: "_Run",
        done: tuple[int, ...] = (),
    ) -> None:
        # Decided before the request is in `submitted`: a test that sees it there may change the behaviour for the next
        # one.
        crashes = self._crashes_on(request)
        withholds = crashes or self.never_answers
        replies = [
            reply
            for reply in self._replies(request, data, withholds, run.models)
            if not (isinstance(reply[0], ImageDone) and reply[0].index in done)
        ]
        if withholds:
            self.in_flight.append(request.attempt_id)
        if crashes:
            self.set_state("dead")
            if self.restarts:
                self.set_state("ready")
        self.submitted.append(request)
        if not (delay_s := self.delays_s.get(request.model_version, 0.0)):
            for reply in replies:
                channel.send(client, *reply)
            return
        at = time.monotonic() + delay_s
        self._delayed += [(at, client, *reply) for reply in replies]
        self._delayed.sort(key=lambda each: each[0])

    def _crashes_on(self, request: AnyRequest) -> bool:
        if not isinstance(request.payload, TextPayload) and request.payload.seed == self.crash_seed:
            time.sleep(_CRASH_DELAY_S)
            return True
        if self.num_crashes_left == 0:
            return False
        self.num_crashes_left -= 1
        return True

    def _replies(
        self, request: AnyRequest, data: memoryview | None, withholds: bool, models: tuple[AnyModelSpec, ...]
    ) -> Iterator[Reply]:
        """Yield the replies; only the acceptance if it withholds the rest."""
        attempt_id, payload, version = request.attempt_id, request.payload, request.model_version
        failure = self.failure or self.failures.get(version)
        if not failure and not isinstance(payload, TextPayload):
            yield Progress(attempt_id, 0, 0, payload.num_steps, 0.0, 0.5), None
        if withholds:
            return
        if failure:
            yield Failed(attempt_id, **failure), None
        elif isinstance(payload, TextPayload):
            spec = next(each for each in models if each.matches(request.model, version))
            assert isinstance(spec, EncoderModelSpec)
            yield text_reply(request, spec, data)
        else:
            num_images = 0 if self.sends_invalid_replies else payload.n
            yield from progress_replies(request, num_images, self.colour)
            if not self.sends_no_images:
                colour = functools.partial(self.colour, version=version)
                denoise_s = 0.003 + self.delays_s.get(version, 0.0)
                yield from image_replies(request, data, num_images, colour, denoise_s, self.safety_scores)


class _Run:
    """A run of the engine's process, from a start to an end."""

    def __init__(
        self, models: tuple[AnyModelSpec, ...], previous_exit: ExitCause = "none", in_flight: tuple[str, ...] = ()
    ) -> None:
        """`in_flight` are the attempts that the previous run lost."""
        self.incarnation, self.models = uuid.uuid4().hex, models
        self.replaced: tuple[AnyModelSpec, ...] = ()
        self._previous_exit, self._in_flight = previous_exit, in_flight

    def replace(self, change: Mount | Unmount) -> bool:
        """Release what a mount replaces; return whether that is something."""
        if isinstance(change, Mount):
            self.replaced = tuple(each for each in self.models if each.key in change.replaces)
            self.models = tuple(each for each in self.models if each not in self.replaced)
        return bool(self.replaced)

    def state_message(self, state: FakeEngineState) -> EngineState:
        if state in ("ready", "draining"):
            return EngineState(
                self.incarnation, state, self.models, "cpu", self._previous_exit, self._in_flight, self.replaced
            )
        return EngineState(self.incarnation, "loading", (), "cpu", self._previous_exit, self._in_flight)
