"""The routing of operations: Starlette's routes, with authentication, and the form of errors by path."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from noria.errors import NoriaError, Unauthorized
from noria.frontend.access.api_keys import KeyScope
from noria.frontend.access.auth import REGISTRY_SCOPES, ClientDirectory, client_id_of, is_local
from noria.frontend.access.quotas import ApiClient
from noria.frontend.access.rejection_log import RejectionLog
from noria.frontend.access.shares import share_of
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.versions.version_choice import VERSION_HEADER
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.http.errors import (
    DEFAULT_ERRORS,
    ErrorDialect,
    error_response,
    internal_error_response,
    routing_error_response,
)
from noria.frontend.http.operations import Operation
from noria.frontend.http.request_head import RequestHeaders

METRICS_PATH = "/metrics"


def routes_of(operations: Sequence[Operation], clients: ClientDirectory) -> list["PathRoute"]:
    """Return a route for each path, so that its 405 names all methods."""
    by_path: dict[str, list[Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, []).append(operation)
    return [PathRoute(path, found, clients) for path, found in by_path.items()]


class PathRoute(Route):
    """The operations of one path. `is_polled` is of all its requests, also of those whose method is not allowed."""

    def __init__(self, path: str, operations: Sequence[Operation], clients: ClientDirectory) -> None:
        self.by_method: dict[str, ASGIApp] = {each.method: _OperationEndpoint(each, clients) for each in operations}
        super().__init__(path, _ByMethod(self.by_method), methods=list(self.by_method))
        self.is_polled = any(each.is_polled for each in operations)
        if "GET" in self.by_method:  # HEAD is as GET
            self.by_method["HEAD"] = self.by_method["GET"]


class _ByMethod:
    """The endpoint of a path with parameters: that of the operation with the request's method."""

    def __init__(self, by_method: Mapping[str, ASGIApp]) -> None:
        self._by_method = by_method

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request."""
        return self._by_method[scope["method"]](scope, receive, send)


class _Request(Request):
    """A request with the headers that the middleware has read, if there is one."""

    headers: RequestHeaders = RequestHeaders([])  # type: ignore[assignment]

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        found = scope.get("state", {}).get("headers")
        self.headers = RequestHeaders(scope["headers"]) if found is None else found


class _OperationEndpoint:
    """The endpoint of an operation, behind authentication; puts a `RequestContext` on the request's state.

    An operation of the scope `generate` is work for its client alone, and is cancelled when the client disconnects;
    others may change something, and are completed.
    """

    def __init__(self, operation: Operation, clients: ClientDirectory) -> None:
        self._operation, self._clients = operation, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request if its key may make it. Raises Unauthorized and MissingScope."""
        http, scopes = _Request(scope, receive), self._operation.scopes
        if scopes is not None:
            open_context(http, scopes, self._clients)
        responding = self._operation.handler(http)
        response = await (cancel_on_disconnect(http, responding) if scopes and "generate" in scopes else responding)
        await response(scope, receive, send)


def open_context(http: Request, scopes: Sequence[KeyScope], clients: ClientDirectory) -> None:
    """Put `api_client` and `context` on the state of a request whose key has one of `scopes`, or of () any.

    Raises Unauthorized and MissingScope.
    """
    state, headers = http.scope["state"], http.headers
    api_client = state["api_client"] = clients.find(headers)
    if scopes:
        api_client.require_scope(*scopes)
        if api_client.name is None and not REGISTRY_SCOPES.isdisjoint(scopes) and not is_local(http):
            raise Unauthorized(
                "this server has no API keys, so only clients on its own machine may use the registry; its "
                "operator can set frontend.api_keys_file."
            )
    if (version := headers.get(VERSION_HEADER)) is not None:  # a tester chooses what answers
        _check_tester(http, api_client)
        state["versions"].override = version
    client = client_id_of(http)
    share = share_of(headers, client, api_client, clients.client_header)
    state["context"] = RequestContext(
        state["request_id"], api_client, client, share, state["versions"], state["log_record"]
    )


