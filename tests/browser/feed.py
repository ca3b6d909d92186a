"""A server of the pages with a scripted engine: the real files and the declared JSON, but no model.

Its views are a function of the time since its start, so that every run of a test sees the same. `python
tests/browser/feed.py 64` serves one with 64 slots to look at.
"""

import asyncio
import base64
import collections
import contextlib
import dataclasses
import io
import itertools
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from noria.engine.live.shares import share_views
from noria.frontend.access.auth import ClientDirectory
from noria.frontend.pages.routes import page_operations
from noria.frontend.routing import routes_of
from noria.protocol.diffusion import Control, ImageSettingsView, Lora, Reference, Refinement
from noria.protocol.live_views import (
    CallSizeView,
    DepartureView,
    IterationView,
    RatesView,
    ShareView,
    SlotView,
    ThumbnailView,
    WaitingView,
)
from noria.protocol.messages import EngineView

SCHEDULERS = ("euler", "dpm++2m-karras", "ddim", "unipc", "euler-a", "heun")
ITERATION_S = 0.05
THUMBNAIL_PX = 16
LORAS = ("outline", "night")
PROPERTIES = {
    "width": {
        "anyOf": [{"type": "integer"}, {"type": "null"}],
        "minimum": 64,
        "maximum": 192,
        "multipleOf": 32,
        "default": 128,
    },
    "height": {
        "anyOf": [{"type": "integer"}, {"type": "null"}],
        "minimum": 64,
        "maximum": 192,
        "multipleOf": 32,
        "default": 128,
    },
    "inference_steps": {"minimum": 1, "maximum": 200, "default": 20},
    "guidance_scale": {"minimum": 0, "maximum": 50, "default": 3.0},
    "scheduler": {"type": "string", "default": "ddim", "examples": list(SCHEDULERS)},
    "deadline_ms": {"minimum": 1, "maximum": 600_000},
}


