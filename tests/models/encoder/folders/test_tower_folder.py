"""Folders of CLIP and SigLIP that cannot be served are rejected in one sentence."""

import json
import pathlib
import re
import shutil
from typing import Any

import pytest

from encoders import change_json, make_tower, open_encoder, sentence_transformer, write_json
from noria.errors import ModelError
from noria.protocol.text import Patches


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("towers")
    for name in ("CLIPModel", "SiglipModel"):
        make_tower(root / name, name)
    return root


@pytest.mark.parametrize(
    ("name", "file", "changes", "words"),
    [
        ("CLIPModel", "config", {"architectures": ["CLIPForImageClassification"]}, "only CLIPModel is served"),
        (
            "CLIPModel",
            "config",
            {"text_config": [1]},
            "text_config is [1]; an object of the model_type clip_text_model",
        ),
        ("CLIPModel", "config", {"text_config": {"model_type": "bert"}}, "an object of the model_type clip_text_model"),
        ("CLIPModel", "config", {"text_config": {"eos_token_id": [3]}}, "eos_token_id is [3]; "),
        ("CLIPModel", "config", {"text_config": {}}, "the word embeddings have "),
        (
            "SiglipModel",
            "config",
            {"text_config": {"hidden_size": None, "vocab_size": 300}},
            "projection_size and hidden_size are null; a number is expected",
        ),
        ("CLIPModel", "tokenizer", {"post_processor": None}, "adds no token to the end of a text, and the embedding"),
        (
            "CLIPModel",
            "tokenizer",
            {"post_processor": {"type": "BertProcessing", "sep": ["[CLS]", 2], "cls": ["[CLS]", 2]}},
            "ends texts with the token 2, and the embedding is the state of the token 3",
        ),
        ("SiglipModel", "tokenizer_config", {"pad_token": None}, "pad_token is null; needed is a token"),
        ("SiglipModel", "tokenizer_config", {"pad_token": {"content": "<no>"}}, "pad_token is '<no>'; needed"),
        ("SiglipModel", "tokenizer_config", {"padding_side": "left"}, "padding_side is 'left'; the texts of SigLIP"),
        (
            "SiglipModel",
            "tokenizer_config",
            {"model_input_names": ["input_ids", "attention_mask"]},
            "model_input_names is ['input_ids', 'attention_mask']; the texts of SigLIP",
        ),
        ("SiglipModel", "sentence_bert_config", {"transformer_task": "fill-mask"}, "supported of siglip_text_model is"),
        (
            "SiglipModel",
            "sentence_bert_config",
            {"processing_kwargs": {"text": {"padding": "longest"}}},
            "processing_kwargs is ",
        ),
    ],
)
def test_a_tower_that_is_not_served_is_rejected(
    towers: pathlib.Path, tmp_path: pathlib.Path, name: str, file: str, changes: dict[str, Any], words: str
) -> None:
    folder = shutil.copytree(towers / name, tmp_path / "model")
    if not (folder / f"{file}.json").exists():
        write_json(folder / f"{file}.json", {})
    change_json(folder / f"{file}.json", **changes)
    with pytest.raises(ModelError, match=re.escape(words)):
        open_encoder(folder)


PROCESSOR = {"image_processor_type": "CLIPImageProcessor", "size": 36, "crop_size": 32}


