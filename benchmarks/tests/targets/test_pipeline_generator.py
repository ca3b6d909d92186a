"""What the targets share: whom the pipeline draws together when a framework's batch mixes settings, and what each is given."""

import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from noria.config import EngineConfig
from noria.frontend.engines.pool import RawImage
from noria.models.catalog import open_model
from noria_bench.targets.pipeline_generator import (
    PipelineGenerator,
    T2IBody,
    TargetJob,
    batch_key_of,
    generate_mixed,
    image_response,
)

SPEC = open_model("bundled")


class RecordingGenerator:
    """Draws images that say whose they are, by their seed."""

    def __init__(self):
        self.calls = []

    def generate(self, batch_key, bodies):
        self.calls.append((batch_key.inference_steps, [body.prompt for body in bodies]))
        return [[RawImage(body.seed + k, 1, 1, memoryview(bytes(3))) for k in range(body.n)] for body in bodies]


def test_a_batch_of_mixed_settings_is_drawn_by_groups_and_each_gets_its_own_images():
    recorder = RecordingGenerator()
    bodies = [
        T2IBody(prompt="a", seed=10, inference_steps=5),
        T2IBody(prompt="b", seed=20, inference_steps=7, n=3),
        T2IBody(prompt="c", seed=30, inference_steps=5, n=2),
        T2IBody(prompt="d", seed=40, inference_steps=7),
    ]
    generated = generate_mixed(recorder, SPEC, bodies)
    assert recorder.calls == [(5, ["a", "c"]), (7, ["b", "d"])]
    assert [[image.seed for image in images] for images, _ in generated] == [[10], [20, 21, 22], [30, 31], [40]]
    assert [size for _, size in generated] == [3, 4, 3, 4]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' schedulers, newest NumPy
def test_whoever_asks_one_thread_draws_so_that_no_second_team_of_openmp_s_is_there(tiny_folder):
    def threads():
        return set(map(int, os.listdir("/proc/self/task")))

    spec = open_model(str(tiny_folder))
    drawer = PipelineGenerator(TargetJob(spec, EngineConfig(devices=("cpu",), dtype="float32", threads=2), port=0))
    body = T2IBody(prompt="", inference_steps=2)
    before = threads()
    with ThreadPoolExecutor(max_workers=1) as asking:
        for _ in range(2):
            asking.submit(drawer.generate, batch_key_of(body, spec), [body]).result()
        new = threads() - before  # others may end meanwhile, which an earlier test began
        assert new == {asking.submit(threading.get_native_id).result()}


def test_what_is_left_out_is_the_model_s_and_does_not_part_a_group():
    explicit = T2IBody(
        prompt="told",
        width=SPEC.default_width_px,
        height=SPEC.default_height_px,
        inference_steps=SPEC.default_steps,
        guidance_scale=SPEC.default_guidance,
        scheduler=SPEC.default_scheduler,
    )
    assert batch_key_of(explicit, SPEC) == batch_key_of(T2IBody(prompt="untold"), SPEC)


@pytest.mark.parametrize(
    "field",
    [
        {"width": 64},
        {"height": 64},
        {"inference_steps": 3},
        {"guidance_scale": 0.0},
        {"scheduler": "ddim"},
    ],
)
def test_each_setting_that_the_pipeline_takes_once_parts_a_group(field):
    assert batch_key_of(T2IBody(prompt="", **field), SPEC) != batch_key_of(T2IBody(prompt=""), SPEC)


def test_one_image_is_its_file_and_several_are_json():
    pixels = np.arange(12, dtype=np.uint8)
    image = RawImage(1, 2, 2, memoryview(pixels.tobytes()))
    reply = image_response([image], 5)
    assert (reply.media_type, reply.headers) == ("image/png", {"X-Batch-Size": "5"})
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(reply.content))).reshape(-1), pixels)
    several = image_response([image, image], 2)
    assert several.media_type == "application/json"
    assert len(json.loads(several.content)["images"]) == 2
