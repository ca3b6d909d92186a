"""IP-Adapters by row: as in diffusers' pipelines, in a mixed batch as alone, and not at all where there is none."""

import contextlib
import functools
import itertools

import diffusers
import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
import transformers

from generating import (
    PARITY_TOLERANCE,
    assert_as_alone,
    assert_latents_as_alone,
    difference,
    evicted_image,
    final_latents,
    generate,
    load,
    moved_image,
    relative,
)
from ip_adapter_files import ENCODER
from lora_files import save_diffusers_lora
from noria.engine.diffusion.sizing.weight_bytes import weights_of
from noria.errors import ConfigError, InvalidField
from noria.images.start_image import ImageFiles, RequestImages
from noria.models.adapters.ip_adapter_files import IpAdapterFiles
from noria.models.adapters.lora_folders import digest_of
from noria.protocol.diffusion import IpAdapter, Lora
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler
from tiny_models import save_flux, save_ip_adapters
from uploads import file_of, photo

KINDS = ("plain", "plus", "full")  # all that are saved for a UNet
PIPELINES = {
    "stable-diffusion": diffusers.StableDiffusionPipeline,
    "stable-diffusion-xl": diffusers.StableDiffusionXLPipeline,
    "flux": diffusers.FluxPipeline,
}


def load_with(folder, *adapters, **settings):
    settings = {"loras": (), "slots": 16} | settings
    return load(folder, ip_adapters=tuple(map(str, adapters)), **settings)


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory):
    """A model folder like FLUX.1 dev with two blocks of the kind that IP-Adapters change."""
    return save_flux(tmp_path_factory.mktemp("flux"), transformer={"num_layers": 2})


@pytest.fixture(scope="module", params=["tiny_folder", "tiny_xl_folder", "flux_folder"])
def served(request, tmp_path_factory):
    folder = request.getfixturevalue(request.param)
    kinds = {"flux_folder": ("flux",), "tiny_xl_folder": ("plus",)}.get(request.param, KINDS)
    return *load_with(folder, save_ip_adapters(tmp_path_factory.mktemp("served") / "models", folder, kinds)), folder


def image_of(request):
    """The image of a request's IP-Adapter, of no square shape."""
    return photo((61, 45), seed=request.payload.seed)


def make_request(executor, number, name=None, scale=0.8, **fields):
    """A request with an adapter by its name, or by its number among those of the model."""
    is_flux = executor.model.guidance.embedded
    settings = {
        "prompt": ["a red circle", "a blue square above a green star", "a large ring"][number % 3],
        "negative_prompt": None if is_flux else [None, "", "a black cross"][number % 3],
        "seed": 700 + number,
        "width": 48,
        "height": 32,
        "inference_steps": 4,
        "guidance_scale": [1.0, 5.0][number % 2],
        "scheduler": "flow-euler" if is_flux else "ddim",
    }
    if isinstance(name, int):
        names = list(executor.model.ip_adapters.by_name)
        name = names[name % len(names)]
    if name is not None:
        digest = executor.model.ip_adapters.by_name[name].digest
        settings["ip_adapter"] = IpAdapter(name, scale, digest, image_px=ENCODER["image_size"])
    return make_image_request(f"r{number}", **settings | fields)


def frame(request):
    """The data of a request, as a front end makes it; None if it has no image."""
    payload = request.payload
    if payload.ip_adapter is None:
        return None
    images = RequestImages(ImageFiles(ip_adapter=file_of(image_of(request))))
    return memoryview(images.pixels(payload.width, payload.height, None, ip_adapter_px=payload.ip_adapter.image_px))


generate_all = functools.partial(generate, frames=frame)
latents_of = functools.partial(final_latents, frames=frame)


@functools.cache  # loading one takes three times as long as an image
def pipeline(spec, adapters, name):
    pipe = open_pipeline(PIPELINES[spec.family], spec.folder)
    of_flux = {
        "image_encoder_pretrained_model_name_or_path": str(adapters / "image_encoder"),
        "image_encoder_dtype": torch.float32,
    }
    pipe.load_ip_adapter(
        str(adapters.parent),
        subfolder=adapters.name,
        weight_name=f"{name}.safetensors",
        **(of_flux if spec.family == "flux" else {}),
    )
    return pipe


