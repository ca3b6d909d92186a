"""Images with adapters of all kinds, in one batch with plain LoRAs and none: those of a model with merged weights."""

import pytest

from generating import difference, generate, load
from lora_files import save_diffusers_lora
from lycoris_files import merged_weight, save_all_kinds
from noria.models.adapters.lora_folders import digest_of
from noria.protocol.diffusion import Lora
from noria.testing.requests import make_image_request

TOLERANCE = 2  # parts of 255


@pytest.mark.parametrize("folder_name", ["tiny_folder", "tiny_flux_folder"])
def test_images_are_those_of_merged_weights(folder_name, request, tmp_path):
    folder = request.getfixturevalue(folder_name)
    spec, executor = load(folder, loras=(str(tmp_path),))
    name, part = next(iter(executor.model.lora_parts.items()))
    saved = save_all_kinds(
        tmp_path / "kinds.safetensors", part, {"unet": "lora_unet_", "transformer": "lycoris_"}[name]
    )
    kinds = {kind for kind, _ in saved.values()}
    assert {"LoHa", "LoKr", "DoRA", "DoRA along the inputs", "DoRA of peft", "difference"} <= kinds
    save_diffusers_lora(tmp_path / "plain.safetensors", {name: part}, "to_q", "to_v", seed=1)

    def make_request(number, **fields):
        return make_image_request(
            f"r{number}", prompt="a ring", seed=number, width=32, height=32, inference_steps=4, guidance_scale=4.0,
            scheduler=spec.schedulers[0], **fields,
        )  # fmt: skip

    def lora(name, weight):
        return Lora(name, weight, digest_of(tmp_path / f"{name}.safetensors"))

    strengths = {0: 0.5, 2: 1.0, 4: 1.5}
    loras = {number: (lora("kinds", strength),) for number, strength in strengths.items()} | {1: (lora("plain", 1.0),)}
    requests = [make_request(number, loras=loras.get(number, ())) for number in range(6)]
    images = generate(executor, requests)
    _, bare = load(folder)
    for number in (3, 5):
        assert difference(images[f"r{number}", 0], generate(bare, [make_request(number)])[f"r{number}", 0]) <= 1
    for number, strength in strengths.items():
        _, merged = load(folder)
        for layer, (kind, tensors) in saved.items():
            weight = merged.model.lora_parts[name].get_submodule(layer).weight
            weight.data = merged_weight(kind, tensors, weight, strength).to(weight.dtype)
        theirs = generate(merged, [make_request(number)])[f"r{number}", 0]
        assert difference(images[f"r{number}", 0], theirs) <= TOLERANCE
        assert difference(theirs, generate(bare, [make_request(number)])[f"r{number}", 0]) > 5
