"""Z-Image in the running batch, with images of different sizes in one call, compared with diffusers' own pipeline."""

import json

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import ZImageImg2ImgPipeline, ZImageInpaintPipeline, ZImagePipeline

import tiny_models
from generating import assert_rows_as_alone, difference, generate
from noria.config import EngineConfig
from noria.engine.diffusion import executor as diffusion
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.loop import StepLoop
from noria.errors import InvalidField, ModelError
from noria.images import scheduler_names
from noria.models.catalog import open_model
from noria.models.families import FAMILIES
from noria.protocol.diffusion import Lora
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request
from pipelines import run_pipeline

# Against the pipeline: other kernels at other batch sizes, and a step's terms summed in another order.
PARITY_TOLERANCE = 2
PROMPTS = ["a red circle", "a blue square above a green star, drawn with a soft pencil on grey paper", ""]
SIZES = [(64, 64), (32, 48), (64, 40), (40, 64)]


def load(folder, device="cpu", **settings):
    torch.set_num_threads(1)
    spec = open_model(str(folder))
    config = EngineConfig(**{"dtype": "float32", "slots": 8, "threads": 1} | settings)
    return spec, DiffusionExecutor(FAMILIES[spec.family].load(spec, config, device), config)


def open_pipeline(folder, pipeline_class=ZImagePipeline):
    pipe = pipeline_class.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def tiny(tiny_z_image_folder, request):
    return load(tiny_z_image_folder, request.param)


@pytest.fixture(scope="module")
def pipeline(tiny_z_image_folder):
    return open_pipeline(tiny_z_image_folder)


def make_request(number, **fields):
    width, height = SIZES[number % 4]
    settings = {
        "prompt": PROMPTS[number % 3],
        "negative_prompt": [None, "a black cross", ""][number % 3],
        "seed": 3000 + number,
        "width": width,
        "height": height,
        "inference_steps": 3 + number % 5,
        "guidance_scale": [0.0, 0.5, 4.0][number % 3],
        "scheduler": "flow-euler",
    }
    return make_image_request(f"r{number}", **settings | fields)


def assert_like_the_pipeline(executor, pipe, request, **options):
    ours = generate(executor, [request])[request.request_id, 0]
    assert difference(ours, run_pipeline(pipe, request, **options)) <= PARITY_TOLERANCE, request
    assert ours.std() > 10, "the image is flat"


@pytest.mark.parametrize("number", range(3))
def test_an_image_is_that_of_the_pipeline(tiny, pipeline, number):
    assert_like_the_pipeline(tiny[1], pipeline.to(tiny[1].model.device), make_request(number))


def test_late_joiners_of_a_batch_of_all_sizes_give_the_images_of_the_pipeline(tiny, pipeline, monkeypatch):
    executor = tiny[1]
    sizes, real = [], executor.model.predict

    def predict(latents_R, *rest):
        sizes.append({tuple(row.shape) for row in latents_R})
        return real(latents_R, *rest)

    monkeypatch.setattr(executor.model, "predict", predict)
    requests = [make_request(number, inference_steps=4 + number) for number in range(8)]
    together = generate(executor, requests, arrivals=[(5 * k) % 7 for k in range(8)])
    assert max(map(len, sizes)) == 4, "no call had all sizes"
    pipe = pipeline.to(executor.model.device)
    for request in requests:
        image = together[request.request_id, 0]
        assert difference(image, run_pipeline(pipe, request)) <= PARITY_TOLERANCE, request
        assert difference(image, generate(executor, [request])[request.request_id, 0]) <= 1, request


def test_rows_of_a_call_equal_the_rows_alone(tiny):
    model = tiny[1].model
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        # Padded up to the longest: 19 to 512 tokens, 32 to 64 of the image.
        texts = model.text_encode([*PROMPTS, "many words " * 60])
        shapes = [model.latent_shape(*size) for size in SIZES]
        latents = [torch.randn(shape, generator=generator).to(model.device) for shape in shapes]
        times = torch.tensor([1000.0, 640.0, 333.0, 1.0], device=model.device)
        assert_rows_as_alone(model, latents, times, texts)


