"""Shadows over HTTP: copies of requests, in front of a fake engine that holds both versions."""

import base64
import io
import re
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from PIL import Image

from frontends import serving
from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.frontend.engines.versions.shadow_mirror import ShadowMirror
from noria.frontend.engines.versions.version_choice import RequestVersions, VersionChooser
from noria.protocol.model_spec import ModelSpec
from noria.protocol.routes import Route, Routes, Target
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL, FakeEngine
from waiting import wait_until, wait_until_ready

IDLE = msgspec.structs.replace(FAKE_LOAD, num_waiting=0)
SHADOW = "bbbbbbbbbbbb"


class Server:
    """A front end whose endpoint has a shadow, and its engine; each with counts of its own."""

    num_servers = 0

    def __init__(self, folder, control: ModelSpec, load=IDLE, keys_file: str = "", **changes: object) -> None:
        Server.num_servers += 1
        self.version = f"v@{Server.num_servers}"  # metrics are counted in this process, by version
        shadow = msgspec.structs.replace(control, fingerprint=SHADOW, **changes)
        target = Target(7, self.version, "sha256:7", SHADOW, ())
        routes = Routes(1, (Route(control.name, None, shadow=target, shadow_share=1.0),))
        self.engine = FakeEngine(f"ipc://{folder}/shadow-{Server.num_servers}", models=(control, shadow), load=load)
        config = Config(frontend=FrontendConfig(api_keys_file=keys_file))
        self._serving = serving(config, self.engine, routes=routes)

    def __enter__(self) -> "Server":
        url, _ = self._serving.__enter__()
        wait_until_ready(url)
        self.web = httpx.Client(base_url=url, timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.web.close()
        self._serving.__exit__(None, None, None)
        self.engine.stop()

    def image(self, **settings: object) -> httpx.Response:
        return self.web.post("/t2i", json={"prompt": "a circle", "seed": 5, **settings})

    def copies(self) -> list:
        return [request for request in self.engine.submitted if request.model_version == SHADOW]

    def metric(self, name: str, label: str = "") -> float:
        """The value of a metric of this server's shadow."""
        pattern = rf'^noria_shadow_{name}{{(?=[^}}]*version="{self.version}")[^}}]*{label}[^}}]*}} (\S+)$'
        return sum(float(value) for value in re.findall(pattern, self.web.get("/metrics").text, re.M))

    def wait_for(self, outcome: str, number: int = 1) -> None:
        wait_until(lambda: self.metric("requests_total", f'outcome="{outcome}"') >= number)


@pytest.fixture
def images(folder) -> Iterator[Server]:
    with Server(folder, FAKE_MODEL, default_steps=3) as server:
        yield server


def test_a_copy_is_what_the_shadow_would_get_at_the_lowest_priority_and_a_lower_weight(images):
    response = images.image(priority="high", deadline_ms=30_000)
    assert response.status_code == 200
    assert response.headers["x-noria-model-version"] == FAKE_MODEL.fingerprint
    images.wait_for("ok")
    (copy,) = images.copies()
    assert (copy.priority, copy.deadline_s, copy.payload.seed, copy.payload.inference_steps) == ("low", None, 5, 3)
    assert copy.share_client != images.engine.submitted[0].share_client
    assert copy.share_weight == 0.25


def test_a_copy_has_the_start_image_in_the_size_of_the_original(images):
    file = io.BytesIO()
    Image.new("RGB", (40, 24), "red").save(file, "png")
    assert images.image(image=base64.b64encode(file.getvalue()).decode()).status_code == 200
    images.wait_for("ok")
    (copy,) = images.copies()
    assert (copy.payload.strength, copy.payload.width, copy.payload.height) == (0.8, 40, 24)
    assert images.engine.data == [b"\xff\0\0" * 40 * 24] * 2


def test_answers_are_compared_by_time_and_output(images, monkeypatch):
    reported, count = [], ShadowMirror._count
    monkeypatch.setattr(ShadowMirror, "_count", lambda *args: reported.append(args[-1]) or count(*args))
    images.engine.shades[SHADOW] = 149  # 51 less of 255, in one colour of three
    images.engine.delays_s[SHADOW] = 0.02
    assert images.image().status_code == 200
    images.wait_for("ok")
    assert images.metric("distance_sum") == pytest.approx(51 / 255 / 3)
    assert images.metric("seconds_sum", 'arm="shadow"') == pytest.approx(0.029)
    assert images.metric("seconds_sum", 'arm="control"') == pytest.approx(0.009)
    (counts,) = reported
    assert (counts.num_answers, counts.num_timed, counts.num_distances) == (1, 1, 1)
    assert (counts.control_s, counts.shadow_s) == pytest.approx((0.009, 0.029))
    assert (counts.distance, counts.max_distance) == pytest.approx((51 / 255 / 3,) * 2)


def test_a_copy_is_no_request_in_log_and_metrics(images, captured_log_fields):
    def count(name: str) -> float:
        found = re.findall(rf'^{name}{{[^}}]*model="tiny"[^}}]*}} (\S+)$', images.web.get("/metrics").text, re.M)
        return sum(map(float, found))

    before = count("noria_requests_total"), count("noria_images_total")
    with captured_log_fields("noria.requests") as lines:
        for _ in range(3):
            assert images.image().status_code == 200
        images.wait_for("ok", 3)
        assert [line["status"] for line in lines()] == [200] * 3
    assert (count("noria_requests_total"), count("noria_images_total")) == (before[0] + 3, before[1] + 3)


def test_a_failing_or_rejecting_shadow_is_counted_and_nobody_notices(images):
    images.engine.failures[SHADOW] = {"code": "generation_failed", "message": "no"}
    assert images.image().status_code == 200
    images.wait_for("generation_failed")
    images.engine.failures[SHADOW] = {"code": "queue_full", "message": "no"}
    assert images.image().status_code == 200
    images.wait_for("dropped")


def test_a_request_that_fails_is_copied_and_one_that_is_rejected_is_not(images):
    images.engine.failures[FAKE_MODEL.fingerprint] = {"code": "invalid_field", "message": "no"}
    assert images.image().status_code == 400
    images.engine.failures[FAKE_MODEL.fingerprint] = {"code": "generation_failed", "message": "no"}
    assert images.image().status_code == 500
    images.wait_for("ok")
    assert len(images.copies()) == 1


def test_a_shadow_with_other_limits_fails_only_its_copies(folder):
    with Server(folder, FAKE_MODEL, max_side_px=64) as server:
        assert server.image(width=128).status_code == 200
        server.wait_for("invalid_field")
        assert server.copies() == []


def test_copies_wait_while_requests_do_and_what_finds_the_queue_full_is_dropped(folder):
    with Server(folder, FAKE_MODEL, load=FAKE_LOAD) as server:  # three requests wait at its engine
        for _ in range(20):
            assert server.image().status_code == 200
        server.wait_for("dropped", 3)  # 16 wait, and one has its turn
        assert server.copies() == []


def test_a_copy_whose_engine_ends_is_not_repeated(images):
    images.engine.crash_seed = None
    images.image()
    images.wait_for("ok")
    images.engine.delays_s[SHADOW] = 60.0
    images.image()
    wait_until(lambda: len(images.copies()) == 2)
    images.engine.set_state("dead")
    images.engine.set_state("ready")
    images.wait_for("engine_lost")
    wait_until(lambda: images.image().status_code == 200)


def test_a_testers_request_is_not_copied(folder, tmp_path):
    key, table = generate_key("tester", ["generate", "deploy", "metrics"])
    (tmp_path / "keys.toml").write_text(table)
    with Server(folder, FAKE_MODEL, keys_file=str(tmp_path / "keys.toml")) as server:
        server.web.headers["X-Api-Key"] = key
        server.web.headers["X-Noria-Version"] = "control"
        assert server.image().status_code == 200
        del server.web.headers["X-Noria-Version"]
        assert server.image(seed=6).status_code == 200
        server.wait_for("ok")
        assert [copy.payload.seed for copy in server.copies()] == [6]


def test_texts_are_copied_as_the_shadow_tokenizes_them(folder):
    with Server(folder, FAKE_ENCODER) as server:
        body = {"input": ["a circle", "two circles"], "model": FAKE_ENCODER.name}
        assert server.web.post("/v1/embeddings", json=body).status_code == 200
        server.wait_for("ok")
        assert server.metric("distance_sum") == pytest.approx(0.0, abs=1e-6)
        assert server.metric("distance_count") == 1


def test_a_shadow_of_equal_content_gets_copies_but_none_of_what_it_answers_itself():
    shadow = Target(7, "v@1", "sha256:7", FAKE_MODEL.fingerprint, ())
    other = msgspec.structs.replace(shadow, deployment=6, fingerprint=SHADOW)
    chooser = VersionChooser(lambda *_: None)
    chooser.configure({FAKE_MODEL.name: FAKE_MODEL.fingerprint})
    with RequestVersions("a request") as versions:
        for control, expected in [(None, (shadow, 0.5)), (shadow, (shadow, 0.5)), (other, None)]:
            chooser.follow(Routes(1, (Route(FAKE_MODEL.name, control, shadow=shadow, shadow_share=0.5),)))
            assert chooser.shadow_of(FAKE_MODEL, versions) == expected
