"""FLUX.1 and Stable Diffusion 3 in the running batch, compared with diffusers' own pipelines and with each alone."""

import itertools
import json
import shutil

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import save_file

import tiny_models
from flow_pipelines import PARITY_TOLERANCE, PROMPTS, generate_with_pipeline, load, make_request, open_pipeline
from generating import assert_adapter_changes_its_image_alone, difference, generate
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.models.diffusion.conditioning import collate
from noria.models.diffusion.loras.lora_file import read_lora
from noria.sampling.previews import clean_latents

SCHEDULERS = {
    "dev": ("flow-euler", "flow-unipc", "flow-dpm++2m"),
    "schnell": ("flow-euler", "flow-unipc"),
    "sd3": ("flow-euler", "flow-heun", "flow-unipc", "flow-dpm++2m"),
    "sd3-dynamic": ("flow-euler", "flow-unipc", "flow-dpm++2m"),
}


def save(folder, name):
    match name:
        case "dev":
            return tiny_models.save_flux(folder)
        case "schnell":
            settings = {"use_dynamic_shifting": False, "shift": 1.0}
            return tiny_models.save_flux(folder, transformer={"guidance_embeds": False}, scheduler=settings)
        case "sd3":
            return tiny_models.save_stable_diffusion_3(folder)
    return tiny_models.save_stable_diffusion_3(folder, scheduler={"use_dynamic_shifting": True, "max_shift": 1.2})


@pytest.fixture(scope="module", params=SCHEDULERS)
def model(request, tmp_path_factory):
    """A folder's spec and executor, and diffusers' pipeline."""
    folder = save(tmp_path_factory.mktemp("flow") / request.param, request.param)
    return *load(folder), open_pipeline(folder)


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    """A folder like FLUX.1 dev: its spec and executor."""
    return load(save(tmp_path_factory.mktemp("flow") / "dev", "dev"))


