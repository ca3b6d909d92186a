"""The table of configuration keys against the installed libraries: nothing that they compute with is missing."""

import dataclasses
import inspect
import pathlib
import re

import pytest
import transformers
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from noria.errors import ModelError
from noria.models.encoder.architectures import CLASS_PREFIXES
from noria.models.encoder.folders.config_keys import (
    ACTIVATIONS,
    FILE_KEYS,
    HARMLESS_KEYS,
    MODULE_KEYS,
    READ_KEYS,
    check_model_keys,
)
from noria.models.encoder.folders.tower_config import IMAGE_TOWERS, TOWERS


def rejects(key: str) -> bool:
    """Whether a value that says "on" is rejected, of any model type."""
    try:
        check_model_keys(pathlib.Path("config.json"), {key: 50.0}, "bert")
    except ModelError:
        return True
    return False


_USE = re.compile(r'config\.(\w+)|getattr\(\s*(?:self\.)?config, "(\w+)"|kwargs\.(?:get|pop)\(\s*"(\w+)"')


CLASSES = {name: f"{prefix}Model" for name, prefix in CLASS_PREFIXES.items()}
CLASSES |= {name: tower.architecture for name, tower in TOWERS.items()}
CLASSES |= {tower.model_type: tower.architecture for tower in IMAGE_TOWERS.values()}


@pytest.mark.parametrize("model_type", CLASSES)
def test_each_key_that_transformers_computes_with_is_read_or_known_as_harmless(model_type: str) -> None:
    config_class = CONFIG_MAPPING[model_type]
    model_class = getattr(transformers, CLASSES[model_type])
    sources = [inspect.getsource(inspect.getmodule(each)) for each in (config_class, model_class)]
    used = {name for source in sources for found in _USE.findall(source) for name in found if name}
    used |= {field.name for field in dataclasses.fields(config_class)}
    common = {*dir(transformers.PreTrainedConfig), *inspect.signature(transformers.PreTrainedConfig).parameters}
    if model_type == "gemma3_text":  # its module has the classes for images, and for generation, too
        used -= {"image_token_id", "mm_tokens_per_image", "text_config", "token_type_ids", "vision_config"}
    if model_type.endswith(("_text_model", "_vision_model")):  # its module has the classes of both towers
        family, kind, _ = model_type.rsplit("_", 2)
        other = CONFIG_MAPPING[f"{family}_{'vision' if kind == 'text' else 'text'}_model"]
        used -= {*dir(other), "text_config", "vision_config"} - {*dir(config_class)}
        used -= {"text_config_dict", "vision_config_dict"}
    unread = {key for key in used - common - READ_KEYS[model_type] - HARMLESS_KEYS if not rejects(key)}
    assert unread <= {"is_decoder"}
    aliases = {
        "_sliding_window_pattern",
        "lora_adaptations",  # and the others are for adapters and experts, which the library has not
        "moe_every_n_layers",
        "moe_top_k",
        "num_experts",
        "lora_alpha",
        "lora_rank",
        "task_instructions",
        "rope_local_base_freq",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "sliding_window",
        "pooler_hidden_size",
    }
    rotary = {"head_dim", "partial_rotary_factor", "rope_scaling", "rope_theta"}
    assert READ_KEYS[model_type] - used <= aliases | (rotary if "rope_parameters" in used else set())


def test_the_activation_functions_are_those_of_transformers() -> None:
    assert set(ACT2FN) == ACTIVATIONS


def test_each_key_of_the_modules_of_sentence_transformers_is_known() -> None:
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    for theirs, (known, allowed) in (
        (Pooling, MODULE_KEYS["Pooling"]),
        (Dense, MODULE_KEYS["Dense"]),
        (Normalize, MODULE_KEYS["Normalize"]),
        (Transformer, FILE_KEYS["sentence_bert_config.json"]),
    ):
        assert set(theirs.config_keys) <= {*known, *allowed}
