"""Embedding models in the layouts in which they are published: equal to sentence-transformers, on each path.

Weights are random, and sizes small; modules, poolings, activations and attention are those of the published models.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from encoders import (
    IDENTITY,
    TANH,
    TEXTS,
    add_dense,
    change_json,
    make_encoder,
    make_tokenizer,
    open_encoder,
    open_exported,
    sentence_transformer,
    write_json,
)
from noria.config import EngineConfig
from noria.engine.encoder.sessions import load_sessions
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import TokenRow
from noria.protocol.text import EncoderModelSpec

CONFIG = EngineConfig(encoder_sessions=1, threads=1)
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


# Torch traces a decoder for 5 s; the two that stay have norms of queries, and a window.
SLOW = (embedding_gemma, qwen2_embedding)
GRAPH_KINDS = [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in KINDS]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A model, and what sentence-transformers computes of each text alone."""
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    pad_token = "<pad>" if request.param is stella else "[PAD]"
    settings = {"pad_token": pad_token, "model_max_length": 64}
    write_json(folder / "tokenizer_config.json", settings)
    theirs = SentenceTransformer(str(folder), device="cpu")
    # For some model types transformers would use the published models' own splitting of words.
    if request.param is not model2vec:
        theirs[0].processor = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    return open_encoder(folder), [theirs.encode(text) for text in TEXTS]


def assert_equal(spec: EncoderModelSpec, expected: Any, config: EngineConfig) -> None:
    # A text without tokens, as an empty one without special tokens, reaches no session.
    texts = HuggingFaceTokenizer(spec).encode(TEXTS)
    expected = [right for text, right in zip(texts, expected, strict=True) if text.num_tokens]
    rows = [TokenRow.of(text) for text in texts if text.num_tokens]
    (session,) = load_sessions(spec, config, "cpu")
    for batches in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
        got = np.stack([embedding for batch in batches for embedding in session.run(batch)])
        if spec.normalize:
            got /= np.linalg.norm(got, axis=1, keepdims=True)
        np.testing.assert_allclose(got, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))
    assert got.shape[1] == spec.dimensions


@pytest.mark.parametrize("made", KINDS, indirect=True, ids=lambda make: make.__name__)
def test_torch_computes_the_numbers_of_sentence_transformers(made: tuple[EncoderModelSpec, Any]) -> None:
    spec, expected = made
    assert_equal(spec, expected, msgspec.structs.replace(CONFIG, encoder_backend="torch"))


@pytest.mark.parametrize("made", GRAPH_KINDS, indirect=True, ids=lambda make: make.__name__)
def test_the_graph_computes_the_numbers_of_sentence_transformers(
    made: tuple[EncoderModelSpec, Any], tmp_path: pathlib.Path
) -> None:
    spec, expected = made
    open_exported(spec.folder, str(tmp_path))
    assert_equal(spec, expected, msgspec.structs.replace(CONFIG, cache_dir=str(tmp_path)))


@pytest.mark.parametrize("make", [labse, qwen3_embedding, embedding_gemma], ids=lambda make: make.__name__)
def test_without_a_pooling_a_model_returns_the_states_of_tokens(
    make: Callable[[pathlib.Path], None], tmp_path: pathlib.Path
) -> None:
    """They are sentence-transformers' token_embeddings, before Pooling and Dense."""
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerFast

    make(tmp_path)
    settings = {"pad_token": "[PAD]", "model_max_length": 64}
    write_json(tmp_path / "tokenizer_config.json", settings)
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    theirs[0].processor = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **settings)
    write_json(tmp_path / "noria.json", {"pooling": "none"})
    spec = open_encoder(tmp_path)
    expected = [theirs.encode(text, output_value="token_embeddings").numpy() for text in TEXTS]
    rows = [TokenRow.of(text) for text in HuggingFaceTokenizer(spec).encode(TEXTS)]
    configs = [msgspec.structs.replace(CONFIG, encoder_backend="torch")]
    if make is labse:
        open_exported(str(tmp_path), str(tmp_path / "cache"))
        configs.append(msgspec.structs.replace(CONFIG, cache_dir=str(tmp_path / "cache")))
    for config in configs:
        (session,) = load_sessions(spec, config, "cpu")
        for batches in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
            got = [states for batch in batches for states in session.run(batch)]
            for own, right in zip(got, expected, strict=True):
                assert own.shape[1] == spec.dimensions
                np.testing.assert_allclose(own, right, atol=1e-5 * max(1.0, np.abs(right).max()))
