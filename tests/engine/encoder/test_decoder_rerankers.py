"""Rerankers that are decoders: equal to sentence-transformers' CrossEncoder, and to the rule of Qwen3-Reranker's own.

Weights are random, and sizes small; the files are those of the published models.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from encoders import PAIRS, change_json, make_encoder, open_encoder, open_session, rows_of, write_json
from noria.config import EngineConfig
from noria.errors import ModelError
from noria.frontend.services.texts.scores import scores
from noria.models.encoder.checkpoint import load
from noria.models.encoder.folders.reranker_folder import parse_chat_template
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import Session
from noria.protocol.text import EncoderModelSpec, TokenHead

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no"]
HEAD = '<|im_start|>system\nSay "yes" or "no".<|im_end|>\n<|im_start|>user\n'
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "find what answers the query"


def chosen(role: str) -> str:
    return f'messages | selectattr("role", "eq", "{role}") | map(attribute="content") | first'


CHAT_TEMPLATE = (
    f'{{%- set instruction = {chosen("system")} | default("{INSTRUCTION}") -%}}\n'
    f"{{%- set query_text = {chosen('query')} -%}}\n{{%- set document_text = {chosen('document')} -%}}\n"
    f"{HEAD}<Instruct>: {{{{ instruction }}}}\n<Query>: {{{{ query_text }}}}\n"
    f"<Document>: {{{{ document_text }}}}{TAIL}\n"
)
OWN_TEMPLATE = f"{HEAD}<Instruct>: {{instruction}}\n<Query>: {{query}}\n<Document>: {{document}}{TAIL}"
LONG = [("long " * 30, "short " * 60), ("what", "long " * 90)]
"""Pairs that are cut to 96 tokens."""


def make_reranker(folder: pathlib.Path, architecture: str, config: dict[str, Any] | None = None) -> pathlib.Path:
    """Write a small decoder whose tokenizer has the tokens of the template."""
    settings = {"vocab_size": 320, "max_position_embeddings": 96, "pad_token_id": 0}
    make_encoder(folder, architecture, settings | (config or {}))
    tree = json.loads((folder / "tokenizer.json").read_text())
    size = len(tree["model"]["vocab"])
    flags = dict.fromkeys(["lstrip", "normalized", "rstrip", "single_word"], False)
    for number, token in enumerate(SPECIAL):
        tree["added_tokens"].append({"id": size + number, "content": token, "special": "<" in token} | flags)
        if "<" not in token:
            tree["model"]["vocab"][token] = size + number
    write_json(folder / "tokenizer.json", tree | {"post_processor": None})
    return folder


def as_published(folder: pathlib.Path, architecture: str = "Qwen3ForCausalLM", **config: Any) -> pathlib.Path:
    """A folder with sentence-transformers' files, as Qwen3-Reranker's."""
    make_reranker(folder, architecture, config)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    logits = {"method": "forward", "method_output_name": "logits"}
    for name, content in {
        "modules": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore",
             "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
        ],
        "1_LogitScore/config": {"true_token_id": size - 2, "false_token_id": size - 1},
        "sentence_bert_config": {"transformer_task": "text-generation", "module_output_name": "causal_logits",
                                 "modality_config": {"text": logits, "message": logits | {"format": "flat"}}},
        "config_sentence_transformers": {"model_type": "CrossEncoder", "prompts": {"search": "is it red?"}},
        "tokenizer_config": {"pad_token": "[PAD]", "model_max_length": 96, "chat_template": CHAT_TEMPLATE,
                             "tokenizer_class": "PreTrainedTokenizerFast"},
    }.items():  # fmt: skip
        write_json(folder / f"{name}.json", content)
    return folder


def with_noria_json(folder: pathlib.Path, architecture: str = "Qwen3ForCausalLM") -> pathlib.Path:
    """A folder as it was first published, and noria.json."""
    make_reranker(folder, architecture, {"num_labels": 1} if "Sequence" in architecture else {})
    write_json(folder / "tokenizer_config.json", {"pad_token": "[PAD]", "chat_template": "{% for m in messages %}"})
    write_json(folder / "noria.json", {"reranker": {"template": OWN_TEMPLATE, "instruction": INSTRUCTION}})
    return folder


def authors_rule(folder: pathlib.Path, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Softmax over the logits of "no" and "yes" at the last token; the middle alone is cut."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    head, tail = (tokenizer.encode(text, add_special_tokens=False) for text in (HEAD, TAIL))
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    found = []
    for query, document in pairs:
        middle = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        ids = head + tokenizer.encode(middle, add_special_tokens=False)[: 96 - len(head) - len(tail)] + tail
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        found.append(float(torch.stack([logits[no], logits[yes]]).softmax(0)[1]))
    return found


def assert_scores(spec: EncoderModelSpec, expected: Sequence[float], session: Session) -> None:
    """Each alone, and in mixed batches."""
    rows = rows_of(spec, [*PAIRS, *LONG])
    for batches in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
        logits = [float(row[0]) for batch in batches for row in session.run(batch)]
        np.testing.assert_allclose([scores([each], spec.activation)[0] for each in logits], expected, atol=1e-5)


KINDS = {
    "qwen3": as_published,
    "tied": lambda folder: as_published(folder, tie_word_embeddings=True),
    "qwen2": lambda folder: as_published(folder, "Qwen2ForCausalLM"),
    "mistral": lambda folder: as_published(folder, "MistralForCausalLM", sliding_window=None),
    "noria.json": with_noria_json,
}


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A reranker, and what the library computes of each pair alone, or else the authors' rule."""
    from sentence_transformers import CrossEncoder
    from transformers import PreTrainedTokenizerFast

    folder = KINDS[request.param](tmp_path_factory.mktemp("reranker"))
    pairs = [*PAIRS, *LONG]
    if request.param == "noria.json":
        return open_encoder(folder), authors_rule(folder, pairs)
    theirs = CrossEncoder(str(folder), device="cpu")
    # For some model types transformers would use the published models' own splitting of words.
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"padding_side": "left"}
    theirs[0].processor = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    return open_encoder(folder), [float(theirs.predict([pair])[0]) for pair in pairs]


