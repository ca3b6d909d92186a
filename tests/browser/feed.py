"""A server of the pages whose wheel is a script: the real files and the declared JSON, but no model and no engine.

What it shows is a function of the time since it began, so that every run of a test sees the same. `python tests/browser/feed.py 64`
serves one with 64 slots to look at.
"""

import asyncio
import base64
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

from noria.frontend.routes.static_pages import page_routes
from noria.protocol.live_views import DepartureView, IterationView, RatesView, SlotView, ThumbnailView, WaitingView
from noria.protocol.messages import EngineView

SCHEDULERS = ("euler", "dpm++2m-karras", "ddim", "unipc", "euler-a", "heun")
TURN_S = 0.05
CELL_PX = 16
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
    """One engine's wheel: images of mixed shapes that come, board, step and leave, a turn every `TURN_S`."""

    def __init__(self, num_slots: int, began_at: float, *, arriving: bool = True, paused: tuple[int, ...] = ()) -> None:
        """In the slots `paused` nobody steps."""
        self.num_slots, self._began_at, self._arriving, self._paused = num_slots, began_at, arriving, paused
        self._random = random.Random(7)
        self._ids = itertools.count(1)
        self._number = 0
        self._seats: dict[int, SlotView] = {}
        self._waiting: list[WaitingView] = []
        self._turns: list[IterationView] = []
        self._left: list[DepartureView] = []

    def view(self, now: float) -> EngineView:
        """What there is to see at `now`, since the last time."""
        while self._began_at + (self._number + 1) * TURN_S <= now:
            self._turn()
        turns, self._turns = tuple(self._turns), []
        left, self._left = tuple(self._left), []
        occupancy = len(self._seats) / self.num_slots
        seats = tuple(self._seats[slot] for slot in sorted(self._seats))
        return EngineView(
            incarnation="first",
            captured_at=now,
            last_iteration=self._number,
            num_slots=self.num_slots,
            slots=seats,
            waiting=tuple(self._waiting),
            num_waiting=sum(waiting.num_images for waiting in self._waiting),
            backlog_s=2.5 if seats else 0.0,
            iterations=turns,
            departures=left,
            rates=RatesView(
                window_s=10.0,
                requests_per_s=4.2,
                images_per_s=5.25,
                steps_per_s=len(seats) / TURN_S,
                p50_s=1.31,
                p95_s=2.42,
                p99_s=3.07,
                mean_batch=float(len(seats)),
                occupancy=occupancy,
                busy=0.97 if seats else 0.0,
            ),
            thumbnails=tuple(
                ThumbnailView(seat.slot, seat.request_id, seat.index, CELL_PX, CELL_PX, CELL_PX * CELL_PX * 3 * place)
                for place, seat in enumerate(seats)
            ),
        )

    def _turn(self) -> None:
        self._number += 1
        at = self._began_at + self._number * TURN_S
        boarded = stepped = decoded = 0
        if self._arriving:
            while sum(waiting.num_images for waiting in self._waiting) < max(3, self.num_slots // 4):
                self._waiting.append(self._wish(at))
        for slot in range(self.num_slots):
            if slot not in self._seats and self._waiting and boarded < 2:
                boarded += 1
                self._seats[slot] = self._board(slot, at)
        for slot, seat in list(self._seats.items()):
            if slot in self._paused:
                self._seats[slot] = msgspec.structs.replace(seat, paused=True)
            elif seat.call == seat.num_calls:
                del self._seats[slot]
                decoded += 1
                outcome = "deadline_exceeded" if int(seat.request_id[1:]) % 17 == 16 else "ok"
                self._left.append(DepartureView(self._number, slot, seat.request_id, seat.index, outcome))
            else:
                stepped += 1
                self._seats[slot] = msgspec.structs.replace(seat, call=seat.call + 1)
        self._turns.append(
            IterationView(
                self._number,
                at - TURN_S,
                TURN_S * 0.97,
                0.004 * boarded,
                0.006 * min(decoded, 2),
                boarded,
                stepped,
                decoded,
            )
        )

    def _wish(self, at: float) -> WaitingView:
        number = next(self._ids)
        steps = self._random.choice((12, 20, 20, 30, 50, 80))
        side = self._random.choice((128, 128, 96))
        return WaitingView(
            request_id=f"r{number:04d}",
            num_images=1 + (number % 3 == 0),
            model="scripted",
            width_px=side,
            height_px=128,
            scheduler=SCHEDULERS[number % len(SCHEDULERS)],
            guidance_scale=self._random.choice((1.0, 3.0, 7.5)),
            num_steps=steps,
            priority="high" if number % 11 == 0 else "normal",
            arrived_at=at,
            start_at=at + 0.8,
            deadline_at=at + 2.0 if number % 4 == 1 else None,
        )

    def _board(self, slot: int, at: float) -> SlotView:
        waiting = self._waiting[0]
        if waiting.num_images > 1:
            self._waiting[0] = msgspec.structs.replace(waiting, num_images=waiting.num_images - 1)
        else:
            del self._waiting[0]
        num_calls = waiting.num_steps * 2 - 1 if waiting.scheduler == "heun" else waiting.num_steps
        return SlotView(
            slot=slot,
            request_id=waiting.request_id,
            index=waiting.num_images - 1,
            model=waiting.model,
            width_px=waiting.width_px,
            height_px=waiting.height_px,
            scheduler=waiting.scheduler,
            guidance_scale=waiting.guidance_scale,
            num_steps=waiting.num_steps,
            call=0,
            num_calls=num_calls,
            priority=waiting.priority,
            joined_at=at,
            deadline_at=waiting.deadline_at,
            finish_at=at + num_calls * TURN_S,
        )


def message(engine: str, view: EngineView, *, pictures: bool) -> dict[str, object]:
    """`view` as the stream's JSON has it: with its engine, and its cells' places in a sheet of pictures."""
    fields = msgspec.to_builtins(view)
    del fields["type"]
    cells = fields.pop("cells")
    if not pictures or not cells:
        return {"engine": engine, **fields, "cells": []}
    sheet = Image.new("RGB", (CELL_PX * len(cells), CELL_PX))
    for place, (cell, seat) in enumerate(zip(cells, view.slots, strict=True)):
        del cell["offset"]
        cell |= {"x": place * CELL_PX, "y": 0}
        sheet.paste(drawn(int(seat.request_id[1:]), seat.call / seat.num_calls), (place * CELL_PX, 0))
    file = io.BytesIO()
    sheet.save(file, "jpeg", quality=80, subsampling=0)
    b64 = base64.b64encode(file.getvalue()).decode()
    return {
        "engine": engine,
        **fields,
        "cells": cells,
        "sheet": {"format": "jpeg", "b64": b64, "width": sheet.width, "height": sheet.height},
    }


def drawn(number: int, share: float) -> Image.Image:
    """A disc on a ground that comes out of noise as `share` goes from 0 to 1."""
    hue = number * 47 % 256
    ground = Image.new("HSV", (CELL_PX, CELL_PX), (hue, 130, 225))
    disc = Image.new("HSV", (CELL_PX, CELL_PX), ((hue + 110) % 256, 200, 160))
    mask = Image.radial_gradient("L").resize((CELL_PX, CELL_PX)).point(lambda value: 255 if value < 100 else 0)
    ground.paste(disc, mask=mask)
    noise = Image.effect_noise((CELL_PX, CELL_PX), 120).convert("RGB")
    return Image.blend(noise, ground.convert("RGB"), min(1.0, share * 1.2))


@dataclasses.dataclass
class Feed:
    """What the server does; a test changes it while it runs."""

    num_slots: int = 8
    num_engines: int = 1
    arriving: bool = True
    paused: tuple[int, ...] = ()  # slots
    pictures: bool = True
    states: dict[str, str] = dataclasses.field(default_factory=dict)  # of engines that are not ready
    key: str | None = None  # needed by all that shows images
    refusal: tuple[int, str, str] | None = None  # status, code and message, instead of the stream
    life: int = 0  # streams of an older one end
    num_opened: int = 0
    drawn: list[dict[str, object]] = dataclasses.field(default_factory=list)  # the bodies of POST /t2i
    port: int = 0

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.port}/live"

    def app(self) -> Starlette:
        """The pages, the scripted stream, and what else the page asks for."""
        return Starlette(
            routes=[
                Route("/v1/live", self._live),
                Route("/t2i", self._t2i, methods=["POST"]),
                Route("/openapi.json", self._openapi),
                Route("/", self._page),
                Route("/docs", self._page),
                Route("/metrics", self._page),
                *page_routes({"/live": "live.html"}),
            ]
        )

    async def _page(self, _: Request) -> Response:
        return PlainTextResponse("another page")

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse({"components": {"schemas": {"ImageBody": {"properties": PROPERTIES}}}})

    async def _t2i(self, http: Request) -> Response:
        if refused := self._refused(http):
            return refused
        self.drawn.append(await http.json())
        return Response(b"", media_type="image/png")

    async def _live(self, http: Request) -> Response:
        self.num_opened += 1
        if refused := self._refused(http):
            return refused
        return StreamingResponse(self._events(http), media_type="text/event-stream")

    def _refused(self, http: Request) -> Response | None:
        if self.key is not None and http.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "unauthorized", "this server needs an API key.")
        return _error(*self.refusal) if self.refusal else None

    async def _events(self, http: Request) -> AsyncIterator[bytes]:
        life, told = self.life, None
        names = [f"engine-{k}" for k in range(self.num_engines)]
        began_at = time.time()
        scripts = {
            name: Script(self.num_slots, began_at - 3.0 - k, arriving=self.arriving, paused=self.paused)
            for k, name in enumerate(names)
        }
        while self.life == life and not await http.is_disconnected():
            states = {name: self.states.get(name, "ready") for name in names}
            if states != told:
                told = states
                yield _event("engines", self._engines(states))
            for name, script in scripts.items():
                if states[name] == "ready":
                    pictures = self.pictures and http.query_params.get("pictures") != "false"
                    yield _event("wheel", message(name, script.view(time.time()), pictures=pictures))
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
    """`feed` on a port of its own, in a thread."""
    listening = socket.create_server(("127.0.0.1", port))
    feed.port = listening.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(feed.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=10)
    )
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield feed
    finally:
        feed.life += 1
        server.should_exit = True
        thread.join(timeout=30)
        listening.close()


if __name__ == "__main__":
    with served(Feed(num_slots=int(sys.argv[1]) if len(sys.argv) > 1 else 8), 8899) as running:
        print(running.url)
        threading.Event().wait()
