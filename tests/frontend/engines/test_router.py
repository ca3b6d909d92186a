"""Requests go to the engines that hold their model, in their version."""

import asyncio
from dataclasses import dataclass

import msgspec
import pytest
from starlette.testclient import TestClient

from noria.config import Config
from noria.errors import EngineUnavailable
from noria.frontend.app import build_app
from noria.frontend.engines.load_reports import PoolLoad
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.router import route
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import ModelSpec
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL, FakeEngine
from noria.testing.requests import make_image_request
from waiting import wait_until, wait_until_async

OTHER_MODEL = msgspec.structs.replace(FAKE_MODEL, name="other")
NEWER = msgspec.structs.replace(FAKE_MODEL, fingerprint="ffffffffffff")


@dataclass
class Engine:
    models: tuple[ModelSpec, ...]
    num_results_in_flight: int = 0
    reported_backlog_s: float = 0.0
    num_results_since_load: int = 0
    result_s: float = 0.0


def test_the_least_loaded_of_the_engines_that_hold_the_model_gets_the_request():
    busy, idle = Engine((FAKE_MODEL, OTHER_MODEL), 5), Engine((FAKE_MODEL,), 2)
    newer, loading = Engine((NEWER,), 0), Engine((), 0)
    engines = [loading, busy, idle, newer]
    assert route(engines, "tiny", FAKE_MODEL.fingerprint) is idle
    assert route(engines, "tiny", NEWER.fingerprint) is newer
    assert route(engines, "tiny") is newer  # any version of the model
    assert route(engines, "other", OTHER_MODEL.fingerprint) is busy
    assert route(engines, "other", NEWER.fingerprint) is None
    assert route(engines, "missing") is None


def test_the_backlog_in_seconds_decides_before_the_number_of_results():
    """Another front end may have filled an engine; and what was just submitted is in no report yet."""
    filled, quick = Engine((FAKE_MODEL,), 0, 9.0), Engine((FAKE_MODEL,), 8, 2.0, 3, result_s=1.0)
    assert route([filled, quick], "tiny") is quick
    quick.num_results_since_load = 8
    assert route([filled, quick], "tiny") is filled


def test_a_burst_is_spread_whatever_engines_were_last_seen_with():
    """An engine had nearly finished its last result when it reported, and another has had none yet."""
    engines = [Engine((FAKE_MODEL,), result_s=result_s) for result_s in (2.0, 0.01, 0.0)]
    for _ in range(30):
        chosen = route(engines, "tiny")
        chosen.num_results_in_flight += 1
        chosen.num_results_since_load += 1
    assert [each.num_results_in_flight for each in engines] == [10, 10, 10]


def test_engines_with_different_versions_serve_their_own(tmp_path):
    async def scenario(first, second):
        async with EnginePool([first.address, second.address]) as pool:
            await wait_until_async(lambda: all(status.state == "ready" for status in pool.engines))
            await pool.submitter.submit(make_image_request("new", "tiny", model_version=NEWER.fingerprint))
            await pool.submitter.submit(make_image_request("old", "tiny", model_version=FAKE_MODEL.fingerprint))
            assert [request.request_id for request in first.submitted] == ["old"]
            assert [request.request_id for request in second.submitted] == ["new"]
            assert pool.models["tiny"] == FAKE_MODEL
            assert pool.find_model("tiny", NEWER.fingerprint) == NEWER
            assert pool.find_model("tiny", "unknown") is None

    with (
        FakeEngine(f"ipc://{tmp_path}/first") as first,
        FakeEngine(f"ipc://{tmp_path}/second", models=(NEWER,)) as second,
    ):
        asyncio.run(scenario(first, second))


def test_the_default_model_is_the_configured_one_whichever_engine_reports_first(tmp_path):
    async def scenario(first, second):
        default_models = {"diffusion": FAKE_MODEL.name}
        async with EnginePool([first.address, second.address], default_models=default_models) as pool:
            await wait_until_async(lambda: pool.ready)
            with pytest.raises(EngineUnavailable, match="'tiny'"):
                pool.default_model(DiffusionModelSpec)
            second.set_state("ready")
            await wait_until_async(lambda: len(pool.models) == 2)
            assert pool.default_model(DiffusionModelSpec) == FAKE_MODEL
            assert list(pool.models) == ["tiny", "other"]

    with (
        FakeEngine(f"ipc://{tmp_path}/first", models=(OTHER_MODEL,)) as first,
        FakeEngine(f"ipc://{tmp_path}/second", "loading") as second,
    ):
        asyncio.run(scenario(first, second))