@pytest.mark.parametrize(
    ("name", "processor", "vision", "words"),
    [
        ("CLIPModel", {"image_processor_type": "ViTImageProcessor"}, {}, "_type is 'ViTImageProcessor'; "),
        ("CLIPModel", {"image_processor_type": 5}, {}, "image_processor_type is 5; "),
        ("CLIPModel", {"do_resize": False}, {}, "do_resize is false; images are supported that CLIPImageProcessor or "),
        ("CLIPModel", {"do_pad": True}, {}, "do_pad is true; images are supported that CLIPImageProcessor or "),
        ("CLIPModel", {"size": {"longest_edge": 36}}, {}, "size is {'longest_edge': 36}; unknown key"),
        ("CLIPModel", {"size": {"height": 36}}, {}, "size is {'height': 36}; supported are a number, height and width"),
        ("CLIPModel", {"size": 10**9}, {}, "size is 1000000000; "),
        ("CLIPModel", {"crop_size": 24}, {}, "of which 24 × 24 are seen, but the tower sees 32 × 32"),
        ("CLIPModel", {"size": 24}, {}, "images become 24 at the shorter side, of which 32 × 32 are seen"),
        ("CLIPModel", {"do_center_crop": False}, {}, "images become 36 at the shorter side, but the tower sees 32"),
        ("CLIPModel", {"resample": 6}, {}, "resample is 6; "),
        ("CLIPModel", {"image_std": [0, 1, 1]}, {}, "image_std[0] is 0"),
        ("CLIPModel", {"image_mean": [0.5]}, {}, "image_mean is [0.5]"),
        ("CLIPModel", {}, {"patch_size": 0}, "patch_size is 0; "),
        ("CLIPModel", {}, {"num_channels": 1}, "num_channels is 1; "),
        ("CLIPModel", {}, {"model_type": "siglip_vision_model"}, "an object of the model_type clip_vision_model"),
        ("SiglipModel", {}, {}, "images get 32 numbers and texts 40, which cannot be compared"),
    ],
)
def test_images_that_are_not_encoded_as_they_should_be_are_rejected(
    towers: pathlib.Path,
    tmp_path: pathlib.Path,
    name: str,
    processor: dict[str, Any],
    vision: dict[str, Any],
    words: str,
) -> None:
    folder = shutil.copytree(towers / name, tmp_path / "model")
    write_json(folder / "preprocessor_config.json", PROCESSOR | processor)
    tree = json.loads((folder / "config.json").read_text())
    change_json(folder / "config.json", vision_config=tree["vision_config"] | vision)
    with pytest.raises(ModelError, match=re.escape(words)):
        open_encoder(folder)


def test_images_are_of_models_whose_folder_says_how_they_are_made_ready(
    towers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert open_encoder(towers / "CLIPModel").image_input is None
    folder = shutil.copytree(towers / "CLIPModel", tmp_path / "model")
    write_json(folder / "preprocessor_config.json", PROCESSOR)
    spec = open_encoder(folder)
    assert spec.image_input is not None
    assert (spec.image_input.resized_px, spec.image_input.side_px, spec.image_input.num_tokens) == (36, 32, 4)
    assert spec.num_parameters > open_encoder(towers / "CLIPModel").num_parameters
    (tmp_path / "any").mkdir()
    make_tower(tmp_path / "any", "Siglip2Model", projection_size=32)  # its images have any shape
    file = tmp_path / "any" / "preprocessor_config.json"
    write_json(file, {"image_processor_type": "Siglip2ImageProcessorFast", "max_num_patches": 36})
    shaped = open_encoder(tmp_path / "any").image_input
    assert shaped is not None
    assert (shaped.patches, shaped.num_tokens, shaped.num_bytes) == (Patches(16, 36), 36, 36 * 768 + 4)
    for wrong, says in (
        ({"patch_size": 14}, "patches have 14 pixels a side, but the tower sees 16"),
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type is 'SiglipImageProcessor'; images of"),
        ({"do_resize": False}, "do_resize is false; images of any shape"),
    ):
        write_json(file, wrong)
        with pytest.raises(ModelError, match=says):
            open_encoder(tmp_path / "any")
    config = json.loads((tmp_path / "any" / "config.json").read_text())
    config["vision_config"]["patch_size"] = 128
    write_json(tmp_path / "any" / "config.json", config)
    write_json(file, {"patch_size": 128, "max_num_patches": 4096})
    with pytest.raises(ModelError, match="an image has 201326596 bytes as the model sees it; allowed are 67108864"):
        open_encoder(tmp_path / "any")


def test_a_tower_with_a_pooling_is_rejected(towers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(towers / "CLIPModel", tmp_path / "model")
    for name, content in sentence_transformer().items():
        write_json(folder / f"{name.replace('__', '/')}.json", content)
    with pytest.raises(ModelError, match="the modules are Transformer, Pooling, Normalize; supported of clip_text"):
        open_encoder(folder)


def test_what_follows_clip_in_the_older_layout_is_rejected(towers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(towers / "CLIPModel", tmp_path / "0_CLIPModel")
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(["CLIPModel", "Dense"])
    ]
    write_json(tmp_path / "modules.json", modules)
    with pytest.raises(ModelError, match="the modules are CLIPModel, Dense; supported in a folder with 0_CLIPModel is"):
        open_encoder(tmp_path)


def test_parameters_for_images_do_not_count(towers: pathlib.Path) -> None:
    """Sessions and exports are sized by the parameters that compute."""
    spec = open_encoder(towers / "CLIPModel")
    assert spec.num_parameters < 32 * (spec.vocab_size + 24 + 32) + 2 * 9000
