"""The text towers of CLIP and SigLIP: equal to transformers' and sentence-transformers' embeddings, on each path."""

import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from encoders import TEXTS, change_json, make_tower, open_encoder, open_exported, write_json
from noria.config import EngineConfig
from noria.engine.encoder.sessions import load_sessions
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import TokenRow
from noria.protocol.text import EncoderModelSpec

CONFIG = EngineConfig(encoder_sessions=1, threads=1)
MARKED = [*TEXTS, "a [SEP] b", "A RED Circle"]
"""With CLIP's end token within a text, and a text in upper case."""


def clip(folder: pathlib.Path) -> Any:
    make_tower(folder, "CLIPModel")
    return features(folder, padding=True)


def clip_of_2021(folder: pathlib.Path) -> Any:
    """The older eos_token_id, which says nothing, and the older place of the configuration."""
    make_tower(folder, "CLIPModel", eos_token_id=2)
    text = transformers.CLIPConfig.from_pretrained(folder).text_config.to_dict()
    change_json(folder / "config.json", text_config={"hidden_size": 8}, text_config_dict=text)
    return features(folder, padding=True)


def clip_text_tower(folder: pathlib.Path) -> Any:
    """A folder of the tower alone, as diffusers has."""
    make_tower(folder, "CLIPTextModelWithProjection")
    model = transformers.CLIPTextModelWithProjection.from_pretrained(folder)
    return model(**tokenize(folder, padding=True)).text_embeds.detach().numpy()


def clip_of_sentence_transformers(folder: pathlib.Path) -> Any:
    """The layout of clip-ViT-B-32: a module CLIPModel in a subfolder."""
    own = folder / "0_CLIPModel"
    make_tower(own, "CLIPModel")
    write_json(folder / "modules.json", [module("sentence_transformers.models.CLIPModel", "0_CLIPModel")])
    return sentence_embeddings(folder, own)


def clip_normalized(folder: pathlib.Path) -> Any:
    """The layout of sentence-transformers 6, with a Normalize."""
    make_tower(folder, "CLIPModel")
    types = ("sentence_transformers.base.modules.transformer.Transformer", "sentence_transformers.models.Normalize")
    write_json(folder / "modules.json", [module(types[0], ""), module(types[1], "1_Normalize", 1)])
    method = {kind: {"method": f"get_{kind}_features", "method_output_name": "pooler_output"}
              for kind in ("text", "image")}  # fmt: skip
    settings = {"transformer_task": "feature-extraction", "module_output_name": "sentence_embedding"}
    write_json(folder / "sentence_bert_config.json", settings | {"modality_config": method})
    return sentence_embeddings(folder, folder)


def siglip(folder: pathlib.Path) -> Any:
    make_tower(folder, "SiglipModel")
    return features(folder, padding="max_length")


def siglip_2(folder: pathlib.Path) -> Any:
    """Texts in lower case, though tokenizer.json keeps upper case, as Gemma's does."""
    make_tower(folder, "Siglip2Model")
    change_json(folder / "tokenizer.json", normalizer={"type": "NFC"})
    return features(folder, padding="max_length", lower=True)


def module(kind: str, path: str, index: int = 0) -> dict[str, Any]:
    return {"idx": index, "name": str(index), "path": path, "type": kind}


def tokenize(folder: pathlib.Path, *, lower: bool = False, **settings: Any) -> Any:
    # Not AutoTokenizer, which would use the published models' own splitting of words.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [text.lower().replace("[sep]", "[SEP]") for text in MARKED] if lower else MARKED
    return tokenizer(texts, truncation=True, return_tensors="pt", **settings)


def features(folder: pathlib.Path, **settings: Any) -> Any:
    model = transformers.AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        return model.get_text_features(**tokenize(folder, **settings)).pooler_output.numpy()


def sentence_embeddings(folder: pathlib.Path, own: pathlib.Path) -> Any:
    from sentence_transformers import SentenceTransformer

    transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32).save_pretrained(own)
    return SentenceTransformer(str(folder), device="cpu").encode(MARKED)


KINDS = [clip, clip_of_2021, clip_text_tower, clip_of_sentence_transformers, clip_normalized, siglip, siglip_2]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A model, and the library's embeddings."""
    folder = tmp_path_factory.mktemp(request.param.__name__) / "model"
    expected = request.param(folder)
    return open_encoder(folder), expected


def assert_equal(spec: EncoderModelSpec, expected: Any, config: EngineConfig) -> None:
    rows = [TokenRow.of(text) for text in HuggingFaceTokenizer(spec).encode(MARKED)]
    (session,) = load_sessions(spec, config, "cpu")
    for batches in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
        got = np.stack([embedding for batch in batches for embedding in session.run(batch)])
        if spec.normalize:
            got /= np.linalg.norm(got, axis=1, keepdims=True)
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert got.shape[1] == spec.dimensions


@pytest.mark.parametrize("made", KINDS, indirect=True, ids=lambda make: make.__name__)
def test_torch_computes_the_librarys_embeddings(made: tuple[EncoderModelSpec, Any]) -> None:
    assert_equal(*made, msgspec.structs.replace(CONFIG, encoder_backend="torch"))


@pytest.mark.parametrize("made", KINDS, indirect=True, ids=lambda make: make.__name__)
def test_the_graph_computes_the_librarys_embeddings(made: tuple[EncoderModelSpec, Any], tmp_path: pathlib.Path) -> None:
    open_exported(made[0].folder, str(tmp_path))
    assert_equal(*made, msgspec.structs.replace(CONFIG, cache_dir=str(tmp_path)))