def _check_tester(http: Request, api_client: ApiClient) -> None:
    """Check that a client may choose the version. Raises Unauthorized and MissingScope."""
    if api_client.name is not None:
        api_client.require_scope("deploy")
    elif not is_local(http):
        raise Unauthorized(
            f"this server has no API keys, so only clients on its own machine may send {VERSION_HEADER}; its operator "
            "can set frontend.api_keys_file."
        )


def route_by_path(routes: Sequence[PathRoute], router: Router, metrics_port: int | None) -> ASGIApp:
    """Return an application that looks up a path without parameters among `routes`, and leaves any other to `router`.

    With a `metrics_port`, that port has no path but /metrics, and no other port has this path. Starlette's router
    matches one regular expression after another: 20 µs for the last route.
    """
    known = {
        (method, route.path): (route, endpoint)
        for route in routes
        if "{" not in route.path
        for method, endpoint in route.by_method.items()
    }

    def serve(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # no coroutine of its own
        if metrics_port is not None and scope["type"] == "http" and not _port_has_path(metrics_port, scope):
            raise HTTPException(404)
        path = scope.get("path", "")
        found = known.get((scope.get("method", ""), path))
        if found is None:
            if path.endswith("/") and path != "/":  # which a parameter would take for a part of a name
                raise HTTPException(404)
            scope["app"] = router  # else Starlette would answer errors itself
            return router(scope, receive, send)
        scope["route"], endpoint = found
        return endpoint(scope, receive, send)

    return serve


def _port_has_path(metrics_port: int, scope: Scope) -> bool:
    """Return whether the port that a request came to has its path."""
    return bool((scope["path"] == METRICS_PATH) == (scope["server"][1] == metrics_port))


class ErrorResponder:
    """Responds to errors in the form of the operation asked for, or of its protocol's paths if there is none."""

    def __init__(self, operations: Sequence[Operation], rejection_log: RejectionLog) -> None:
        self._paths = [operation.path for operation in operations]
        self._rejection_log = rejection_log
        self._by_operation = {(each.method, each.path): each.errors_as for each in operations if "{" not in each.path}
        readers_last = sorted(self._by_operation.items(), key=lambda each: each[0][0] == "GET")
        self._by_path = {path: dialect for (_, path), dialect in readers_last}
        self._by_root = {root: each.errors_as for each in operations for root in each.errors_as.roots}

    def respond(self, http: Request, error: NoriaError | HTTPException) -> Response:
        """Return the response to an error of ours or of the routing."""
        dialect = self._dialect(http)
        if isinstance(error, HTTPException):
            return routing_error_response(http, error, dialect, self._paths)
        self._rejection_log.record(http, error)
        headers = {"Connection": "close"} if http.scope["state"].get("must_close") else None
        return error_response(error, http, dialect, headers)

    def respond_to_unexpected(self, http: Request) -> Response:
        """Return the response to an unexpected exception."""
        return internal_error_response(http, self._dialect(http))

    def _dialect(self, http: Request) -> ErrorDialect:
        path: str = http.scope["path"]
        found = self._by_operation.get((http.method, path)) or self._by_path.get(path)
        if found is not None:
            return found
        roots = (dialect for root, dialect in self._by_root.items() if path == root or path.startswith(f"{root}/"))
        return next(roots, DEFAULT_ERRORS)


def untraced(operations: Sequence[Operation]) -> Callable[[str, str], bool]:
    """Return a function of a method and a path: whether requests to it have no span, because nothing is computed."""
    of_paths = {
        each.path for each in operations if each.method == "GET" and (each.scopes is None or not each.is_traced)
    }
    prefixes = tuple(path.partition("{")[0] for path in of_paths if "{" in path)
    return lambda method, path: method != "POST" and (path in of_paths or path.startswith(prefixes))
