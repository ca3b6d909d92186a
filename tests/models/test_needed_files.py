"""Files of a listing that serving a model needs."""

import pytest

from noria.errors import ModelError
from noria.models.families import FAMILIES
from noria.models.needed_files import find_model_root, select_needed_files

STABLE_DIFFUSION, TEXT_ENCODER = FAMILIES["stable-diffusion"], FAMILIES["text-encoder"]
DIFFUSERS = [
    "model_index.json",
    "noria.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
    "unet/config.json",
    "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model-00002-of-00002.safetensors",
    "unet/diffusion_pytorch_model.safetensors.index.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
]
UNNEEDED = [
    ".gitattributes",
    "README.md",
    "safety_checker/model.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin",
    "unet/diffusion_pytorch_model.bin",
    "unet/old/config.json",
    "v1-5-pruned.ckpt",
]


def test_of_a_diffusers_model_its_parts_are_needed_and_fp16_weights_only_where_there_are_no_others():
    assert select_needed_files(DIFFUSERS + UNNEEDED, STABLE_DIFFUSION, "hf://org/shapes") == DIFFUSERS


def test_of_z_image_all_shards_are_needed():
    needed = [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model-00001-of-00003.safetensors",
        "text_encoder/model.safetensors.index.json",
        "tokenizer/merges.txt",
        "tokenizer/tokenizer.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00003-of-00003.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    others = ["assets/showcase.jpg", "tokenizer/chat_template.jinja", "README.md"]
    assert select_needed_files(needed + others, FAMILIES["z-image"], "hf://org/z-image") == needed


def test_of_a_text_encoder_its_own_files_and_those_of_its_modules_are_needed():
    needed = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "config.json",
              "model.safetensors", "separation/adapter_config.json", "separation/adapter_model.safetensors",
              "tokenizer.json", "vocab.txt"]  # fmt: skip
    others = [
        "classification/pytorch_model.bin",  # a folder of another kind than of a task's adapter
        "onnx/model.onnx",
        "pytorch_model.bin",
        "openvino/config.json",
        "tf_model.h5",
        "2_Dense/pytorch_model.bin",
    ]
    assert select_needed_files(needed + others, TEXT_ENCODER, "hf://org/words") == needed


def test_pickles_are_rejected_where_there_are_no_other_weights():
    with pytest.raises(ModelError, match=r"'unet/diffusion_pytorch_model.bin' are a pickle.*noria doctor COPY"):
        select_needed_files(["model_index.json", "unet/diffusion_pytorch_model.bin"], STABLE_DIFFUSION, "s3://b/m")


def test_a_model_is_found_in_the_folder_that_it_has():
    assert find_model_root(["MLmodel", "pipeline/model_index.json", "pipeline/unet/config.json"], "m") == "pipeline/"
    assert find_model_root(["model_index.json", "unet/config.json"], "m") == ""


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["a/config.json", "b/config.json"], "several models: a/, b/"),
        (["weights.safetensors"], "neither model_index.json nor config.json"),
    ],
)
def test_a_listing_without_one_model_is_rejected(paths, words):
    with pytest.raises(ModelError, match=words):
        find_model_root(paths, "s3://bucket/models")
