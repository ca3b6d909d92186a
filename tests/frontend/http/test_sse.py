"""Requests watched while they form, over real sockets, by a plain client and by OpenAI's."""

import asyncio
import base64
import io
import json

import httpx
import openai
import pytest
from PIL import Image

from noria.config import Config
from noria.frontend.engines.pool import PreviewImage, ProgressUpdate
from noria.frontend.http.sse import LatestUpdates, StreamedGeneration


def events_of(response):
    """(name, data) of each event."""
    for block in response.read().decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines:
            yield lines["event"], json.loads(lines["data"])


def image_in(data):
    return Image.open(io.BytesIO(base64.b64decode(data["b64_json"])))


def test_a_stream_tells_of_progress_previews_and_the_end(client, engine):
    body = {"prompt": "p", "seed": 5, "n": 2, "stream": True, "partial_images": 2, "inference_steps": 3}
    with client.stream("POST", "/t2i", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        heard = list(events_of(response))
    names = [name for name, _ in heard]
    assert names.count("preview") == 4
    assert names[-1] == "finished"
    assert set(names) == {"progress", "preview", "finished"}
    progress = [data for name, data in heard if name == "progress"][-1]
    assert progress == {"queue_position": None, "step": 3, "num_steps": 3, "finish_in_s": 0.1}
    preview = next(data for name, data in heard if name == "preview")
    assert (preview["index"], preview["width"], preview["height"]) == (0, 4, 3)
    assert image_in(preview).getpixel((1, 1)) == engine.colour(5)
    finished = heard[-1][1]
    assert [image["seed"] for image in finished["images"]] == [5, 6]
    assert image_in(finished["images"][1]).getpixel((0, 0)) == engine.colour(6)


def test_what_an_engine_refuses_is_an_answer_with_its_status(client, engine):
    engine.fails = {"code": "queue_full", "message": "full", "retry_after_s": 7.2}
    response = client.post("/t2i", json={"prompt": "p", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "8")
    assert response.json()["error"]["code"] == "queue_full"


def test_a_failure_on_the_way_is_the_last_event(client, engine):
    engine.nonsense = True
    with client.stream("POST", "/t2i", json={"prompt": "p", "stream": True}) as response:
        heard = list(events_of(response))
    name, data = heard[-1]
    assert (name, data["error"]["code"]) == ("error", "generation_failed")
    assert data["error"]["request_id"] == response.headers["x-request-id"]


def test_a_watcher_that_leaves_takes_its_request_along(client, engine, until):
    engine.holds = True
    with client.stream("POST", "/t2i", json={"prompt": "p", "stream": True}) as response:
        assert next(response.iter_lines()) == "event: progress"
    until(lambda: [request.request_id for request in engine.submitted] == engine.cancelled)


def test_a_watcher_hears_of_its_engines_death_before_anybody_tells_how_it_ended(new_engine, serve, until):
    engine = new_engine()
    engine.deaths, engine.returns = 1, False
    with serve(Config(), engine) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        with client.stream("POST", "/t2i", json={"prompt": "p", "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            told = (json.loads(line.removeprefix("data: ")) for line in lines)
            lost = next(data for data in told if data["finish_in_s"] is None)
            assert (lost["queue_position"], lost["step"]) == (0, 0)
            engine.become("ready")
            *_, last = told
            assert len(last["images"]) == 1


@pytest.fixture
def openai_client(url, engine):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_gets_partial_images_and_the_completed_one(openai_client, engine, spec):
    heard = list(
        openai_client.images.generate(
            prompt="p", stream=True, partial_images=2, output_format="webp", extra_body={"seed": 5}
        )
    )
    *partial, completed = heard
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 2
    assert [event.partial_image_index for event in partial] == [0, 1]
    size = (spec.default_width_px, spec.default_height_px)
    for event in heard:
        file = Image.open(io.BytesIO(base64.b64decode(event.b64_json)))
        assert (file.format, file.size) == ("WEBP", size)
    assert (completed.type, completed.seed, completed.usage.total_tokens) == ("image_generation.completed", 5, 0)


def test_openais_client_raises_what_goes_wrong_on_the_way(openai_client, engine):
    engine.nonsense = True
    with pytest.raises(openai.APIError, match="makes no sense"):
        list(openai_client.images.generate(prompt="p", stream=True))


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"X-Noria-Priority": "urgent"}, "allowed are low, normal, high"),
        ({"X-Noria-Deadline-Ms": "1e3"}, "whole number of milliseconds"),
        ({"X-Noria-Deadline-Ms": "0"}, "allowed are 1 to"),
    ],
)
def test_bad_headers_are_refused_in_words(client, headers, says):
    response = client.post("/t2i", json={"prompt": "p"}, headers=headers)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_priority_and_deadline_come_by_body_or_header_and_the_body_wins(client, engine):
    headers = {"X-Noria-Priority": "low", "X-Noria-Deadline-Ms": "1500"}
    client.post("/t2i", json={"prompt": "p"}, headers=headers)
    client.post("/t2i", json={"prompt": "p", "priority": "high", "deadline_ms": 2000}, headers=headers)
    client.post("/t2i", json={"prompt": "p"})
    assert [request.priority for request in engine.submitted] == ["low", "high", "normal"]
    by_header, by_body, none = (request.deadline_s for request in engine.submitted)
    # A little less than asked for: the front end needs some of the time to make a file of the image.
    assert 0.5 < by_header <= 1.5 < by_body <= 2.0
    assert none is None


def test_a_full_mailbox_keeps_every_preview_and_the_newest_progress():
    async def scenario():
        mailbox = LatestUpdates()
        previews = [PreviewImage(0, step, 1, 1, b"rgb") for step in range(3)]
        for step in range(1000):
            mailbox.put(ProgressUpdate(None, step, 1000, 1.0))
        for preview in previews:
            mailbox.put(preview)
        await mailbox.wait()
        assert mailbox.take() == [*previews, ProgressUpdate(None, 999, 1000, 1.0)]
        assert mailbox.take() == []

    asyncio.run(scenario())


def test_what_comes_while_its_reader_takes_its_time_is_told_before_the_end():
    class Draws:
        """A studio that ends when the first update is read."""

        def __init__(self):
            self.is_read = asyncio.Event()

        async def draw(self, _wish, watch):
            watch(ProgressUpdate(None, 0, 2, 1.0))
            await self.is_read.wait()
            watch(PreviewImage(0, 1, 1, 1, b"rgb"))
            return "drawing"

    async def scenario():
        studio, heard = Draws(), []
        drawing = StreamedGeneration(studio, admitted=None)
        async for happening in drawing.updates():
            heard.append(happening)
            studio.is_read.set()
            await asyncio.wait([drawing._task])  # for so long the connection bears no more
        assert heard == [ProgressUpdate(None, 0, 2, 1.0), PreviewImage(0, 1, 1, 1, b"rgb"), "drawing"]

    asyncio.run(scenario())


def test_a_stream_of_images_is_answered_while_the_server_drains(serve, new_engine, until):
    engine = new_engine()
    engine.holds = True
    with serve(Config(), engine) as (url, server), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        with client.stream("POST", "/t2i", json={"prompt": "p", "stream": True}) as response:
            server.should_exit = True
            until(lambda: not server.servers or not any(each.is_serving() for each in server.servers))
            engine.holds = False
            engine.become("dead")  # and draws what it had in its next life
            engine.become("ready")
            names = [name for name, _ in events_of(response)]
    assert names[-1] == "finished"