def test_engines_with_different_models_serve_their_own(tmp_path):
    async def scenario(first, second):
        async with EnginePool([first.address, second.address], restart_wait_s=0.1) as pool:
            await wait_until_async(lambda: all(status.state == "ready" for status in pool.engines))
            assert list(pool.models) == ["tiny", "other"]
            assert pool.ready_models() == {spec.key for spec in (FAKE_MODEL, OTHER_MODEL)}
            for number in range(4):  # in alternation, whatever the load of the other engine
                await pool.submitter.submit(make_image_request(str(number), ("tiny", "other")[number % 2]), data=b"raw")
            assert first.data == second.data == [b"raw"] * 2
            assert [request.model for request in first.submitted] == ["tiny"] * 2
            assert [request.model for request in second.submitted] == ["other"] * 2
            second.set_state("loading")
            await wait_until_async(lambda: pool.engines[1].state == "loading")
            with pytest.raises(EngineUnavailable, match="'other' in version any"):
                await pool.submitter.submit(make_image_request("late", "other"))
            assert list(pool.models) == ["tiny", "other"]  # still served, by an engine that restarts

    with (
        FakeEngine(f"ipc://{tmp_path}/first") as first,
        FakeEngine(f"ipc://{tmp_path}/second", models=(OTHER_MODEL,)) as second,
    ):
        asyncio.run(scenario(first, second))


def test_a_models_load_is_that_of_the_engines_that_hold_it(tmp_path):
    both = FakeEngine(f"ipc://{tmp_path}/both", models=(FAKE_MODEL, OTHER_MODEL), load=FAKE_LOAD)
    other = FakeEngine(
        f"ipc://{tmp_path}/other", models=(OTHER_MODEL,), load=msgspec.structs.replace(FAKE_LOAD, backlog_s=0.5)
    )
    newer = FakeEngine(
        f"ipc://{tmp_path}/newer", models=(NEWER,), load=msgspec.structs.replace(FAKE_LOAD, backlog_s=9.0)
    )

    async def scenario():
        async with EnginePool([engine.address for engine in (both, other, newer)]) as pool:
            assert pool.reports.load(FAKE_MODEL) == PoolLoad(0.0, 0, 0, 0)
            await wait_until_async(lambda: pool.reports.num_slots(DiffusionModelSpec) == 3 * 4)
            assert pool.reports.load(FAKE_MODEL) == PoolLoad(1.5, 2, 3, 4)
            assert pool.reports.load(OTHER_MODEL) == PoolLoad(0.5, 4, 6, 8)
            assert [pool.reports.backlog_s(spec) for spec in (FAKE_MODEL, OTHER_MODEL, NEWER)] == [1.5, 0.5, 9.0]
            other.set_state("dead")
            await wait_until_async(lambda: pool.reports.backlog_s(OTHER_MODEL) == 1.5)

    with both, other, newer:
        asyncio.run(scenario())


def test_a_server_is_ready_while_an_engine_is_and_rejects_the_models_of_the_others(tmp_path):
    with (
        FakeEngine(f"ipc://{tmp_path}/first") as first,
        FakeEngine(f"ipc://{tmp_path}/second", models=(OTHER_MODEL,)) as second,
        TestClient(build_app(Config(), EnginePool([first.address, second.address])), "http://localhost") as client,
    ):

        def states():
            return [engine["state"] for engine in client.get("/readyz").json()["engines"]]

        wait_until(lambda: states() == ["ready", "ready"])
        second.set_state("loading")
        wait_until(lambda: states() == ["ready", "loading"])
        assert client.get("/readyz").status_code == 200
        assert client.post("/t2i", json={"prompt": "p", "model": "tiny"}).status_code == 200
        rejected = client.post("/t2i", json={"prompt": "p", "model": "other"})
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "engine_unavailable")
        first.set_state("loading")
        wait_until(lambda: client.get("/readyz").status_code == 503)
