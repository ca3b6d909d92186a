"""Text encoders, also on another device than the model: on the CPU, and the model on torch's meta device."""

import json
import shutil

import pytest
import torch

from generating import load_model
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.engine.diffusion.loras.model_loras import AdaptedPrompt, ModelLoras
from noria.engine.diffusion.sizing.auto_settings import Machine, resolve_auto
from noria.engine.diffusion.warmup.calibration import cost_key
from noria.errors import ConfigError, ModelError
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.models.diffusion.conditioning import collate
from noria.models.families import FAMILIES
from noria.protocol.diffusion import Lora

REFINER = "stable-diffusion-xl-refiner"  # which is loaded with a model only: `test_refiner.py`
FAMILY_NAMES = [name for name, family in FAMILIES.items() if family.extra == "diffusion" and name != REFINER]
PROMPTS = ["a red circle", "a blue square"]


def load(folder, device, dtype="bfloat16", **settings):
    spec = open_model(str(folder))
    config = EngineConfig(dtype=dtype, slots=4, threads=1, text_encoder_device="cpu", **settings)
    return spec, load_model(spec, config, device), config


def encoders_of(model):
    """The model's text encoders: all modules of transformers that it holds."""
    from transformers import PreTrainedModel

    found, pending = [], list(vars(model).values())
    while pending:
        value = pending.pop()
        if isinstance(value, PreTrainedModel):
            found.append(value)
        elif isinstance(value, list | tuple):
            pending += value
    return found


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # Krea 2's norms, which say so
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_embeddings_come_to_the_models_device_and_dtype(family, folder_of):
    """A tensor that is not moved is an error of torch: no operation takes tensors of the CPU and of meta."""
    _, model, _ = load(folder_of(family), "meta")
    encoders = encoders_of(model)
    assert encoders
    assert {(each.device.type, each.dtype) for each in encoders} == {("cpu", torch.float32)}
    with torch.inference_mode():
        conditionings = model.text_encode(PROMPTS)
        shape = model.latent_shape(32, 32)
        output = model.predict(
            torch.empty(2, *shape, device="meta"),
            torch.ones(2, device="meta"),
            collate([conditionings[0]] * 2),
            torch.ones(2, device="meta") if model.guidance.embedded else None,
        )
    tensors = [tensor for each in conditionings for tensor in (*each.tokens.values(), *each.vectors.values())]
    assert {(tensor.device.type, tensor.dtype) for tensor in tensors} == {("meta", torch.bfloat16)}
    assert output.shape == (2, *shape)


# Their encoders are of all kinds: CLIP and T5, Qwen3-VL, Mistral, Gemma.
@pytest.mark.parametrize("family", ["flux", "qwen-image-2-1", "flux-2-dev", "lumina-2"])
def test_embeddings_are_those_of_encoders_beside_the_model(family, folder_of):
    spec, model, _ = load(folder_of(family), "cpu", "float32")
    same = load_model(spec, EngineConfig(dtype="float32", slots=4, threads=1))
    with torch.inference_mode():
        for ours, theirs in zip(model.text_encode(PROMPTS), same.text_encode(PROMPTS), strict=True):
            for name, tensor in (ours.tokens | ours.vectors).items():
                assert torch.equal(tensor, (theirs.tokens | theirs.vectors)[name])


@pytest.mark.parametrize("family", ["stable-diffusion", "stable-diffusion-xl", "flux"])
def test_adapters_are_beside_the_parts_that_they_change(family, folder_of, tmp_path):
    """The text encoder gives with an adapter what it gives in a model that is on the CPU as a whole."""
    path = folder_of(family)
    spec, whole, config = load(path, "cpu", "float32", loras=(str(tmp_path),))
    save_diffusers_lora(tmp_path / "all.safetensors", whole.lora_parts, rank=2)
    _, apart, half = load(path, "meta", "float16", loras=(str(tmp_path),))
    loras, outputs = (Lora("all", 0.7, digest_of(tmp_path / "all.safetensors")),), []
    for model, settings in ((whole, config), (apart, half)):
        applied = ModelLoras(model, settings)
        adapters = applied.load(loras, spec.name)
        encoder = model.lora_parts["text_encoder"]
        with torch.inference_mode():
            seen = []
            hook = encoder.register_forward_hook(lambda _module, _args, output, seen=seen: seen.append(output[0]))
            (adapted,) = applied.text_encode([AdaptedPrompt("a red circle", ((loras[0].digest, 0.7),))])
            (bare,) = applied.text_encode(["a red circle"])
            hook.remove()
        outputs.append(seen)
        denoiser, *_ = model.lora_parts
        layers = next(iter(adapters)).weights.layers
        assert {each.down.device for each in layers[denoiser].values()} == {model.device}
        assert {(each.down.device.type, each.down.dtype) for each in layers["text_encoder"].values()} == {
            ("cpu", torch.float32)
        }
        assert next(iter(adapted.tokens.values())).device == next(iter(bare.tokens.values())).device == model.device
    for there, here in zip(*outputs, strict=True):
        torch.testing.assert_close(there, here)
    assert not torch.allclose(outputs[0][0], outputs[0][1])


def test_measured_costs_are_kept_apart(folder_of):
    spec = open_model(str(folder_of("stable-diffusion")))
    same, elsewhere = EngineConfig(), EngineConfig(text_encoder_device="cpu")
    machine = Machine(1, has_cuda=True)
    for device, is_equal in (("cpu", True), ("cuda:0", False)):  # on a CPU both are the same
        keys = [cost_key(spec, resolve_auto(config, spec, device, machine), "a") for config in (same, elsewhere)]
        assert (keys[0] == keys[1]) == is_equal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_device_that_does_not_exist_is_rejected(folder_of):
    config = EngineConfig(text_encoder_device="cuda:0")
    with pytest.raises(ConfigError, match=r"engine\.text_encoder_device is 'cuda:0', which does not exist"):
        load_executor(open_model(str(folder_of("stable-diffusion"))), config, "cpu")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_token_ids_that_a_tokenizers_settings_add_beyond_the_text_encoders_are_rejected(family, folder_of, tmp_path):
    for tokenizer in folder_of(family).glob("tokenizer*"):
        folder = tmp_path / tokenizer.name / "model"
        shutil.copytree(folder_of(family), folder)
        file = folder / tokenizer.name / "tokenizer_config.json"
        added = [f"<added {number}>" for number in range(1000)]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": added}))
        with pytest.raises(ModelError, match=rf"{tokenizer.name}: has token ids up to \d+, but the text encoder has"):
            load(folder, "meta")
