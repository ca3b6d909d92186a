"""The versions that answer the requests to an endpoint: decided in the registry, followed by engines and front ends.

An endpoint is the name that requests give as `model`. The registry has the routes of all endpoints; each change is a
new *generation* of the whole table. A server keeps the last one in a file, so that it also starts without its registry.
"""

from msgspec import Struct


class Target(Struct, frozen=True):
    """A version that a deployment serves."""

    deployment: int  # its number in the registry
    version: str  # MODEL@NUMBER
    digest: str  # digest of the version's manifest: `sha256:` and 64 hexadecimal digits
    fingerprint: str  # `ModelSpec.fingerprint`, by which engines tell versions apart
    urls: tuple[str, ...]  # URLs of its files


class Route(Struct, frozen=True):
    """The versions of one endpoint."""

    endpoint: str
    control: Target | None  # None: the model of this name in the server's configuration
    canary: Target | None = None
    canary_share: float = 0.0  # share of the endpoint's requests, 0 to 1
    shadow: Target | None = None  # gets copies of requests; its answers are compared and discarded
    shadow_share: float = 0.0  # share of the requests that the control answers, 0 to 1


class Routes(Struct, frozen=True):
    """A generation of the table. Endpoints that were never deployed to have no route."""

    generation: int = 0
    routes: tuple[Route, ...] = ()

    def find(self, endpoint: str) -> Route | None:
        """The route of an endpoint; None: it has none."""
        return next((route for route in self.routes if route.endpoint == endpoint), None)
