"""A swap as clients see it: 503 with Retry-After until the new version is loaded; other models serve on."""

import httpx
import msgspec
import pytest

from engine_client import Client
from frontends import serving
from noria.config import Config
from noria.protocol.messages import Hello, Mount
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from waiting import wait_until

NEWER = msgspec.structs.replace(FAKE_MODEL, fingerprint="bbbbbbbbbbbb")
OTHER = msgspec.structs.replace(FAKE_MODEL, name="other", fingerprint="cccccccccccc")


@pytest.mark.parametrize("others", [(), (OTHER,)])
def test_requests_get_503_with_retry_after_while_their_model_is_swapped(folder, others):
    engine = FakeEngine(f"ipc://{folder}/swap-{len(others)}", models=(FAKE_MODEL, *others))
    with engine, serving(Config(), engine) as (url, _), httpx.Client(base_url=url, timeout=60) as web:

        def post(model: str) -> httpx.Response:
            return web.post("/t2i", json={"prompt": "a circle", "model": model})

        wait_until(lambda: post("tiny").status_code == 200)
        engine.withholds_mounts = True
        registrar = Client(engine.address)
        registrar.send(Hello("registrar"))
        registrar.send(Mount("a", NEWER, (FAKE_MODEL.key,)))
        response = wait_until(lambda: (got := post("tiny")).status_code != 200 and got)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) > 0
        assert web.get("/readyz").status_code == (200 if others else 503)
        assert all(post(each.name).status_code == 200 for each in others)
        engine.withholds_mounts = False
        response = wait_until(lambda: (got := post("tiny")).status_code == 200 and got)
        assert response.headers["x-noria-model-version"] == NEWER.fingerprint
        registrar.close()
