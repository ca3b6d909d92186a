"""Event streams of generations over real sockets, with a plain client and with OpenAI's."""

import base64
import io
import json
import socket

import httpx
import pytest
from PIL import Image

from frontends import served_client
from noria.config import Config
from waiting import wait_until


def events_of(response):
    """Yields (name, data) of each event."""
    for block in response.read().decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines:
            yield lines["event"], json.loads(lines["data"])


def image_in(data):
    return Image.open(io.BytesIO(base64.b64decode(data["b64_json"])))


def test_a_stream_has_progress_previews_and_the_result(client, engine):
    body = {"prompt": "p", "seed": 5, "n": 2, "stream": True, "partial_images": 2, "inference_steps": 3}
    with client.stream("POST", "/t2i", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        events = list(events_of(response))
    names = [name for name, _ in events]
    assert names.count("preview") == 4
    assert names[-1] == "finished"
    assert set(names) == {"progress", "preview", "finished"}
    progress = [data for name, data in events if name == "progress"][-1]
    assert progress == {"queue_position": None, "step": 3, "num_steps": 3, "finish_in_s": 0.1}
    preview = next(data for name, data in events if name == "preview")
    assert (preview["index"], preview["width"], preview["height"]) == (0, 4, 3)
    assert image_in(preview).getpixel((1, 1)) == engine.colour(5)
    finished = events[-1][1]
    assert [image["seed"] for image in finished["images"]] == [5, 6]
    assert image_in(finished["images"][1]).getpixel((0, 0)) == engine.colour(6)


def test_a_rejection_of_the_engine_is_a_response_with_its_status(client, engine):
    engine.failure = {"code": "queue_full", "message": "full", "retry_after_s": 7.2}
    response = client.post("/t2i", json={"prompt": "p", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "8")
    assert response.json()["error"]["code"] == "queue_full"


def test_a_later_failure_is_the_last_event(client, engine):
    engine.sends_invalid_replies = True
    with client.stream("POST", "/t2i", json={"prompt": "p", "stream": True}) as response:
        events = list(events_of(response))
    name, data = events[-1]
    assert (name, data["error"]["code"]) == ("error", "generation_failed")
    assert data["error"]["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_http_1_0_gets_plain_bytes_until_the_connection_closes(url, engine, expect):
    host, body = httpx.URL(url), json.dumps({"prompt": "p", "stream": True}).encode()
    head = f"POST /t2i HTTP/1.0\r\nHost: localhost\r\n{expect}Content-Type: application/json\r\n"
    with socket.create_connection((host.host, host.port), 60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head, _, events = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert events.startswith(b"event: progress\n")
    assert events.endswith(b"}\n\n")


def test_the_end_of_the_engine_is_reported_before_its_cause_is_known(new_engine):
    engine = new_engine()
    engine.num_crashes_left, engine.restarts = 1, False
    with (
        served_client(Config(), engine) as client,
        client.stream("POST", "/t2i", json={"prompt": "p", "stream": True}) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        events = (json.loads(line.removeprefix("data: ")) for line in lines)
        lost = next(data for data in events if data["finish_in_s"] is None)
        assert (lost["queue_position"], lost["step"]) == (0, 0)
        engine.set_state("ready")
        *_, last = events
        assert len(last["images"]) == 1


def test_openais_client_gets_partial_images_and_the_completed_one(openai_client, engine, spec):
    events = list(
        openai_client.images.generate(
            prompt="p", stream=True, partial_images=2, output_format="webp", extra_body={"seed": 5}
        )
    )
    *partial, completed = events
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 2
    assert [event.partial_image_index for event in partial] == [0, 1]
    size = (spec.default_width_px, spec.default_height_px)
    for event in events:
        file = Image.open(io.BytesIO(base64.b64decode(event.b64_json)))
        assert (file.format, file.size) == ("WEBP", size)
    assert (completed.type, completed.seed, completed.usage.total_tokens) == ("image_generation.completed", 5, 0)


def test_a_stream_of_images_is_finished_while_the_server_drains(serve, new_engine):
    engine = new_engine()
    engine.never_answers = True
    with serve(Config(), engine) as (url, server), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        with client.stream("POST", "/t2i", json={"prompt": "p", "stream": True}) as response:
            server.should_exit = True
            wait_until(lambda: not server.servers or not any(each.is_serving() for each in server.servers))
            engine.never_answers = False
            engine.set_state("dead")  # the request is retried after the restart
            engine.set_state("ready")
            names = [name for name, _ in events_of(response)]
    assert names[-1] == "finished"