def test_each_scheduler_gives_the_image_of_the_pipeline(model):
    spec, executor, pipe = model
    assert spec.schedulers == SCHEDULERS[spec.name]
    for number, (name, steps) in enumerate(itertools.product(spec.schedulers, (2, 3, 7))):
        request = make_request(number, scheduler=name, inference_steps=steps)
        ours = generate(executor, [request])[request.request_id, 0]
        assert difference(ours, generate_with_pipeline(pipe, request)) <= PARITY_TOLERANCE, request


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(model):
    spec, executor, pipe = model
    requests = [
        make_request(
            k,
            scheduler=spec.schedulers[k % len(spec.schedulers)],
            inference_steps=2 + k,
            guidance_scale=[0.0, 3.5, 7.0][k % 3],
            width=[32, 48][k // 4],
            negative_prompt=[None, "blue"][k % 2],  # FLUX.1 ignores it
        )
        for k in range(8)
    ]
    together = generate(executor, requests, arrivals=[(5 * k) % 7 for k in range(8)])
    for request in requests:
        image = together[request.request_id, 0]
        assert difference(image, generate_with_pipeline(pipe, request)) <= PARITY_TOLERANCE, request
        assert difference(image, generate(executor, [request])[request.request_id, 0]) <= 1, request


def test_rows_of_a_call_equal_the_rows_alone(model):
    denoiser, scales = model[1].model, torch.tensor([0.0, 3.5, 9.0])
    with torch.inference_mode():
        texts = denoiser.text_encode(PROMPTS)
        latents, times = torch.randn(3, *denoiser.latent_shape(32, 24)), torch.tensor([999.0, 640.0, 3.0])
        together = denoiser.predict(latents, times, collate(texts), scales)
        for k in range(3):
            row = slice(k, k + 1)
            alone = denoiser.predict(latents[row], times[row], collate(texts[row]), scales[row])[0]
            assert (together[k] - alone).abs().max() <= 1e-5 * alone.abs().max()
            other = denoiser.predict(latents[row], times[row], collate(texts[:1]), torch.tensor([1.0]))[0]
            assert not k or (other - alone).abs().max() > 1e-3 * alone.abs().max()  # texts and scales matter


PIPELINES = {
    "flux": (diffusers.FluxImg2ImgPipeline, diffusers.FluxInpaintPipeline),
    "stable-diffusion-3": (diffusers.StableDiffusion3Img2ImgPipeline, diffusers.StableDiffusion3InpaintPipeline),
}


@pytest.mark.parametrize("has_mask", [False, True])
def test_start_images_and_masks_give_the_images_of_the_pipelines(model, has_mask, monkeypatch):
    spec, executor, pipe = model
    if has_mask and spec.family == "stable-diffusion-3":  # this pipeline forgets the shift that all others add
        decode, shift = pipe.vae.decode, pipe.vae.config.shift_factor
        monkeypatch.setattr(pipe.vae, "decode", lambda latents, **options: decode(latents + shift, **options))
    pixels = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    mask = np.zeros((32, 48), np.uint8)
    mask[8:24, 16:40] = 255
    options = {"image": PIL.Image.fromarray(pixels), "mask_image": PIL.Image.fromarray(mask)}
    if not has_mask:
        del options["mask_image"]
    start_pipe = PIPELINES[spec.family][has_mask](**pipe.components)
    start_pipe.set_progress_bar_config(disable=True)
    # Those that the pipelines can begin with: the others have no `scale_noise`.
    names = [name for name in spec.schedulers if name in ("flow-euler", "flow-heun")]
    cases = itertools.product(names, [(4, 0.5), (5, 0.5), (5, 0.75), (3, 1.0)])
    requests = [
        make_request(k, width=48, height=32, scheduler=name, inference_steps=n, strength=strength, has_mask=has_mask)
        for k, (name, (n, strength)) in enumerate(cases)
    ]
    frame = memoryview(pixels.tobytes() + (mask.tobytes() if has_mask else b""))
    images = generate(executor, requests, frames=dict.fromkeys((each.request_id for each in requests), frame))
    for request in requests:
        theirs = generate_with_pipeline(start_pipe, request, spec.path, strength=request.payload.strength, **options)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_an_adapter_of_all_layers_changes_its_image_alone(model, tmp_path):
    assert_adapter_changes_its_image_alone(model[1], make_request, tmp_path)


def test_bounds_and_defaults(model):
    spec = model[0]
    family, side, multiple, max_side, steps, guidance = {
        "dev": ("flux", 512, 8, 1024, 28, 3.5),
        "schnell": ("flux", 512, 8, 1024, 4, 0.0),
        "sd3": ("stable-diffusion-3", 32, 8, 64, 28, 7.0),
        "sd3-dynamic": ("stable-diffusion-3", 32, 8, 64, 28, 7.0),
    }[spec.name]
    assert (spec.family, spec.default_width_px, spec.multiple_px, spec.max_side_px) == (
        family,
        side,
        multiple,
        max_side,
    )
    defaults = (spec.default_scheduler, spec.default_steps, spec.default_guidance)
    assert defaults == ("flow-euler", steps, guidance)


def test_previews_show_the_image(model):
    """After the last call a preview is the image: with the weights, x - σ·v, as the sampler's own last step."""
    executor = model[1]
    table = executor.prepare(make_request(0)).table
    last = executor.model.clean_weights(table.timesteps[-1:])[:, 0]
    np.testing.assert_allclose(table.coefficients[-1][table.coefficients[-1] != 0], last, rtol=1e-5)
    latents, velocity = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    weights = torch.from_numpy(executor.model.clean_weights(np.array([250.0, 1000.0], np.float32)))
    clean = clean_latents(latents, velocity, weights)
    torch.testing.assert_close(clean, latents - torch.tensor([0.25, 1.0])[:, None, None, None] * velocity)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer/config.json", {"joint_attention_dim": 24}, "joint_attention_dim is 24; supported is 40"),
        ("transformer/config.json", {"pooled_projection_dim": 24}, "pooled_projection_dim is 24; supported is 32"),
        ("transformer/config.json", {"_class_name": "ZImageTransformer2DModel"}, "FluxTransformer2DModel"),
        ("text_encoder_2/config.json", {"vocab_size": 20}, "has 35 token ids, but the text encoder has 20 tokens"),
        ("tokenizer_2/tokenizer.json", {"model": {"vocab": {"a": 1}}}, "contains no vocabulary of T5"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "one of the flow family"),
        ("vae/config.json", {"latent_channels": 8}, "in_channels is 16; supported is 32"),
        ("model_index.json", {"text_encoder_2": ["x", "Y"]}, "T5EncoderModel"),
    ],
)
def test_parts_of_another_model_are_rejected(dev, tmp_path, file, change, words):
    folder = tmp_path / "m"
    shutil.copytree(dev[0].folder, folder)
    tree = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(tree | change))
    with pytest.raises(ModelError, match=words):
        open_model(str(folder))


