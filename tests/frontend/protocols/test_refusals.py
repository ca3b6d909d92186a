"""Images that the safety classifier of their model has refused, as the clients of each protocol see them."""

import base64
import io
import json
import re
from collections import Counter

import openai
import pytest
from PIL import Image

from frontends import served_client
from noria.config import Config, StatisticsConfig
from noria.images.metadata_io import read_metadata
from waiting import wait_until

CODE = "content_policy_violation"


@pytest.fixture
def scored(engine):
    """The image of seed 8 is refused, those of the seeds beside it are not."""
    engine.safety_scores = {7: 0.25, 8: 0.75, 9: 0.125}
    return engine


def colour_of(b64_json):
    return Image.open(io.BytesIO(base64.b64decode(b64_json))).getpixel((0, 0))


def metric(client, name):
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{name}{{model="tiny"'))


def stat_counts(client):
    """How many values of statistics were counted, by variable."""
    counts = Counter({"image_safety_score": 0.0, "image_brightness": 0.0})
    page = client.get("/metrics").text
    for name, count in re.findall(r"^noria_stat_(\w+)_count\{endpoint=\"tiny\".* (\S+)$", page, re.MULTILINE):
        if name in counts:
            counts[name] += float(count)
    return counts


@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations", "/sdapi/v1/txt2img"])
def test_a_request_whose_images_are_all_refused_is_a_bad_one(client, scored, path):
    before = metric(client, "noria_images_refused_total")
    answer = client.post(path, json={"prompt": "p", "seed": 8})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["retryable"]) == (CODE, "invalid_request_error", False)
    assert "refused by the safety classifier of tiny (safety score 0.75)" in error["message"]
    if path.startswith("/sdapi"):
        assert answer.json()["detail"] == error["message"]
    assert metric(client, "noria_images_refused_total") == before + 1


def test_the_others_of_a_request_are_returned(client, scored):
    answer = client.post("/t2i", json={"prompt": "p", "seed": 7, "n": 3})
    assert answer.headers["x-noria-refused-images"] == "1"
    images = answer.json()["images"]
    assert [(image["index"], image["seed"], image["safety_score"]) for image in images] == [(0, 7, 0.25), (2, 9, 0.125)]
    assert answer.json()["refused_images"] == [{"index": 1, "seed": 8, "safety_score": 0.75}]
    assert [colour_of(image["b64_json"]) for image in images] == [scored.colour(7), scored.colour(9)]
    answer = client.post("/sdapi/v1/txt2img", json={"prompt": "p", "seed": 8, "batch_size": 2}).json()
    info = json.loads(answer["info"])
    assert [colour_of(image) for image in answer["images"]] == [scored.colour(9)]
    assert (info["seed"], info["all_seeds"], len(info["infotexts"])) == (9, [9], 1)
    assert info["refused_images"] == [{"index": 0, "seed": 8, "safety_score": 0.75}]


def test_without_a_classifier_nothing_says_safety(client, engine):
    answers = [
        client.post("/t2i", json={"prompt": "p", "n": 2}).text,
        client.post("/v1/images/generations", json={"prompt": "p"}).text,
    ]
    assert not any("safety" in text or "refused" in text for text in answers)


def test_files_have_the_score(client, scored, tmp_path):
    for extension in ("png", "webp"):
        file = tmp_path / f"image.{extension}"
        file.write_bytes(client.post("/t2i", json={"prompt": "p", "seed": 7, "format": extension}).content)
        assert read_metadata(file).safety_score == 0.25


def test_openais_client_reads_refusals(openai_client, scored):
    client = openai_client.with_options(max_retries=3)
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="p", extra_body={"seed": 8})
    assert (caught.value.code, caught.value.type, caught.value.param) == (CODE, "invalid_request_error", None)
    assert len(scored.submitted) == 1, "it is not sent again"
    answer = client.images.generate(prompt="p", n=3, extra_body={"seed": 7})
    assert [(image.seed, image.safety_score) for image in answer.data] == [(7, 0.25), (9, 0.125)]
    assert answer.refused_images == [{"index": 1, "seed": 8, "safety_score": 0.75}]
    events = list(client.images.generate(prompt="p", n=3, stream=True, extra_body={"seed": 7}))
    assert [(event.type, event.index, event.seed) for event in events] == [
        ("image_generation.completed", 0, 7),
        ("image_generation.completed", 2, 9),
    ]
    with pytest.raises(openai.APIError) as caught:
        list(client.images.generate(prompt="p", stream=True, extra_body={"seed": 8}))
    assert caught.value.body["code"] == CODE


def test_a_job_says_it_of_each_image(client, scored):
    def run(**settings):
        job_id = client.post("/v1/jobs", json={"input": {"prompt": "p"} | settings}).json()["id"]
        wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["completed_at"])
        return client.get(f"/v1/jobs/{job_id}").json()

    job = run(seed=7, n=3)
    assert (job["status"], len(job["output"])) == ("succeeded", 2)
    assert job["metrics"]["safety_scores"] == [0.25, 0.75, 0.125]
    assert job["metrics"]["refused_images"] == [1]
    last = Image.open(io.BytesIO(client.get(job["output"][1]).content))
    assert last.getpixel((0, 0)) == scored.colour(9)
    job = run(seed=8)
    assert (job["status"], job["error_code"], job["output"]) == ("failed", CODE, None)
    assert "safety score 0.75" in job["error"]


def test_scores_are_counted_with_those_of_refused_images(new_engine):
    engine = new_engine()
    engine.safety_scores = {7: 0.25, 8: 0.75, 9: 0.125}
    config = Config(statistics=StatisticsConfig(builtin=("images",)))
    with served_client(config, engine) as client:
        before = stat_counts(client)  # other tests of this process have counted, too
        assert client.post("/t2i", json={"prompt": "p", "seed": 7, "n": 3}).status_code == 200
        assert client.post("/t2i", json={"prompt": "p", "seed": 8}).status_code == 400
        wait_until(lambda: stat_counts(client) - before == {"image_safety_score": 4.0, "image_brightness": 2.0})
