"""The pipeline that all targets share: how batches of mixed settings are split, and what a response contains."""

import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from noria.config import EngineConfig
from noria.frontend.engines.results import RawImage
from noria.models.catalog import open_model
from noria_bench.load.workload import start_image
from noria_bench.targets.pipeline_generator import (
    PipelineGenerator,
    T2IBody,
    TargetJob,
    batch_key_of,
    generate_mixed,
    image_response,
    read_start_image,
)

SPEC = open_model("bundled")


class RecordingGenerator:
    """Records its calls, and returns images that carry their seeds."""

    def __init__(self):
        self.calls = []

    def generate(self, batch_key, bodies):
        self.calls.append((batch_key.inference_steps, [body.prompt for body in bodies]))
        return [[RawImage(body.seed + k, 1, 1, memoryview(bytes(3))) for k in range(body.n)] for body in bodies]


def test_a_batch_of_mixed_settings_is_split_into_groups_and_each_body_gets_its_images():
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
def test_one_thread_generates_for_all_callers_so_that_openmp_has_one_team(tiny_folder):
    def threads():
        return set(map(int, os.listdir("/proc/self/task")))

    spec = open_model(str(tiny_folder))
    generator = PipelineGenerator(TargetJob(spec, EngineConfig(devices=("cpu",), dtype="float32", threads=2), port=0))
    body = T2IBody(prompt="", inference_steps=2)
    before = threads()
    with ThreadPoolExecutor(max_workers=1) as caller:
        for _ in range(2):
            caller.submit(generator.generate, batch_key_of(body, spec), [body]).result()
        new = threads() - before  # threads of earlier tests may end meanwhile
        assert new == {caller.submit(threading.get_native_id).result()}


def test_omitted_settings_are_the_model_s_defaults_and_prompts_seeds_and_numbers_share_a_group():
    explicit = T2IBody(
        prompt="explicit",
        width=SPEC.default_width_px,
        height=SPEC.default_height_px,
        inference_steps=SPEC.default_steps,
        guidance_scale=SPEC.default_guidance,
        scheduler=SPEC.default_scheduler,
    )
    omitted = T2IBody(prompt="omitted", seed=2, negative_prompt="no", n=2)
    assert batch_key_of(explicit, SPEC) == batch_key_of(omitted, SPEC)


@pytest.mark.parametrize(
    "field",
    [{"width": 64}, {"height": 64}, {"inference_steps": 3}, {"guidance_scale": 0.0}, {"scheduler": "ddim"},
     {"loras": [{"name": "night"}]}, {"image": "x"}, {"image": "x", "strength": 0.3}],
)  # fmt: skip
def test_each_setting_of_a_pipeline_call_separates_groups(field):
    assert batch_key_of(T2IBody(prompt="", **field), SPEC) != batch_key_of(T2IBody(prompt=""), SPEC)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' schedulers, newest NumPy
def test_calls_with_loras_and_start_images_change_what_they_should_and_no_later_call():
    generator = PipelineGenerator(TargetJob(SPEC, EngineConfig(devices=("cpu",), dtype="float32", threads=1), port=0))
    settings = {"prompt": "a red circle", "seed": 3, "inference_steps": 4}
    picture = start_image(1, SPEC.default_width_px, SPEC.default_height_px)
    plain, night, start, again = (
        np.frombuffer(generator.generate(batch_key_of(body, SPEC), [body])[0][0].rgb, np.uint8).astype(int)
        for body in (
            T2IBody(**settings),
            T2IBody(**settings, loras=[{"name": "night"}]),
            T2IBody(**settings, image=picture, strength=0.3),
            T2IBody(**settings),
        )
    )
    generator.close()
    assert np.array_equal(plain, again)
    assert night.mean() < plain.mean() - 20  # it makes the ground dark
    wanted = np.asarray(read_start_image(picture)).reshape(-1).astype(int)
    assert np.abs(start - wanted).mean() < 0.5 * np.abs(plain - wanted).mean()


def test_one_image_is_a_file_and_several_are_json():
    pixels = np.arange(12, dtype=np.uint8)
    image = RawImage(1, 2, 2, memoryview(pixels.tobytes()))
    reply = image_response([image], 5)
    assert (reply.media_type, reply.headers) == ("image/png", {"X-Batch-Size": "5"})
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(reply.content))).reshape(-1), pixels)
    several = image_response([image, image], 2)
    assert several.media_type == "application/json"
    assert len(json.loads(several.content)["images"]) == 2