def test_kohyas_joined_layers_are_split(dev, tmp_path):
    parts = dev[1].model.lora_parts
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer, outputs in (
        ("lora_unet_double_blocks_0_img_attn_qkv", 96),
        ("lora_unet_single_blocks_1_modulation_lin", 96),
        ("lora_te1_text_model_encoder_layers_0_self_attn_out_proj", 32),
    ):
        tensors |= {
            f"{layer}.lora_down.weight": torch.randn(4, 32, generator=generator),
            f"{layer}.lora_up.weight": torch.randn(outputs, 4, generator=generator),
            f"{layer}.alpha": torch.tensor(2.0),
        }
    save_file(tensors, tmp_path / "a.safetensors")
    layers = read_lora(tmp_path / "a.safetensors", parts, torch.float32, 2**20).layers
    attention = "transformer_blocks.0.attn.to_"
    assert set(layers["transformer"]) == {f"{attention}{name}" for name in "qkv"} | {
        "single_transformer_blocks.1.norm.linear"
    }
    ups = torch.cat([layers["transformer"][f"{attention}{name}"].up for name in "qkv"])
    expected = tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"] * 0.5
    torch.testing.assert_close(ups, expected)
    assert len(layers["text_encoder"]) == 1
    for more, words in [
        ({"lora_unet_double_blocks_40_img_mlp_0.lora_down.weight": torch.ones(4, 32)}, "no layer"),
        ({"lora_te2_encoder_block_0_layer_0_SelfAttention_v.lora_down.weight": torch.ones(4, 40)}, "has no up beside"),
        ({"lora_te1_text_model_encoder_layers_1_mlp_fc1.lora_up.weight": torch.ones(64, 4)}, "has no down beside"),
        ({"lora_unet_single_blocks_0_linear2.lora_down.weight": torch.ones(0, 160)}, "has no up beside"),
    ]:
        save_file(tensors | more, tmp_path / "b.safetensors")
        with pytest.raises(ModelError, match=words):
            read_lora(tmp_path / "b.safetensors", parts, torch.float32, 2**20)


@pytest.mark.parametrize(("name", "found"), [("euler", "flow-euler"), ("flow-unipc", "flow-unipc"), ("flow-lcm", None)])
def test_the_default_scheduler_is_one_of_those_supported(dev, tmp_path, name, found):
    folder = tmp_path / "m"
    shutil.copytree(dev[0].folder, folder)
    (folder / "noria.json").write_text(json.dumps({"default_scheduler": name}))
    if found is None:
        with pytest.raises(ModelError, match="default_scheduler is flow-lcm; supported are flow-euler, flow-unipc"):
            open_model(str(folder))
    else:
        assert open_model(str(folder)).default_scheduler == found
