"""The front end as an ASGI application: its routes, and the one place where an error becomes a response.

Every refusal, on every route, has one shape (`refusals.py`), which is also the one that OpenAI's clients read.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from noria.config import Config, FrontendConfig
from noria.errors import InternalError, MethodNotAllowed, NoriaError, RouteNotFound, Unauthorized, did_you_mean, shown
from noria.frontend.a1111 import A1111, ROOT
from noria.frontend.bodies import Bodies
from noria.frontend.docs_page import DocsPage, docs_page
from noria.frontend.engine_link import EngineLink
from noria.frontend.images import Images
from noria.frontend.jobs import Jobs
from noria.frontend.keys import OPEN_PATHS, Callers
from noria.frontend.lag import watch_lag
from noria.frontend.live import Live
from noria.frontend.middleware import Gate, RequestLog
from noria.frontend.openai import OpenAI
from noria.frontend.openapi import openapi
from noria.frontend.recall import Recall
from noria.frontend.refusals import error_answer
from noria.frontend.site import PAGE_HEADERS, site_routes
from noria.frontend.studio import Studio
from noria.jobs.service import JobService, lone_place, open_service
from noria.keys import read_keys
from noria.observe.exposition import exposition
from noria.observe.traces import NO_TRACER, Tracer
from noria.spec import ModelSpec

PAGES = {
    "/": "playground.html",
    "/live": "live.html",
}


def build_app(
    config: Config,
    link: EngineLink,
    open_jobs: Callable[[], JobService] | None = None,
    tracer: Tracer = NO_TRACER,
) -> Starlette:
    """The application that serves what `link` reaches; it enters and leaves the link and the jobs with its own life.

    `open_jobs` opens them; by default as a front end that is alone. `tracer` is its caller's to close. `state.drain` is to be called when
    the server stops accepting.

    Raises:
        ConfigError: the file of API keys is not one.

    """
    callers = Callers(read_keys(config.frontend.keys_file), config.frontend.processes)
    studio = Studio(link, config.frontend, tracer=tracer, log_prompts=config.log_prompts)
    bodies = Bodies(config.frontend.max_body_bytes)
    jobs = Jobs(studio, bodies, config, open_jobs or functools.partial(open_service, config, lone_place(), tracer))
    images = Images(studio, bodies)
    openai = OpenAI(studio, bodies)
    live = Live(link, config.frontend)
    own = OwnRoutes(config, link)
    routes = [
        Route("/t2i", images.t2i, methods=["POST"]),
        Route("/v1/images/generations", openai.generations, methods=["POST"]),
        Route("/v1/images/parameters", Recall(studio).parameters, methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{model:path}", openai.model),
        *jobs.routes,
        *live.routes,
        *A1111(studio, bodies).routes,
        Route("/healthz", own.healthz),
        Route("/readyz", own.readyz),
        Route("/metrics", own.metrics),
        Route("/openapi.json", own.openapi),
        Route("/docs", own.docs),
    ]
    routes = [route if route.path in OPEN_PATHS else _gated(route, callers) for route in routes]
    routes += site_routes(PAGES)  # open: a page shows nothing but what its reader's own key lets it ask for
    known = [route.path for route in routes]

    def refuse(http: Request, error: Exception) -> Response:
        assert isinstance(error, NoriaError), "registered for nothing else"
        headers = {"Connection": "close"} if getattr(http.state, "must_close", False) else None
        return error_response(error, http, headers)

    def refuse_route(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for nothing else"
        return _routing_response(http, error, known)

    def drain() -> None:
        jobs.drain()
        live.drain()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with link:
            await jobs.start()
            lag = asyncio.create_task(watch_lag())
            try:
                yield
            finally:
                lag.cancel()
                await jobs.stop()

    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestLog, crashed=_crash_response, tracer=tracer)],
        exception_handlers={NoriaError: refuse, HTTPException: refuse_route},
        lifespan=lifespan,
    )
    app.state.drain = drain
    app.router.redirect_slashes = False  # "/t2i/" is not a path of ours, and a redirected POST is a riddle
    return app


def _gated(route: Route, callers: Callers) -> Route:
    return Route(route.path, route.endpoint, methods=route.methods, middleware=[Middleware(Gate, callers=callers)])


class OwnRoutes:
    """The routes about the server itself."""

    def __init__(self, config: Config, link: EngineLink) -> None:
        self._link = link
        # Open to all, and some milliseconds of work: done once for each model that was the first one last.
        self._interface = functools.lru_cache(maxsize=1)(functools.partial(_Interface.of, config.frontend))

    async def healthz(self, _: Request) -> Response:
        """200 as long as this process answers at all."""
        return _json({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        """200 if an image request would be taken now, else 503; the state of each engine in both."""
        body = {"ready": self._link.ready, "engines": self._link.engines}
        return _json(body, 200 if self._link.ready else 503)

    async def metrics(self, http: Request) -> Response:
        """Prometheus' text format or OpenMetrics, summed over all processes."""
        # A thread: many files are read, and the event loop has images to answer.
        text, content_type = await asyncio.to_thread(exposition, http.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def openapi(self, _: Request) -> Response:
        """The HTTP interface as an OpenAPI 3.1 document."""
        return Response(self._interface(self._spec).document, media_type="application/json")

    async def docs(self, http: Request) -> Response:
        """The same document, for people."""
        page = self._interface(self._spec).page
        return HTMLResponse(page.at(str(http.base_url).rstrip("/")), headers=PAGE_HEADERS)

    @property
    def _spec(self) -> ModelSpec | None:
        return next(iter(self._link.models.values()), None)


@dataclass(frozen=True)
class _Interface:
    """What is said of the routes."""

    document: bytes
    page: DocsPage

    @classmethod
    def of(cls, config: FrontendConfig, spec: ModelSpec | None) -> Self:
        """`spec` is that of the first model; None: no engine was ready yet."""
        document = openapi(spec, config)
        return cls(msgspec.json.encode(document), docs_page(document))


def error_response(error: NoriaError, http: Request, headers: dict[str, str] | None = None) -> Response:
    """`error` as its HTTP response; Retry-After, in whole seconds, where the error knows when."""
    http.state.error_code = error.code
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    of_a1111 = http.url.path.startswith(f"{ROOT}/")
    response = _json(error_answer(error, http.state.request_id, of_a1111=of_a1111), error.http_status, headers)
    if isinstance(error, Unauthorized):
        response.headers.append("WWW-Authenticate", 'Bearer realm="noria"')
        # A header of its own: Chromium finds none that stands behind another. Not for a page's script, which has a field for the key:
        # the browser would ask for a name and a password before that is seen.
        if "x-requested-with" not in http.headers:
            response.headers.append("WWW-Authenticate", 'Basic realm="noria", charset="UTF-8"')
    return response


def _routing_response(http: Request, error: HTTPException, known: list[str]) -> Response:
    """Starlette's own 404 and 405, in our shape."""
    path = http.url.path
    if error.status_code == MethodNotAllowed.http_status:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        refusal: NoriaError = MethodNotAllowed(f"{http.method} is not allowed for {shown(path)}; allowed is {allow}.")
        return error_response(refusal, http, {"Allow": allow})
    refusal = RouteNotFound(f"there is no {shown(path)}.{did_you_mean(path, known)} GET /docs lists the routes.")
    return error_response(refusal, http)


def _crash_response(request_id: str) -> Response:
    """The answer when our own code broke: says nothing of its insides, but names the line of the log."""
    message = f"the server failed on this request; its log has the details under {request_id}."
    error = InternalError(message)
    return _json(error_answer(error, request_id), error.http_status)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