def test_images_are_those_of_the_pipelines(served):
    spec, executor, _ = served
    for kind, file in IpAdapterFiles.of(executor.config).for_model(spec).items():
        requests = [make_request(executor, k, kind, scale) for k, scale in enumerate([0.5, 1.0])]
        images = generate_all(executor, requests)
        pipe = pipeline(spec, file.path.parent, kind)
        for request in requests:
            # The pipeline of XL leaves steps_offset as the folder has it.
            overrides = {"stable-diffusion": {"steps_offset": 1, "clip_sample": False}, "flux": {}}
            set_scheduler(pipe, request, spec.folder, **overrides.get(spec.family, {"clip_sample": False}))
            pipe.set_ip_adapter_scale(request.payload.ip_adapter.scale)
            theirs = run_pipeline(pipe, request, ip_adapter_image=image_of(request))
            assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request
        pipe.set_ip_adapter_scale(0.0)
        without = run_pipeline(pipe, request, ip_adapter_image=image_of(request))
        assert difference(without, theirs) > 2 * PARITY_TOLERANCE, request


def mixed(executor):
    """Images with each kind at several scales, guided and not, with joined prompts, and with none."""
    choices = [(), (1, 0.5), (2, 1.0), (0, 0.3), (1, 1.4), (2, 0.0)]
    is_flux = executor.model.guidance.embedded
    names = ["flow-euler", "flow-dpm++2m"] * 2 if is_flux else ["ddim", "euler-a", "dpm++2m-karras", "heun"]
    of_flux = [{}, {"width": 64}]  # sizes share its calls
    of_unets = [{}, {"prompt": "a red circle AND a ring :0.7", "prompt_syntax": "a1111"}]
    return [
        make_request(
            executor,
            k,
            *choices[k % 6],
            scheduler=names[k % 4],
            inference_steps=3 + k % 2,
            n=1 + (k == 7),
            **(of_flux if is_flux else of_unets)[k in (2, 6)],
        )
        for k in range(8)
    ]


def test_a_mixed_batch_is_as_each_alone(served, monkeypatch):
    assert_latents_as_alone(served[1], mixed(served[1]), monkeypatch, [(7 * k) % 5 for k in range(8)], frame)


def test_rows_without_one_or_of_scale_0_are_the_bare_models_in_every_bit(served, monkeypatch):
    _, executor, folder = served
    requests = mixed(executor)
    with_images = latents_of(executor, requests, monkeypatch)
    with monkeypatch.context() as patch:  # the bare model, in the same batches
        patch.setattr(executor.model.ip_adapters, "applied", lambda _: contextlib.nullcontext())
        without = latents_of(executor, requests, monkeypatch)
    alone = make_request(executor, 1, prompt="no other image has this", negative_prompt="nor this")
    bare, same = (latents_of(each, [alone], monkeypatch)["r1"] for each in (load_with(folder)[1], executor))
    assert torch.equal(bare, same)
    for request in requests:
        adapter, name = request.payload.ip_adapter, request.request_id
        if adapter is None or not adapter.scale:
            assert torch.equal(with_images[name], without[name]), request
        else:
            assert relative(with_images[name], without[name]) > 1e-3, request


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_folder", "flux_folder"])
def test_with_padded_rows_they_are_equal_in_every_bit(name, tmp_path, request):
    folder = request.getfixturevalue(name)
    adapters = save_ip_adapters(tmp_path / "models", folder, ("flux",) if name == "flux_folder" else KINDS)
    _, executor = load_with(folder, adapters, buckets=(32,))
    assert_as_alone(executor, mixed(executor), [(7 * k) % 4 for k in range(8)], frame, tolerance=0)


def test_with_padded_rows_attention_reads_as_many_rows_whichever_have_an_image(tiny_folder, tmp_path):
    _, executor = load_with(tiny_folder, save_ip_adapters(tmp_path / "models", tiny_folder), buckets=(8,))
    adapters, shown = executor.model.ip_adapters, []
    image = executor.prepare(request := make_request(executor, 1, 0), frame(request)).image_prompt
    type(image).encode([image], executor.model, 1)
    for rows in ([image.tokens.positive] * 8, [None, image.tokens.positive] + [None] * 6):
        with torch.inference_mode(), adapters.applied(rows):
            shown.append([len(stack.keys_ATI) for stacks in adapters._stacks for stack in stacks])
    assert shown[0] == shown[1] == [8] * len(adapters._places)


def test_moved_and_evicted_images_are_those_of_an_undisturbed_run(served):
    _, executor, _ = served
    request = make_request(executor, 1, 2)
    undisturbed = generate_all(executor, [request])["r1", 0]
    assert difference(moved_image(executor, request, 2, frame(request)), undisturbed) <= 1
    assert difference(evicted_image(executor, request, 2, frame(request)), undisturbed) <= 1


def test_an_image_is_encoded_once_for_its_request_and_with_others_at_once(served, monkeypatch):
    _, executor, _ = served
    generate_all(executor, [make_request(executor, 4, 0)])  # encodes the image without content, which is kept
    encoder, calls = next(iter(executor.model.ip_adapters.by_name.values()))._encoder, []
    forward = encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda pixels, **k: calls.append(len(pixels)) or forward(pixels, **k))
    generate_all(executor, [make_request(executor, k, 0, n=2) for k in range(3)] + [make_request(executor, 3)])
    assert calls == [3]


