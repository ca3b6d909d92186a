"""Folders of decoders: which embed texts, and which are rejected with the reason."""

import json
import pathlib
import shutil
from typing import Any

import pytest

from encoders import change_json, make_encoder, open_encoder, sentence_transformer
from noria.errors import ModelError

TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}},
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small Qwen3 as its embedding models are published: the class with a head, and the last token's state."""
    files = sentence_transformer(pooling_mode_lasttoken=True, include_prompt=True)
    return make_encoder(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM", **files)


@pytest.fixture
def folder(qwen3: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may change."""
    return shutil.copytree(qwen3, tmp_path / "model")


def test_a_decoder_that_embeds_is_served_without_its_head(qwen3: pathlib.Path) -> None:
    spec = open_encoder(qwen3)
    assert (spec.task, spec.architecture, spec.pooling) == ("embedding", "Qwen3Model", ("lasttoken",))
    assert (spec.inputs, spec.max_length, spec.unread_keys) == (("input_ids", "attention_mask"), 64, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_causal": False}, "config.json: is_causal is false: in the model's own code .* gte-Qwen2"),
        ({"modules": 0}, "qwen3 is a decoder: .* A decoder that embeds, as Qwen3-Embedding, has a Pooling in modules"),
        ({"num_experts": 8}, "num_experts is 8, which changes"),
    ],
)
def test_other_decoders_are_rejected(folder: pathlib.Path, changes: dict[str, Any], words: str) -> None:
    if changes.pop("modules", 1) == 0:
        (folder / "modules.json").unlink()
    change_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


@pytest.mark.parametrize(
    ("processor", "ends"),
    [
        (TEMPLATE, True),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}, True),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}]}, False),
        (TEMPLATE | {"single": TEMPLATE["single"][::-1]}, False),  # a token before the text alone
        (None, False),
    ],
)
def test_the_tokenizer_must_end_texts_where_the_last_token_is_taken(
    folder: pathlib.Path, processor: Any, ends: bool
) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tree | {"post_processor": processor}))
    if ends:
        open_encoder(folder)
        return
    with pytest.raises(ModelError, match=r"tokenizer.json: adds no token to the end of a text, and .* \(lasttoken\)"):
        open_encoder(folder)
    change_json(folder / "1_Pooling/config.json", pooling_mode_lasttoken=False, pooling_mode_mean_tokens=True)
    assert open_encoder(folder).pooling == ("mean",)