class Script:
    """The running batch of one engine: images of mixed shapes join, step and leave, one iteration each `ITERATION_S`."""

    def __init__(
        self,
        num_slots: int,
        started_at: float,
        *,
        arriving: bool = True,
        paused: tuple[int, ...] = (),
        clients: tuple[str, ...] = (),
    ) -> None:
        """Images in the slots `paused` make no steps; requests are of the `clients` in turn."""
        self._clients = clients
        self.num_slots, self._started_at, self._arriving, self._paused = num_slots, started_at, arriving, paused
        self._random = random.Random(7)
        self._ids = itertools.count(1)
        self._last_iteration = 0
        self._slots: dict[int, SlotView] = {}
        self._waiting: list[WaitingView] = []
        self._iterations: list[IterationView] = []
        self._departures: list[DepartureView] = []

    def view(self, now: float) -> EngineView:
        """The view at `now`, with the iterations and departures since the last one."""
        while self._started_at + (self._last_iteration + 1) * ITERATION_S <= now:
            self._iterate()
        iterations, self._iterations = tuple(self._iterations), []
        departures, self._departures = tuple(self._departures), []
        occupancy = len(self._slots) / self.num_slots
        slots = tuple(self._slots[slot] for slot in sorted(self._slots))
        return EngineView(
            incarnation="first",
            captured_at=now,
            last_iteration=self._last_iteration,
            num_slots=self.num_slots,
            slots=slots,
            waiting=tuple(self._waiting),
            num_waiting=sum(waiting.num_images for waiting in self._waiting),
            backlog_s=2.5 if slots else 0.0,
            iterations=iterations,
            departures=departures,
            rates=RatesView(
                window_s=10.0,
                requests_per_s=4.2,
                images_per_s=5.25,
                steps_per_s=len(slots) / ITERATION_S,
                p50_s=1.31,
                p95_s=2.42,
                p99_s=3.07,
                mean_batch=float(len(slots)),
                occupancy=occupancy,
                busy=0.97 if slots else 0.0,
            ),
            thumbnails=tuple(
                ThumbnailView(
                    image.slot,
                    image.request_id,
                    image.index,
                    THUMBNAIL_PX,
                    THUMBNAIL_PX,
                    THUMBNAIL_PX * THUMBNAIL_PX * 3 * number,
                )
                for number, image in enumerate(slots)
            ),
            shares=self._shares(slots),
        )

    def _shares(self, slots: tuple[SlotView, ...]) -> tuple[ShareView, ...]:
        """Each client has as much of the device as of the slots; of those that wait, the first one is evicted."""
        running = collections.Counter(slot.share_client for slot in slots)
        waiting = collections.Counter(each.share_client for each in self._waiting for _ in range(each.num_images))
        evicted = {self._waiting[0].share_client: 1} if self._waiting else {}
        return share_views({name: num / len(slots) for name, num in running.items()}, slots, waiting, evicted)

    def _iterate(self) -> None:
        self._last_iteration += 1
        at = self._started_at + self._last_iteration * ITERATION_S
        num_joined = num_stepped = num_decoded = 0
        num_rows: collections.Counter[tuple[int, int]] = collections.Counter()
        if self._arriving:
            while sum(waiting.num_images for waiting in self._waiting) < max(3, self.num_slots // 4):
                self._waiting.append(self._waiting_request(at))
        for slot in range(self.num_slots):
            if slot not in self._slots and self._waiting and num_joined < 2:
                num_joined += 1
                self._slots[slot] = self._join(slot, at)
        for slot, image in list(self._slots.items()):
            if slot in self._paused:
                self._slots[slot] = msgspec.structs.replace(image, paused=True)
            elif image.call == image.num_calls:
                del self._slots[slot]
                num_decoded += 1
                outcome = "deadline_exceeded" if int(image.request_id[1:]) % 17 == 16 else "ok"
                self._departures.append(
                    DepartureView(self._last_iteration, slot, image.request_id, image.index, outcome)
                )
            else:
                num_stepped += 1
                num_rows[image.settings.width, image.settings.height] += 1
                self._slots[slot] = msgspec.structs.replace(image, call=image.call + 1)
        sizes = [(*size, rows) for size, rows in sorted(num_rows.items(), reverse=True)]
        self._iterations.append(
            IterationView(
                self._last_iteration,
                at - ITERATION_S,
                ITERATION_S * 0.97,
                0.004 * num_joined,
                0.006 * min(num_decoded, 2),
                num_joined,
                num_stepped,
                num_decoded,
                call_sizes=tuple(CallSizeView(*each) for each in sizes) if len(sizes) > 1 else (),
            )
        )

    def _waiting_request(self, at: float) -> WaitingView:
        number = next(self._ids)
        steps = self._random.choice((12, 20, 20, 30, 50, 80))
        side = self._random.choice((128, 128, 96))
        return WaitingView(
            request_id=f"r{number:04d}",
            num_images=1 + (number % 3 == 0),
            model="scripted",
            settings=ImageSettingsView(
                side,
                128,
                SCHEDULERS[number % len(SCHEDULERS)],
                self._random.choice((1.0, 3.0, 7.5)),
                steps,
                loras=((), (Lora(LORAS[0]),), (Lora(LORAS[1], 0.8),))[number % 3],
                strength=0.6 if number % 2 else None,
                has_mask=number % 4 == 1,
                controls=() if number % 3 else (Control("edges", 0.8),),
                reference_images=() if number % 5 else (Reference(64, 64),) * 2,
                refiner=Refinement(0.7) if number % 5 == 1 else None,
            ),
            priority="high" if number % 11 == 0 else "normal",
            arrived_at=at,
            start_at=at + 0.8,
            deadline_at=at + 2.0 if number % 4 == 1 else None,
            share_client=self._clients[number % len(self._clients)] if self._clients else "",
        )

    def _join(self, slot: int, at: float) -> SlotView:
        waiting = self._waiting[0]
        if waiting.num_images > 1:
            self._waiting[0] = msgspec.structs.replace(waiting, num_images=waiting.num_images - 1)
        else:
            del self._waiting[0]
        steps = waiting.settings.inference_steps
        num_calls = steps * 2 - 1 if waiting.settings.scheduler == "heun" else steps
        return SlotView(
            slot=slot,
            request_id=waiting.request_id,
            index=waiting.num_images - 1,
            model=waiting.model,
            settings=waiting.settings,
            call=0,
            num_calls=num_calls,
            priority=waiting.priority,
            joined_at=at,
            deadline_at=waiting.deadline_at,
            finish_at=at + num_calls * ITERATION_S,
            share_client=waiting.share_client,
        )


def event_data(engine: str, view: EngineView, *, with_thumbnails: bool) -> dict[str, object]:
    """The event of `view` as in the stream: with the engine's name, and the thumbnails in a sprite sheet."""
    fields = msgspec.to_builtins(view)
    del fields["type"]
    thumbnails = fields.pop("thumbnails")
    if not with_thumbnails or not thumbnails:
        return {"engine": engine, **fields, "thumbnails": []}
    sheet = Image.new("RGB", (THUMBNAIL_PX * len(thumbnails), THUMBNAIL_PX))
    for number, (thumbnail, image) in enumerate(zip(thumbnails, view.slots, strict=True)):
        del thumbnail["offset"]
        thumbnail |= {"x": number * THUMBNAIL_PX, "y": 0}
        sheet.paste(draw_image(int(image.request_id[1:]), image.call / image.num_calls), (number * THUMBNAIL_PX, 0))
    file = io.BytesIO()
    sheet.save(file, "jpeg", quality=80, subsampling=0)
    b64 = base64.b64encode(file.getvalue()).decode()
    return {
        "engine": engine,
        **fields,
        "thumbnails": thumbnails,
        "sprite_sheet": {"format": "jpeg", "b64": b64, "width": sheet.width, "height": sheet.height},
    }


def draw_image(number: int, progress: float) -> Image.Image:
    """A disc on a background, blended with noise that vanishes as `progress` goes from 0 to 1."""
    hue = number * 47 % 256
    background = Image.new("HSV", (THUMBNAIL_PX, THUMBNAIL_PX), (hue, 130, 225))
    disc = Image.new("HSV", (THUMBNAIL_PX, THUMBNAIL_PX), ((hue + 110) % 256, 200, 160))
    mask = (
        Image.radial_gradient("L").resize((THUMBNAIL_PX, THUMBNAIL_PX)).point(lambda value: 255 if value < 100 else 0)
    )
    background.paste(disc, mask=mask)
    noise = Image.effect_noise((THUMBNAIL_PX, THUMBNAIL_PX), 120).convert("RGB")
    return Image.blend(noise, background.convert("RGB"), min(1.0, progress * 1.2))


@dataclasses.dataclass
class Feed:
    """The behaviour of the server; tests change it while it runs."""

    num_slots: int = 8
    num_engines: int = 1
    arriving: bool = True
    paused: tuple[int, ...] = ()  # slots
    clients: tuple[str, ...] = ()  # whose requests there are, in turn
    thumbnails: bool = True
    takes_start_images: bool = True
    states: dict[str, str] = dataclasses.field(default_factory=dict)  # states of engines that are not ready
    api_key: str | None = None  # required if set
    error: tuple[int, str, str] | None = None  # status, code and message, instead of the stream
    generation: int = 0  # streams of an earlier one end
    num_opened: int = 0
    requests: list[dict[str, object]] = dataclasses.field(default_factory=list)  # the bodies of POST /t2i
    port: int = 0

    @property
    def url(self) -> str:
        """The URL of the live page."""
        return f"http://127.0.0.1:{self.port}/live"

    def app(self) -> Starlette:
        """The pages, the scripted stream, and the other routes that the live page uses."""
        return Starlette(
            routes=[
                Route("/v1/live", self._live),
                Route("/t2i", self._t2i, methods=["POST"]),
                Route("/openapi.json", self._openapi),
                Route("/v1/models", self._models),
                Route("/", self._page),
                Route("/docs", self._page),
                Route("/metrics", self._page),
                *routes_of(page_operations(tuple), ClientDirectory([], 1)),
            ]
        )

    async def _page(self, _: Request) -> Response:
        return PlainTextResponse("another page")

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse({"components": {"schemas": {"ImageRequestBody": {"properties": PROPERTIES}}}})

    async def _models(self, _: Request) -> Response:
        start_image = {"needs_mask": False} if self.takes_start_images else None
        noria = {"kind": "diffusion", "loras": list(LORAS), "start_image": start_image}
        return JSONResponse({"data": [{"id": "m", "noria": noria}]})

    async def _t2i(self, http: Request) -> Response:
        if error := self._error_response(http):
            return error
        self.requests.append(await http.json())
        return Response(b"", media_type="image/png")

    async def _live(self, http: Request) -> Response:
        self.num_opened += 1
        if error := self._error_response(http):
            return error
        return StreamingResponse(self._events(http), media_type="text/event-stream")

    def _error_response(self, http: Request) -> Response | None:
        if self.api_key is not None and http.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, "unauthorized", "this server needs an API key.")
        return _error(*self.error) if self.error else None

    async def _events(self, http: Request) -> AsyncIterator[bytes]:
        generation, sent_states = self.generation, None
        names = [f"engine-{k}" for k in range(self.num_engines)]
        started_at = time.time()
        scripts = {
            name: Script(
                self.num_slots, started_at - 3.0 - k, arriving=self.arriving, paused=self.paused, clients=self.clients
            )
            for k, name in enumerate(names)
        }
        while self.generation == generation and not await http.is_disconnected():
            states = {name: self.states.get(name, "ready") for name in names}
            if states != sent_states:
                sent_states = states
                yield _event("engines", self._engines(states))
            for name, script in scripts.items():
                if states[name] == "ready":
                    with_thumbnails = self.thumbnails and http.query_params.get("thumbnails") != "false"
                    data = event_data(name, script.view(time.time()), with_thumbnails=with_thumbnails)
                    yield _event("engine_view", data)
            await asyncio.sleep(0.2)

    def _engines(self, states: dict[str, str]) -> dict[str, object]:
        engines = [
            {"name": name, "state": state, "device": "cpu", "incarnation": "first"} for name, state in states.items()
        ]
        return {"engines": engines, "server": {"version": "0.0.0", "models": ["scripted"]}}


def _event(name: str, data: dict[str, object]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


def _error(status: int, code: str, text: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": text, "param": None, "request_id": "r"}}, status)


@contextlib.contextmanager
def served(feed: Feed, port: int = 0) -> Iterator[Feed]:
    """Serve `feed` in a thread, on a free port unless one is given."""
    listener = socket.create_server(("127.0.0.1", port))
    feed.port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(feed.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=10)
    )
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield feed
    finally:
        feed.generation += 1
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()


if __name__ == "__main__":
    with served(Feed(num_slots=int(sys.argv[1]) if len(sys.argv) > 1 else 8), 8899) as running:
        print(running.url)
        threading.Event().wait()
