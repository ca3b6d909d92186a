"""Says in one line what a folder is that no model family has: an adapter, a static embedding, a decoder, GGUF."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from noria.errors import ModelError, short_repr
from noria.models.files.weights import REDOWNLOAD_HINT, read_object, read_text

DESCRIBING_FILES = ("adapter_config.json", "modules.json")
"""Small files by which `describe_folder` knows a folder without its weights."""

_DECODERS = re.compile(
    r"(baichuan|bloom|chatglm|cohere|deepseek|exaone|falcon|gemma|glm|gpt|granite|internlm|jamba|llama|mamba|minicpm|"
    r"mistral|mixtral|mpt|nemotron|olmo|opt|phi|qwen|rwkv|smollm|stablelm|starcoder)",
    re.ASCII,
)
"""The start of the `model_type` of models in which each token sees only those before it."""

_STATIC = "a static embedding without config.json; those are served that have one, as model2vec writes it."


def describe_adapter(folder: pathlib.Path) -> str:
    """Return what a folder with adapter_config.json is, and what to do."""
    file = folder / "adapter_config.json"
    tree = read_object(file)
    base = tree.get("base_model_name_or_path")
    return (
        f"{file}: adapters are not supported; this is one of PEFT ({short_repr(tree.get('peft_type'))}). Merge it into "
        f"its base{f', {short_repr(base)},' if base else ''} by merge_and_unload, and save that."
    )


def describe_folder(folder: pathlib.Path) -> str:
    """Return what a folder without model_index.json and config.json is, as far as its files say. Raises ModelError."""
    if (folder / "adapter_config.json").exists():
        return describe_adapter(folder)
    if (file := folder / "modules.json").exists():
        return f"{file}: {_describe_modules(file)}"
    for pattern, what in (
        ("*.gguf", "a GGUF file is no folder of a model. A transformer of images is served by its file: noria serve "
         "FILE.gguf --parts FOLDER. Of a text encoder give the folder as safetensors, from which it was made."),
        ("*lora*.safetensors", "a LoRA adapter. Name its folder in engine.loras, beside the model that it is for."),
        ("*.safetensors", "weights alone. A model is a folder as save_pretrained of diffusers or transformers writes. "
         "Serve a checkpoint by its file's name, or all of the folder with --checkpoints FOLDER."),
    ):  # fmt: skip
        if found := sorted(folder.glob(pattern)):
            return f"{found[0]}: {what}"
    if models := sorted(folder.glob("*/model_index.json")):
        return f"{folder}: a folder of models. Give one, such as {models[0].parent}, or all with --checkpoints FOLDER."
    return (
        f"{folder / 'model_index.json'}: missing, and so is config.json: the folder is not a model in diffusers or "
        f"transformers format. {REDOWNLOAD_HINT}"
    )


def _describe_modules(file: pathlib.Path) -> str:
    try:
        types = [each["type"] for each in msgspec.json.decode(read_text(file), type=list[dict[str, Any]])]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise ModelError(f"{file}: not a list of sentence-transformers' modules: {error}. {REDOWNLOAD_HINT}") from error
    first = str(types[0]) if types else ""
    if first.endswith("StaticEmbedding"):
        return _STATIC
    if first.endswith("Transformer"):
        return "config.json is missing beside it: the Transformer must be in the model's folder. Save the model again."
    return f"the first module is {short_repr(first)}; supported are models whose first module is a Transformer."


def describe_config(tree: Mapping[str, Any]) -> str | None:
    """Return what a model with this config.json is; None: nothing is known about it."""
    model_type, classes = str(tree.get("model_type") or ""), tree.get("architectures")
    first = str(classes[0]) if isinstance(classes, list) and classes else ""
    part = str(tree.get("_class_name") or "")
    if part == "ControlNetModel":
        return "a ControlNet. Name its folder in engine.controlnets (--controlnets FOLDER), beside the model."
    if part:
        return f"the part {part} of a model of diffusers. Give the folder with model_index.json, which has all parts."
    if tree.get("is_encoder_decoder"):
        return f"{model_type or first} is an encoder with a decoder; supported are encoders."
    if first.endswith(("ForCausalLM", "LMHeadModel")) or _DECODERS.match(model_type):
        return f"{model_type or first} is a decoder: each token sees only those before it; supported are encoders."
    return None
