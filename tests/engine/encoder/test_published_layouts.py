"""Embedding models in the layouts in which they are published: equal to sentence-transformers, on each path.

Weights are random, and sizes small; modules, poolings, activations and attention are those of the published models.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from encoders import (
    IDENTITY,
    TANH,
    TEXTS,
    add_dense,
    assert_results,
    change_json,
    make_encoder,
    make_tokenizer,
    open_encoder,
    open_session,
    rows_of,
    sentence_transformer,
    write_json,
)
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import TokenRow
from noria.protocol.text import EncoderModelSpec

NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": ""}


def labse(folder: pathlib.Path) -> None:
    make_encoder(folder, "BertModel", **sentence_transformer(pooling_mode_cls_token=True))
    add_dense(folder, (32, 32, TANH, True))


def distiluse(folder: pathlib.Path) -> None:
    make_encoder(folder, "DistilBertModel", **sentence_transformer(normalize=False))
    add_dense(folder, (32, 24, TANH, True))


def stella(folder: pathlib.Path) -> None:
    make_encoder(folder, "ModernBertModel", **sentence_transformer(normalize=False))
    add_dense(folder, (32, 48, IDENTITY, True))


def embedding_gemma(folder: pathlib.Path) -> None:
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    files = {"config_sentence_transformers": {"prompts": prompts}}
    make_encoder(folder, "Gemma3TextModel", **sentence_transformer(), **files)
    add_dense(folder, (32, 128, IDENTITY, False), (128, 32, IDENTITY, False))


def qwen3_embedding(folder: pathlib.Path) -> None:
    """The last token's state, of a class whose head is not used; queries have an instruction."""
    instruction = "Instruct: Given a web search query, retrieve relevant passages\nQuery:"
    files = {"config_sentence_transformers": {"prompts": {"query": instruction, "document": ""}}}
    make_encoder(folder, "Qwen3ForCausalLM", **last_token(), **files)
    change_json(folder / "1_Pooling/config.json", include_prompt=True)


def qwen2_embedding(folder: pathlib.Path) -> None:
    make_encoder(folder, "Qwen2Model", **last_token())


def mistral_embedding(folder: pathlib.Path) -> None:
    """The kind of E5's, with a window, here of 8 tokens."""
    make_encoder(folder, "MistralModel", **last_token())


def last_token() -> dict[str, Any]:
    return sentence_transformer(pooling_mode_lasttoken=True)


def normalized_between(folder: pathlib.Path) -> None:
    """Two poolings, and a Normalize before a Dense."""
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    make_encoder(folder, "BertModel", **sentence_transformer(normalize=False, **flags))
    add_dense(folder, (64, 40, "torch.nn.GELU", True))
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}, NORMALIZE,
               {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]  # fmt: skip
    write_json(
        folder / "modules.json", [each | {"idx": index, "name": str(index)} for index, each in enumerate(modules)]
    )


def model2vec(folder: pathlib.Path) -> None:
    """A folder of model2vec, with a smaller table than the vocabulary and a factor for each token."""
    size = make_tokenizer(folder)
    torch.manual_seed(0)
    tensors = {"embeddings": torch.randn(50, 16), "mapping": torch.arange(size) % 50, "weights": torch.rand(size)}
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True})
    types = {".": "StaticEmbedding", "1_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{types[path]}"} for path in types]
    write_json(folder / "modules.json", [each | {"idx": n, "name": str(n)} for n, each in enumerate(modules)])


DECODERS = [qwen3_embedding, qwen2_embedding, mistral_embedding]
KINDS = [labse, distiluse, stella, embedding_gemma, normalized_between, model2vec, *DECODERS]


# Torch traces a layer of a decoder for 5 s.
SLOW = (embedding_gemma, *DECODERS)
CASES = [pytest.param(each, "torch", id=f"{each.__name__}-torch") for each in KINDS]
CASES += [
    pytest.param(each, "graph", id=f"{each.__name__}-graph", marks=[pytest.mark.slow] * (each in SLOW))
    for each in KINDS
]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A model, and what sentence-transformers computes of each text alone."""
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    theirs = open_with_library(folder, "<pad>" if request.param is stella else "[PAD]", own=request.param is model2vec)
    return open_encoder(folder), [theirs.encode(text) for text in TEXTS]


def open_with_library(folder: pathlib.Path, pad_token: str = "[PAD]", *, own: bool = False) -> Any:
    """sentence-transformers' model of a folder; without its `own` tokenizer, with that of the folder.

    For some model types transformers would use the published models' own splitting of words.
    """
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerFast

    settings = {"pad_token": pad_token, "model_max_length": 64}
    write_json(folder / "tokenizer_config.json", settings)
    theirs = SentenceTransformer(str(folder), device="cpu")
    if not own:
        theirs[0].processor = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    return theirs


@pytest.mark.parametrize(("made", "path"), CASES, indirect=["made"])
def test_it_computes_the_numbers_of_sentence_transformers(
    made: tuple[EncoderModelSpec, Any], path: str, tmp_path: pathlib.Path
) -> None:
    spec, expected = made
    # A text without tokens, as an empty one without special tokens, reaches no session.
    texts = HuggingFaceTokenizer(spec).encode(TEXTS)
    rows, expected = zip(
        *[(TokenRow.of(text), right) for text, right in zip(texts, expected, strict=True) if text.num_tokens],
        strict=True,
    )
    assert {right.shape for right in expected} == {(spec.dimensions,)}
    assert_results(open_session(spec, path, tmp_path), rows, expected, normalize=spec.normalize)


@pytest.mark.parametrize(
    ("make", "paths"),
    [(labse, ["torch", "graph"]), (qwen3_embedding, ["torch"]), (embedding_gemma, ["torch"])],
    ids=["labse", "qwen3_embedding", "embedding_gemma"],
)
def test_without_a_pooling_a_model_returns_the_states_of_tokens(
    make: Callable[[pathlib.Path], None], paths: list[str], tmp_path: pathlib.Path
) -> None:
    """They are sentence-transformers' token_embeddings, before Pooling and Dense."""
    make(tmp_path)
    theirs = open_with_library(tmp_path)
    write_json(tmp_path / "noria.json", {"pooling": "none"})
    spec = open_encoder(tmp_path)
    expected = [theirs.encode(text, output_value="token_embeddings").numpy() for text in TEXTS]
    assert {right.shape[1] for right in expected} == {spec.dimensions}
    for path in paths:
        assert_results(open_session(spec, path, tmp_path / "cache"), rows_of(spec, TEXTS), expected)
