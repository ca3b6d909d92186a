"""Stable Diffusion 1.5 at full size, with random weights: that it loads, fits and generates, and at what cost.

Takes minutes and 8 GB of memory, so it runs in `make test-slow`. Prints measurements; asserts nothing about speed.
"""

import json
import resource
import shutil
import time

import numpy as np
import pytest
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.engine.loop import ResultReady, StepLoop
from noria.models.catalog import open_model
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a billion parameters: minutes, and 8 GB of memory


@pytest.fixture(scope="module")
def stable_diffusion_1_5(tmp_path_factory, bundled_folder):
    """A folder of its format and architecture: 860 M, 123 M and 84 M parameters in float16; the tokenizer is the
    bundled one.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    folder = tmp_path_factory.mktemp("sd15")
    shutil.copytree(bundled_folder / "tokenizer", folder / "tokenizer")
    tokenizer_config = folder / "tokenizer" / "tokenizer_config.json"
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"model_max_length": 77}))
    torch.manual_seed(0)
    blocks = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8, down_block_types=blocks)
    unet.half().save_pretrained(folder / "unet")
    text = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    CLIPTextModel(text).half().save_pretrained(folder / "text_encoder")
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4,
        sample_size=512,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    vae.half().save_pretrained(folder / "vae")
    (folder / "scheduler").mkdir()
    scheduler = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)  # noqa: C408
    (folder / "scheduler" / "scheduler_config.json").write_text(
        json.dumps({"_class_name": "PNDMScheduler", "skip_prk_steps": True, **scheduler})
    )
    index = json.loads((bundled_folder / "model_index.json").read_text())
    index |= {"scheduler": ["diffusers", "PNDMScheduler"], "vae": ["diffusers", "AutoencoderKL"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    yield folder
    shutil.rmtree(folder)


def test_stable_diffusion_1_5_generates_two_images_of_512_px_in_one_batch(stable_diffusion_1_5, capsys):
    spec = open_model(str(stable_diffusion_1_5))
    assert (spec.default_width_px, spec.max_side_px, spec.num_parameters) == (512, 1024, 859_520_964)
    started = time.perf_counter()
    executor, settings = load_executor(spec, EngineConfig(), "auto")
    loaded_s = time.perf_counter() - started
    images, iterations = [], []
    engine_loop = StepLoop(
        StepScheduler(settings.slots),
        executor,
        lambda e: images.append(e) if isinstance(e, ResultReady) else None,
        time.monotonic,
    )
    for k, (name, steps) in enumerate([("dpm++2m", 2), ("euler-a", 3)]):
        engine_loop.submit(
            executor.prepare(
                make_image_request(
                    f"r{k}", seed=k, width=512, height=512, inference_steps=steps, guidance_scale=7.5, scheduler=name
                ),
            )
        )
    while (iteration := engine_loop.run_iteration()) is not None:
        iterations.append((len(iteration.plan.steps), iteration.duration_s))
    assert [image.prepared.request.request_id for image in images] == ["r0", "r1"]
    for image in images:
        assert np.frombuffer(image.result.pixels.rgb(), np.uint8).size == 512 * 512 * 3
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    with capsys.disabled():
        print(f"\nSD1.5 on {executor.model.device}, {settings.dtype}, {settings.slots} slots, "
              f"{settings.threads} threads: loaded in {loaded_s:.1f} s, peak {peak_gb:.1f} GB, "
              "iterations (images, seconds) "
              f"{[(n, round(s, 1)) for n, s in iterations]}")  # fmt: skip