@pytest.mark.parametrize(
    ("made", "path"),
    # Torch traces a layer of a decoder for 5 s.
    [*[(kind, "torch") for kind in KINDS], pytest.param("qwen3", "graph", marks=pytest.mark.slow)],
    indirect=["made"],
)
def test_it_computes_the_scores(made: tuple[EncoderModelSpec, Any], path: str, tmp_path: pathlib.Path) -> None:
    assert np.ptp(made[1]) > 1e-4  # ten times the tolerance; the trained tokenizer differs each time
    assert_scores(*made, open_session(made[0], path, tmp_path))


def test_a_classifier_of_one_label_scores_as_transformers(tmp_path: pathlib.Path) -> None:
    """The conversions of Qwen3-Reranker to a classifier are such folders, and need the template of noria.json."""
    import torch
    from transformers import Qwen3ForSequenceClassification

    spec = open_encoder(with_noria_json(tmp_path, "Qwen3ForSequenceClassification"))
    model = Qwen3ForSequenceClassification.from_pretrained(tmp_path).eval()
    rows = rows_of(spec, [*PAIRS, *LONG])
    with torch.no_grad():
        logits = [float(model(torch.tensor([row.ids.tolist()])).logits[0, 0]) for row in rows]
    expected = [scores([each], "sigmoid")[0] for each in logits]
    assert spec.head == TokenHead("score.weight", 0)
    assert_scores(spec, expected, open_session(spec, "torch", tmp_path))


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("tokenizer_config", {"chat_template": None}, "is a decoder that reranks, and has no chat template. Write"),
        ("tokenizer_config", {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"},
         r"has '{% for message in messages %}', which is not the content of a query, a document or an instruction"),
        ("tokenizer_config", {"chat_template": "{#" * 32_768}, "has '{#{#.*, which is not the content of a query"),
        ("tokenizer_config", {"chat_template": "a" * 65_537}, "has 65537 characters; allowed are at most 65536"),
        ("tokenizer_config", {"chat_template": CHAT_TEMPLATE.replace(INSTRUCTION, "\\x")}, r"which is not the content"),
        ("tokenizer_config", {"chat_template": f"{{{{ {chosen('query')} }}}}"}, "has the fields query; needed are one"),
        ("tokenizer_config", {"chat_template": CHAT_TEMPLATE.replace("<|im_start|>", "<|start|>")},
         r"has '<\|start\|>', which is no token of tokenizer.json: it is the template of another model"),
        ("sentence_bert_config", {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}},
         "modality_config has no `message`, so that the chat template is not used"),
        ("1_LogitScore/config", {"true_token_id": 320}, "the token that scores has the id 320; .* has 320 rows"),
        ("1_LogitScore/config", {"true_token_id": None}, "the key 'true_token_id' is missing"),
        ("1_LogitScore/config", {"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
        ("config", {"hidden_size": 16}, r"lm_head.weight has the shape \[320, 32\], not \[320, 16\]"),
        ("noria", {"reranker": {"template": "{query}"}}, r"reranker.template has the fields query; needed are one"),
        ("noria", {"reranker": {"true_token": "maybe"}}, "has no token 'maybe', whose logit would be the score"),
        ("noria", {"reranker": {"prompt": "a"}}, "noria.json: .*prompt"),
    ],
)  # fmt: skip
def test_a_wrong_template_or_a_missing_head_is_rejected_in_one_sentence(
    tmp_path: pathlib.Path, file: str, changes: dict[str, Any], words: str
) -> None:
    folder = as_published(tmp_path)
    path = folder / f"{file}.json"
    if not path.exists():
        write_json(path, {})
    change_json(path, **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


def test_a_decoder_without_a_head_is_rejected(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"the weights have no lm_head.weight, of which the head"):
        open_encoder(as_published(tmp_path, "Qwen3Model", tie_word_embeddings=False))


def test_a_template_of_more_tokens_than_the_model_takes_is_rejected(tmp_path: pathlib.Path) -> None:
    spec = open_encoder(as_published(tmp_path))
    with pytest.raises(ModelError, match=r"alone has .* tokens; the model takes at most 20"):
        HuggingFaceTokenizer(msgspec.structs.replace(spec, max_length=20))


@pytest.mark.parametrize(
    "source",
    [
        CHAT_TEMPLATE,
        f"a\n  {{% set q = {chosen('query')} %}}\n\n {{{{- q }}}}\n b {{# note #}}\n"
        f"{{{{ {chosen('document')} -}}}} \n c \n\n",
        '{{ (messages | selectattr("role", "eq", "query") | first).content }}\n\n'
        "{%- set d = (messages|selectattr('role','equalto','document')|first)['content'] -%}\n{{d}}{#- a -#} \n",
        f'{{{{ {chosen("system")} | default(\'a "b"\\n\') }}}} {{{{ {chosen("query")} }}}}'
        f" {{{{ {chosen('document')} }}}}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("instruction", ["", "is it red?"])
def test_a_chat_template_is_filled_as_by_transformers(source: str, instruction: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "query", "content": "a  q"}, {"role": "document", "content": "\n d"}]
    system = [{"role": "system", "content": instruction}] if instruction else []
    (expected,), _ = render_jinja_template([[*system, *messages]], chat_template=source)
    assert parse_chat_template(pathlib.Path("folder"), source).fill("a  q", "\n d", instruction) == expected


def test_a_head_with_nan_is_rejected_when_it_is_loaded(tmp_path: pathlib.Path) -> None:
    spec = open_encoder(as_published(tmp_path))
    assert spec.head is not None
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][spec.head.true_row, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights in .* are not finite: weight has NaN or infinity"):
        load(spec, EngineConfig(dtype="float32"), "cpu")