def test_prompts_together_equal_the_prompts_alone(tiny):
    model = tiny[1].model
    with torch.inference_mode():
        for prompt, together in zip(PROMPTS, model.text_encode(PROMPTS), strict=True):
            alone = model.text_encode([prompt])[0].tokens["caption"]
            assert together.tokens["caption"].shape == alone.shape
            assert (together.tokens["caption"] - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_prompts_are_encoded_and_cut_as_by_the_pipeline(tiny, pipeline):
    prompts = [*PROMPTS, "<|im_end|> é 水车 " * 99]
    with torch.inference_mode():
        theirs, _ = pipeline.to(tiny[1].model.device).encode_prompt(list(prompts), do_classifier_free_guidance=False)
        for ours, expected in zip(tiny[1].model.text_encode(prompts), theirs, strict=True):
            torch.testing.assert_close(ours.tokens["caption"], expected)


def test_rows_padded_to_buckets_change_no_image(tiny, tiny_z_image_folder):
    padded = load(tiny_z_image_folder, str(tiny[1].model.device), buckets=(4, 16))[1]
    requests = [make_request(number) for number in range(3)]
    without, images = generate(tiny[1], requests), generate(padded, requests)
    assert all(difference(images[key], image) <= 1 for key, image in without.items())


@pytest.mark.parametrize("pipeline_class", [ZImageImg2ImgPipeline, ZImageInpaintPipeline])
def test_start_images_and_masks_of_all_sizes_give_the_images_of_their_pipelines(
    tiny, tiny_z_image_folder, pipeline_class
):
    has_mask = pipeline_class is ZImageInpaintPipeline
    pipe = open_pipeline(tiny_z_image_folder, pipeline_class).to(tiny[1].model.device)
    requests = [
        make_request(number, inference_steps=steps, strength=strength, has_mask=has_mask)
        for number, (steps, strength) in enumerate([(4, 0.5), (5, 0.5), (4, 1.0)])
    ]
    frames, options = {}, {}
    for request in requests:
        width, height, seed = request.payload.width, request.payload.height, request.payload.seed
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        mask = np.where(np.arange(width) < width // 2, 255, 0).astype(np.uint8)[None].repeat(height, 0)
        frames[request.request_id] = memoryview(pixels.tobytes() + mask.tobytes() * has_mask)
        options[request.request_id] = {"image": PIL.Image.fromarray(pixels), "strength": request.payload.strength}
        if has_mask:
            options[request.request_id]["mask_image"] = PIL.Image.fromarray(mask)
    images = generate(tiny[1], requests, [2, 0, 1], frames)
    for request in requests:
        theirs = run_pipeline(pipe, request, **options[request.request_id])
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


@pytest.mark.parametrize(
    "scheduler", [{"shift": 6.0}, {"use_dynamic_shifting": True}, {"shift_terminal": 0.1}, {"use_beta_sigmas": True}]
)
def test_the_schedulers_own_settings_are_the_folders(tmp_path, scheduler):
    folder = tiny_models.save_z_image(tmp_path, scheduler=scheduler)
    executor, pipe = load(folder)[1], open_pipeline(folder)
    for number in (0, 2, 3):
        assert_like_the_pipeline(executor, pipe, make_request(number))


def test_the_norm_of_guided_outputs_is_limited_as_by_the_pipeline(tmp_path):
    folder = tiny_models.save_z_image(tmp_path)
    (folder / "noria.json").write_text('{"cfg_normalization": 0.5}')
    executor, pipe = load(folder)[1], open_pipeline(folder)
    requests = [make_request(number) for number in range(3)]
    for request, image in zip(requests, generate(executor, requests).values(), strict=True):
        limited = run_pipeline(pipe, request, cfg_normalization=0.5)
        assert difference(image, limited) <= PARITY_TOLERANCE
        changes = difference(limited, run_pipeline(pipe, request)) > PARITY_TOLERANCE
        assert changes == (request.payload.guidance_scale > 0)


def test_a_step_that_runs_out_of_memory_is_repeated_for_all_sizes(tiny, monkeypatch):
    executor, failing = tiny[1], []
    requests = [make_request(number) for number in range(4)]
    undisturbed = generate(executor, requests)
    real = diffusion.next_samples

    def next_samples(*arguments):
        failing.append(arguments)
        if len(failing) == 3:  # call of the second size, after the first
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*arguments)

    monkeypatch.setattr(diffusion, "next_samples", next_samples)
    images = generate(executor, requests)
    assert all(difference(images[key], image) <= 1 for key, image in undisturbed.items())


def test_thumbnails_of_all_sizes(tiny):
    loop = StepLoop(StepScheduler(8), tiny[1], lambda _: None, lambda: 0.0, lambda _plan: True)
    for number in range(2):
        loop.submit(tiny[1].prepare(make_request(number, inference_steps=4)))
    thumbnails = loop.run_iteration().thumbnails
    assert {(each.image.attempt_id, each.width_px, each.height_px) for each in thumbnails} == {
        ("r0", 16, 16),
        ("r1", 8, 12),
    }


def test_the_preview_of_the_last_call_is_the_image_of_its_latents(tiny):
    """At the last call, x - σ·v is the final sample."""
    model = tiny[1].model
    weights = model.clean_weights(np.array([1000.0, 250.0], np.float32))
    assert weights.tolist() == [[1.0, 1.0], [-1.0, -0.25]]
    table = tiny[1].prepare(make_request(0)).table
    coefficients, last = table.coefficients[-1], model.clean_weights(table.timesteps[-1:])[:, 0]
    np.testing.assert_allclose(coefficients[coefficients != 0], last, rtol=1e-5)


def test_bounds_and_defaults(tiny, tmp_path):
    spec, executor = tiny
    assert (spec.family, spec.pipeline) == ("z-image", "ZImagePipeline")
    assert (spec.default_width_px, spec.min_side_px, spec.max_side_px, spec.multiple_px) == (64, 32, 64, 8)
    assert (spec.default_scheduler, spec.schedulers) == ("flow-euler", ("flow-euler",))
    assert (spec.default_steps, spec.default_guidance) == (9, 0.0)
    assert executor.model.noise_dtype is torch.float32
    base = open_model(str(tiny_models.save_z_image(tmp_path, scheduler={"shift": 6.0})))
    assert (base.default_steps, base.default_guidance) == (50, 5.0)


@pytest.mark.parametrize("name", [choice.name for choice in scheduler_names.SCHEDULERS if choice.family != "flow"])
def test_a_scheduler_of_another_family_is_rejected(tiny, name):
    with pytest.raises(InvalidField, match="but this is a flow model"):
        tiny[1].prepare(make_request(0, scheduler=name))


def test_loras_are_rejected_by_the_name_of_a_model_that_takes_none(tiny, monkeypatch):
    monkeypatch.setattr(tiny[1].model, "lora_parts", {})
    with pytest.raises(InvalidField, match="has no parts that LoRAs can change"):
        tiny[1].prepare(make_request(0, loras=(Lora("ink"),)))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"transformer": {"siglip_feat_dim": 16}}, "siglip_feat_dim is 16: Z-Image-Omni"),
        ({"transformer": {"cap_feat_dim": 16}}, "cap_feat_dim is 16; supported is 24, hidden_size of"),
        ({"transformer": {"in_channels": 16}}, "in_channels is 16; supported is 4, latent_channels of"),
        ({"transformer": {"axes_lens": [512, 8, 8]}}, r"axes_lens is .*; the first must be at least 514"),
        (
            {"transformer": {"all_patch_size": [2, 4], "all_f_patch_size": [1, 1]}},
            r"all_patch_size \(2, 4\).*supported",
        ),
        ({"text_encoder": {"vocab_size": 258}}, "token ids up to 258, but the text encoder has 258"),
        ({"text_encoder": {"max_position_embeddings": 256}}, "max_position_embeddings is 256; allowed is ≥ 512"),
        ({"scheduler": {"stochastic_sampling": True}}, "stochastic_sampling"),
        ({"scheduler": {"_class_name": "EulerDiscreteScheduler"}}, "EulerDiscreteScheduler"),
    ],
)
def test_a_folder_that_is_not_supported_is_rejected(tmp_path, parts, words):
    folder = tiny_models.save_z_image(tmp_path, **parts)
    with pytest.raises(ModelError, match=words):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model_index.json", {"text_encoder": ["transformers", "T5Model"]}, "'T5Model'; supported: Qwen3Model"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderTiny"]}, "'AutoencoderTiny'; supported: AutoencoderKL"),
        ("text_encoder/config.json", {"auto_map": {"AutoModel": "x.Y"}}, "chooses code"),
        ("text_encoder/config.json", {"model_type": "llama"}, "model_type"),
        (
            "text_encoder/config.json",
            {"vocab_size": 300},
            "embed_tokens.weight is .264, 24., but config.json has vocab",
        ),
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": "x.Y"}}, "chooses code"),
        ("transformer/config.json", {"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ("noria.json", {"guidance_rescale": 0.7}, "guidance_rescale"),
        ("noria.json", {"default_scheduler": "flow-heun"}, "default_scheduler is flow-heun; supported are flow-euler"),
    ],
)
def test_a_damaged_or_hostile_folder_is_rejected(tiny_z_image_folder, tmp_path, file, change, words):
    import shutil

    folder = shutil.copytree(tiny_z_image_folder, tmp_path / "model")
    path = folder / file
    tree = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(tree | change))
    with pytest.raises(ModelError, match=words):
        open_model(str(folder))