def test_loras_and_images_share_a_batch(tiny_folder, tmp_path, monkeypatch):
    (tmp_path / "loras").mkdir()
    _, executor = load_with(
        tiny_folder, save_ip_adapters(tmp_path / "models", tiny_folder), loras=(str(tmp_path / "loras"),)
    )
    file = tmp_path / "loras" / "ink.safetensors"
    save_diffusers_lora(file, executor.model.lora_parts, rank=2, seed=2)
    adapted = {"loras": (Lora("ink", 0.7, digest_of(file)),)}
    same = {"prompt": "a ring", "negative_prompt": "", "seed": 705, "guidance_scale": 4.0}
    requests = [
        make_request(executor, k, *chosen, **same, **of_lora)
        for k, (chosen, of_lora) in enumerate([(("plain",), adapted), (("plain",), {}), ((), adapted), ((), {})])
    ]
    together = assert_latents_as_alone(executor, requests, monkeypatch, frames=frame)
    for one, other in itertools.combinations(together.values(), 2):
        assert relative(one, other) > 1e-3


def test_they_are_the_same_with_each_attention(tiny_folder, tmp_path):
    adapters = save_ip_adapters(tmp_path / "models", tiny_folder, ("plain",))
    image, *others = [
        generate_all(executor, [make_request(executor, 1, "plain")])["r1", 0]
        for executor in (load_with(tiny_folder, adapters, attention=each)[1] for each in ("sdpa", "plain", "sliced"))
    ]
    assert [difference(each, image) <= 1 for each in others] == [True, True]


def test_adapters_that_are_not_loaded_are_rejected(served):
    _, executor, _ = served
    request = make_request(executor, 1, 0)
    adapter = request.payload.ip_adapter
    for change, message in [
        ({"name": "other"}, f"no IP-Adapter 'other'; allowed are '{adapter.name}'"),
        ({"digest": "0" * 12}, "'0{12}' on disk, but .* is loaded. Restart"),
        ({"image_px": 16}, "the data has 3072 bytes, and not the 768 of the image of an IP-Adapter"),
    ]:
        changed = msgspec.structs.replace(adapter, **change)
        payload = msgspec.structs.replace(request.payload, ip_adapter=changed)
        with pytest.raises(InvalidField, match=message):
            executor.prepare(msgspec.structs.replace(request, payload=payload), frame(request))


def test_another_family_has_none(tiny_z_image_folder, tiny_folder, tmp_path):
    _, executor = load_with(tiny_z_image_folder, save_ip_adapters(tmp_path / "models", tiny_folder, ("plain",)))
    request = make_image_request("r", scheduler="flow-euler", ip_adapter=IpAdapter("plain", image_px=32))
    with pytest.raises(InvalidField, match="it has none; the operator sets"):
        executor.prepare(request, memoryview(bytes(3072)))


def test_compiled_models_have_none(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.ip_adapters does not work with engine\.compile"):
        load_with(tiny_folder, save_ip_adapters(tmp_path / "models", tiny_folder, ("plain",)), compile=True)


def test_the_weights_of_adapters_count_and_their_encoder_once(served):
    spec, executor, _ = served
    parts = weights_of(spec, executor.config).here
    adapters = executor.model.ip_adapters.by_name
    assert {f"IP-Adapter {kind}" for kind in adapters} <= parts.keys()
    (encoder,) = {id(each._encoder): each._encoder for each in adapters.values()}.values()
    (num_bytes,) = [num_bytes for part, num_bytes in parts.items() if part.startswith("image encoder")]
    assert num_bytes == 4 * sum(each.numel() for each in encoder.state_dict().values())


@pytest.mark.parametrize("size", [(61, 45), (45, 61), (32, 32), (300, 40)])
def test_an_image_is_prepared_as_by_diffusers(size):
    image = photo(size)
    processor = transformers.CLIPImageProcessor(size=32, crop_size=32)
    expected = processor(image, return_tensors="np", do_rescale=False, do_normalize=False)["pixel_values"][0]
    data = RequestImages(ImageFiles(ip_adapter=file_of(image))).pixels(64, 64, None, ip_adapter_px=32)
    assert np.array_equal(np.frombuffer(data, np.uint8).reshape(32, 32, 3), np.moveaxis(np.asarray(expected), 0, -1))


def test_a_transparent_image_is_over_white():
    image = PIL.Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    assert RequestImages(ImageFiles(ip_adapter=file_of(image))).pixels(64, 64, None, ip_adapter_px=32) == b"\xff" * 3072
