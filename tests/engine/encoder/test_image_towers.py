"""Images of CLIP and SigLIP beside their texts: equal to transformers' embeddings, alone and in mixed batches."""

import io
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from encoders import change_json, make_tower, open_encoder, write_json
from noria.config import EngineConfig
from noria.engine.encoder.sessions import load_sessions
from noria.images.embedded_image import embedded_pixels
from noria.images.image_file import ImageFile
from noria.models.encoder.onnx_export import export
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import ImageRow, Row, TokenRow, image_part
from noria.protocol.text import EncoderModelSpec

CONFIG = EngineConfig(encoder_sessions=1, threads=1)
TEXTS = ["a red circle", "one", "words " * 40]


def picture(mode: str, width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    tiles = Image.fromarray(rng.integers(0, 256, (5, 7, 4), np.uint8), "RGBA")
    return tiles.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


IMAGES = [
    picture("RGB", 90, 61),
    picture("RGB", 33, 70),
    picture("RGBA", 40, 40),
    picture("L", 12, 9),
    picture("P", 64, 32),
    picture("RGB", 400, 9),
]
"""Wider and higher than the tower's images, smaller, transparent, grey, with a palette, and with a row of patches."""


def clip(folder: pathlib.Path) -> Any:
    """The files of transformers 5: one for both processors. The middle of the image is seen."""
    make_tower(folder, "CLIPModel")
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 37}, crop_size=32, resample=2)
    write_json(folder / "processor_config.json", {"image_processor": processor.to_dict()})
    write_json(folder / "preprocessor_config.json", {"size": 1})  # which counts no longer
    return processor


def clip_of_2021(folder: pathlib.Path) -> Any:
    """Sizes as numbers, the older name of the class, and the older place of the configuration."""
    make_tower(folder, "CLIPModel")
    images = transformers.CLIPConfig.from_pretrained(folder).vision_config.to_dict()
    change_json(folder / "config.json", vision_config={"hidden_size": 8}, vision_config_dict=images)
    tree = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32, "do_normalize": True}
    write_json(folder / "preprocessor_config.json", tree)
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)


def siglip(folder: pathlib.Path) -> Any:
    """SigLIP, whose images lose their proportions; SigLIP 2 of one size is the same class."""
    make_tower(folder, "SiglipModel", projection_size=32)
    processor = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}, image_std=[0.5, 0.4, 0.3])
    processor.save_pretrained(folder)
    return processor


def siglip2(folder: pathlib.Path) -> Any:
    """SigLIP 2 whose images keep their proportions: 25 patches or less, and a table of 4 × 4 positions."""
    make_tower(folder, "Siglip2Model", projection_size=32)
    processor = transformers.Siglip2ImageProcessorPil(
        max_num_patches=25, image_std=[0.5, 0.4, 0.3], do_convert_rgb=True
    )
    processor.save_pretrained(folder)
    return processor


KINDS = {clip: "longest", clip_of_2021: "longest", siglip: "max_length", siglip2: "max_length"}


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A model, and transformers' embeddings of the texts and of the images."""
    folder = tmp_path_factory.mktemp(request.param.__name__) / "model"
    processor = request.param(folder)
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = tokenizer(TEXTS, truncation=True, padding=KINDS[request.param], return_tensors="pt")
    with torch.inference_mode():
        texts = model.get_text_features(**tokens).pooler_output.numpy()
        images = [
            model.get_image_features(
                **processor(Image.open(io.BytesIO(png(image))), return_tensors="pt")
            ).pooler_output.numpy()
            for image in IMAGES
        ]
    return open_encoder(folder), np.concatenate([texts, *images])


def rows_of(spec: EncoderModelSpec) -> list[Row]:
    image_input = spec.image_input
    assert image_input is not None
    texts = [TokenRow.of(text) for text in HuggingFaceTokenizer(spec).encode(TEXTS)]
    files = [png(image) for image in IMAGES]
    pixels = [np.frombuffer(embedded_pixels(ImageFile("image", file), image_input), np.uint8) for file in files]
    return [*texts, *(ImageRow.of(each, image_input) for each in pixels)]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def assert_equal(spec: EncoderModelSpec, expected: Any, config: EngineConfig) -> None:
    rows = rows_of(spec)
    (session,) = load_sessions(spec, config, "cpu")
    mixed: Sequence[int] = [5, 0, 7, 3, 8, 1, 2, 6, 4]
    np.testing.assert_allclose(session.run([rows[place] for place in mixed]), expected[mixed], atol=1e-5)
    np.testing.assert_allclose([session.run([row])[0] for row in rows], expected, atol=1e-5)


def test_torch_computes_the_librarys_embeddings(made: tuple[EncoderModelSpec, Any]) -> None:
    assert_equal(*made, msgspec.structs.replace(CONFIG, encoder_backend="torch"))


def test_the_graphs_compute_the_librarys_embeddings(made: tuple[EncoderModelSpec, Any], tmp_path: pathlib.Path) -> None:
    for part in (made[0], image_part(made[0])):
        export(part, tmp_path)
    assert_equal(*made, msgspec.structs.replace(CONFIG, cache_dir=str(tmp_path)))
