"""Models that requests have opened and loaded: a real front end in front of a fake engine, folders of a real model."""

import concurrent.futures
import itertools
import threading
import types

import httpx
import pytest

from noria.config import Config, EngineConfig
from noria.frontend.engines import checkpoints
from noria.frontend.engines.checkpoints import Checkpoints
from noria.frontend.engines.pool import EnginePool
from noria.protocol.messages import Mount
from waiting import TIMEOUT_S, wait_until


@pytest.fixture
def engine(new_engine):
    return new_engine()


@pytest.fixture
def client(serve, engine, tmp_path, tiny_folder):
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(tiny_folder)
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    config = Config(engine=EngineConfig(checkpoints=str(tmp_path), cache_dir=str(tmp_path / "cache")))
    with (
        serve(config, engine, checkpoints=("broken.safetensors", "first", "second")) as (url, _),
        httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        wait_until(lambda: client.get("/readyz").is_success)
        yield client


def t2i(client, model, **fields):
    return client.post("/t2i", json={"prompt": "a", "model": model, **fields})


def all_at_once(count, call):
    with concurrent.futures.ThreadPoolExecutor(count) as users:
        return list(users.map(lambda _: call(), range(count)))


def test_a_request_loads_the_checkpoint_that_it_names(client, engine):
    def models():
        cards = client.get("/v1/models").json()["data"]
        return {card["id"]: (card["loaded"], card["noria"] is not None) for card in cards}

    assert models() == {"tiny": (True, True), **dict.fromkeys(("broken", "first", "second"), (False, False))}
    assert t2i(client, "first").is_success
    assert (models()["first"], models()["second"]) == ((True, True), (False, False))
    assert client.get("/v1/models/second").json()["noria"] is None
    assert models()["second"] == (False, False)
    assert [(type(each), each.model.name, each.max_loaded) for each in engine.model_changes] == [(Mount, "first", 1)]
    assert "'first', 'broken', 'second'" in t2i(client, "third").json()["error"]["message"]


def test_requests_share_a_load_and_its_failure_and_the_next_one_tries_again(client, engine):
    engine.withholds_mounts, engine.mount_error = True, "it does not fit the memory."
    with concurrent.futures.ThreadPoolExecutor(3) as users:
        answers = [users.submit(t2i, client, "first") for _ in range(3)]
        wait_until(lambda: engine.model_changes)
        wait_until(lambda: "noria_requests_in_flight 3" in client.get("/metrics").text)
        engine.withholds_mounts = False
        errors = [answer.result().json()["error"] for answer in answers]
    assert {(each["code"], each["message"]) for each in errors} == {
        ("model_not_loaded", "first cannot be loaded: it does not fit the memory.")
    }
    assert len(engine.model_changes) == 1
    engine.mount_error = ""
    assert t2i(client, "first").is_success
    assert len(engine.model_changes) == 2


def test_a_file_that_cannot_be_opened_fails_its_requests_until_it_can(client, engine, tmp_path, tiny_folder):
    errors = [each.json()["error"] for each in all_at_once(2, lambda: t2i(client, "broken"))]
    assert {each["code"] for each in errors} == {"model_not_loaded"}
    assert all("broken.safetensors" in each["message"] and str(tmp_path) not in each["message"] for each in errors)
    (tmp_path / "broken.safetensors").unlink()
    (tmp_path / "broken.safetensors").symlink_to(tiny_folder)
    assert t2i(client, "broken").is_success


def test_a_load_is_made_as_long_as_one_request_waits_for_it(client, engine):
    engine.withholds_mounts = True
    with concurrent.futures.ThreadPoolExecutor(1) as users:
        waiting = users.submit(t2i, client, "first")
        wait_until(lambda: engine.model_changes)
        assert t2i(client, "first", deadline_ms=300).json()["error"]["code"] == "deadline_exceeded"
        assert t2i(client, "second", deadline_ms=300).json()["error"]["code"] == "deadline_exceeded"
        wait_until(lambda: engine.cancelled_mounts == [engine.model_changes[1].change_id])
        engine.withholds_mounts = False
        assert waiting.result().is_success
    loaded = {card["id"] for card in client.get("/v1/models").json()["data"] if card["loaded"]}
    assert loaded == {"tiny", "first"}
    assert t2i(client, "second").is_success
    assert [each.model.name for each in engine.model_changes] == ["first", "second", "second"]


def test_an_engine_that_has_restarted_loads_a_checkpoint_again(client, engine):
    assert t2i(client, "first").is_success
    engine.num_crashes_left, engine.exit_cause = 1, "killed"
    assert t2i(client, "first").is_success
    assert len(engine.model_changes) == 2


def test_a_request_whose_checkpoint_has_just_left_is_as_new_when_it_is_sent_again(client, engine):
    engine.num_not_held = 1
    assert t2i(client, "first", deadline_ms=60_000).is_success
    first, again = engine.submitted
    assert (again.was_moved, again.priority, engine.resumed) == (False, first.priority, [])
    assert 0.0 < again.deadline_s <= first.deadline_s


def test_few_uploads_wait_until_their_model_is_opened(client, monkeypatch):
    may_open, open_model = threading.Event(), checkpoints.open_model
    monkeypatch.setattr(checkpoints, "open_model", lambda *args: may_open.wait(TIMEOUT_S) and open_model(*args))
    with concurrent.futures.ThreadPoolExecutor(3) as users:
        answers = [users.submit(t2i, client, "first", negative_prompt="a" * 70_000) for _ in range(3)]
        (rejected,), _ = concurrent.futures.wait(answers, TIMEOUT_S, concurrent.futures.FIRST_COMPLETED)
        assert "2 uploads for models that are being opened" in rejected.result().json()["error"]["message"]
        assert t2i(client, "first", deadline_ms=300).status_code == 504  # a short body waits
        may_open.set()
    assert sorted(each.result().status_code for each in answers) == [400, 400, 429]


def test_the_deadline_of_a1111s_clients_bounds_the_opening_and_is_earlier_by_what_it_took(client, engine, monkeypatch):
    body, headers = {"override_settings": {"sd_model_checkpoint": "first"}}, {"X-Noria-Deadline-Ms": "1"}
    late = client.post("/sdapi/v1/txt2img", json=body, headers=headers)
    assert (late.status_code, engine.model_changes) == (504, [])
    clock = itertools.count(step=20.0)
    monkeypatch.setattr(checkpoints, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    body, headers = {"override_settings": {"sd_model_checkpoint": "second"}}, {"X-Noria-Deadline-Ms": "60000"}
    assert client.post("/sdapi/v1/txt2img", json=body, headers=headers).is_success
    assert 0.0 < engine.submitted[0].deadline_s <= 40.0


def test_a1111s_clients_switch_by_title_file_or_name(client, engine):
    before = client.get("/sdapi/v1/sd-models").json()
    assert [(each["title"], each["hash"]) for each in before[1:]] == [
        ("broken", None),
        ("first", None),
        ("second", None),
    ]
    answer = client.post("/sdapi/v1/txt2img", json={"override_settings": {"sd_model_checkpoint": "first [6ce0161689]"}})
    assert answer.is_success
    assert client.post("/sdapi/v1/options", json={"sd_model_checkpoint": "second"}).is_success
    title = client.get("/sdapi/v1/options").json()["sd_model_checkpoint"]
    assert title in [each["title"] for each in client.get("/sdapi/v1/sd-models").json()]
    assert client.post("/sdapi/v1/txt2img", json={}).is_success
    assert [each.model for each in engine.submitted] == ["first", "second"]


@pytest.mark.parametrize("title", ["my model.safetensors [6ce0161689]", "my model.safetensors", "my model", "my-model"])
def test_a_file_is_known_by_what_clients_of_a1111_call_it(title):
    checkpoints = Checkpoints(EnginePool([]), EngineConfig(checkpoints="/models"), ["my model.safetensors"])
    assert checkpoints.find_name(title) == "my-model"
    assert checkpoints.find_name("my") is None


@pytest.mark.parametrize("title", ["a [v2]", "a [v2].safetensors", "a [v2].safetensors [6ce0161689]"])
def test_a_name_may_have_what_looks_like_a_hash(title):
    checkpoints = Checkpoints(
        EnginePool([]), EngineConfig(checkpoints="/models"), ["a.safetensors", "a [v2].safetensors"]
    )
    assert checkpoints.files[checkpoints.find_name(title)].name == "a [v2].safetensors"
