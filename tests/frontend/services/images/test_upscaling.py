"""Images that are enlarged, by filters and by upscalers in engines."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from extras_client import IMAGE, WEBUIAPI, extra, opened
from noria.frontend.http.body import MAX_LARGE_BODIES_PER_CLIENT
from noria.frontend.services.images import upscaling
from noria.protocol.diffusion import Upscaling
from uploads import b64, file_of, photo
from waiting import wait_until


@pytest.mark.parametrize(
    ("fields", "size", "resampling"),
    [
        ({}, (80, 48), Image.Resampling.LANCZOS),
        ({"upscaler_1": "Nearest", "upscaling_resize": "1.5"}, (56, 32), Image.Resampling.NEAREST),  # 60 × 36
        ({"upscaler_1": "None"}, (40, 24), None),
        ({"upscaler_1": None, "resize_mode": 1}, (40, 24), None),
    ],
)
def test_filters_enlarge_an_image_without_an_engine(client, engine, fields, size, resampling):
    answer = extra(client, **fields)
    assert answer.status_code == 200, answer.text
    image = opened(answer.json()["image"])
    assert (image.size, answer.json()["html_info"], engine.submitted) == (size, "", [])
    if resampling is None or size == (80, 48):
        expected = IMAGE if resampling is None else IMAGE.resize(size, resampling)
        assert image.tobytes() == expected.tobytes()


def test_a_result_of_too_many_pixels_is_rejected(client, monkeypatch):
    monkeypatch.setattr(upscaling, "MAX_RESULT_PIXELS", 80 * 48)
    assert opened(extra(client, upscaling_resize=2).json()["image"]).size == (80, 48)
    answer = extra(client, upscaling_resize=2.2)
    assert answer.status_code == 400
    assert "the result would have 88 × 48 pixels; at most 3840 are allowed" in answer.json()["detail"]


def test_an_upscaler_of_a_file_runs_in_an_engine(upscaling_server):
    client, engine, upscaler = upscaling_server
    answer = extra(client, upscaler_1="4x-Tiny", upscaling_resize=4)
    assert answer.status_code == 200, answer.text
    assert opened(answer.json()["image"]).size == (160, 96)
    (request,), (data,) = engine.submitted, engine.data
    assert (request.payload.upscaling, data) == (Upscaling(160, 96, upscaler), IMAGE.tobytes())
    assert (request.payload.width, request.payload.height, request.payload.has_images) == (40, 24, False)
    files = [{"data": b64(file_of(photo((16, 16)))), "name": "a"}, {"data": b64(file_of(photo((8, 24)))), "name": "b"}]
    batch = client.post("/sdapi/v1/extra-batch-images", json=WEBUIAPI | {"imageList": files, "upscaler_1": "4x-Tiny"})
    assert [opened(each).size for each in batch.json()["images"]] == [(32, 32), (16, 48)]
    smaller = {"resize_mode": 1, "upscaling_resize_w": 16, "upscaling_resize_h": 16}
    assert opened(extra(client, upscaler_1="4x-Tiny", **smaller).json()["image"]).size == (16, 16)
    assert len(engine.submitted) == 3  # what gets smaller needs no upscaler


def test_priority_and_deadline_are_in_headers(upscaling_server):
    client, engine, _ = upscaling_server
    urgent = {"X-Noria-Priority": "high", "X-Noria-Deadline-Ms": "9000"}
    client.headers.update(urgent)
    assert extra(client, upscaler_1="4x-Tiny").status_code == 200
    (request,) = engine.submitted
    assert request.priority == "high" and 1 < request.deadline_s < 9
    for name, value in [("X-Noria-Priority", "top"), ("X-Noria-Deadline-Ms", "0")]:
        client.headers.update(urgent | {name: value})
        assert extra(client).status_code == 400


def test_images_that_engines_enlarge_hold_no_places_of_uploads(upscaling_server):
    client, engine, _ = upscaling_server
    engine.never_answers = True
    image = b64(file_of(photo((200, 200))))
    with ThreadPoolExecutor(MAX_LARGE_BODIES_PER_CLIENT) as threads:
        running = [
            threads.submit(extra, client, image=image, upscaler_1="4x-Tiny") for _ in range(MAX_LARGE_BODIES_PER_CLIENT)
        ]
        wait_until(lambda: len(engine.submitted) == len(running))
        assert extra(client, image=image).status_code == 200
        client.post("/sdapi/v1/interrupt")
    assert [each.result().status_code for each in running] == [499] * len(running)
