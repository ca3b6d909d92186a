"""What Ray's proxy passes to a front end."""

import asyncio

import pytest

from noria.cluster.ray_application import RayApplication
from noria.frontend.engines.pool import EnginePool


@pytest.mark.parametrize(
    ("client", "passed_on"),
    [(("127.0.0.1", 1), None), (("::1", 1), None), (("192.0.2.7", 1), ("192.0.2.7", 1)), (None, None)],
)
def test_the_proxys_address_gives_nobody_the_rights_of_this_machine(client, passed_on):
    """And each request has the state that uvicorn makes on one machine."""
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)

    scope = {"type": "http", "client": client}
    asyncio.run(RayApplication(app, EnginePool([]), [])(scope, None, None))
    (seen,) = scopes
    assert seen["client"] == passed_on
    assert callable(seen["state"]["abort"])
