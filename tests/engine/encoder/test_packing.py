"""Packed batches: results equal padded ones for every architecture and output, and the choice follows the clock."""

import pathlib
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from encoders import SETTINGS, SMALL, make_encoder, open_encoder, sentence_transformer
from noria.config import EngineConfig
from noria.engine.encoder.packing_choice import choose_packing
from noria.engine.encoder.sessions import load_sessions
from noria.engine.encoder.torch_session import TorchSession, fine_bucket
from noria.errors import ConfigError, ModelError
from noria.models.encoder.architectures import CAUSAL, CLASS_PREFIXES, EMBEDDING_ONLY, OFFSET_POSITIONS, PACKED
from noria.models.encoder.checkpoint import EncoderModule
from noria.models.encoder.packing import PackedModule
from noria.models.encoder.pooling import PackedTexts, pool
from noria.models.encoder.tokenizers.token_rows import INPUTS, FloatArray, TokenRow, pack, pad, unpack, unpad
from noria.protocol.text import Splade

VOCABULARY, LONGEST = 60, 60
CONFIG = EngineConfig(encoder_backend="torch", threads=1, encoder_sessions=1, encoder_packing="on")


def some_rows(*lengths: int, num_seen: int = 0, vocab_size: int = VOCABULARY) -> list[TokenRow]:
    rng = np.random.default_rng(0)
    return [
        TokenRow(rng.integers(0, vocab_size, n), (np.arange(n) > n // 2).astype(np.uint8), num_seen) for n in lengths
    ]


ROWS = some_rows(7, LONGEST, 1, 2, 30, 7)


def tiny_model(architecture: str, **changes: Any) -> Any:
    prefix = max((each for each in CLASS_PREFIXES.values() if architecture.startswith(each)), key=len)
    kind = next(kind for kind, each in CLASS_PREFIXES.items() if each == prefix)
    settings = SETTINGS.get(prefix, SMALL | {"max_position_embeddings": LONGEST})
    if kind in OFFSET_POSITIONS:
        settings = settings | {"max_position_embeddings": LONGEST + 2, "pad_token_id": 1, "type_vocab_size": 2}
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**settings | {"vocab_size": VOCABULARY, "num_labels": 3} | changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(requires_grad=False)


def both_ways(module: EncoderModule, rows: list[TokenRow]) -> tuple[list[FloatArray], list[FloatArray]]:
    names = INPUTS if getattr(module.model.config, "type_vocab_size", 0) > 1 else INPUTS[:2]
    padded = module(*map(torch.from_numpy, pad(rows, names).values())).numpy()
    packed_module = PackedModule(module)
    tensors = map(torch.from_numpy, pack(rows, names, packed_module.pad_id))
    packed = packed_module(*tensors, max_length=LONGEST).numpy()
    return unpad(padded, rows), unpack(packed, rows)


def assert_equal(right: list[FloatArray], got: list[FloatArray]) -> None:
    for one, other in zip(right, got, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * max(1.0, float(np.abs(one).max())))


@pytest.mark.parametrize("kind", sorted(PACKED))
def test_embeddings_of_every_architecture_equal_padded_ones(kind: str) -> None:
    model = tiny_model(f"{CLASS_PREFIXES[kind]}Model")
    pooling = "lasttoken" if kind in CAUSAL else "mean"
    assert_equal(*both_ways(EncoderModule(model, (pooling,), is_causal=kind in CAUSAL), ROWS))


@pytest.mark.parametrize("kind", sorted(PACKED - EMBEDDING_ONLY))
def test_classifiers_of_every_architecture_equal_padded_ones(kind: str) -> None:
    pooling = {"classifier_pooling": "bos"} if kind == "eurobert" else {}  # by default it is late
    for head in ("ForSequenceClassification", "ForTokenClassification"):
        assert_equal(*both_ways(EncoderModule(tiny_model(CLASS_PREFIXES[kind] + head, **pooling), ()), ROWS))


@pytest.mark.parametrize(
    "architecture",
    ["ModernBertForSequenceClassification", "EuroBertForSequenceClassification"],
)
def test_classifiers_of_the_mean_equal_padded_ones(architecture: str) -> None:
    assert_equal(*both_ways(EncoderModule(tiny_model(architecture, classifier_pooling="mean"), ()), ROWS))


def test_all_poolings_and_sparse_embeddings_equal_padded_ones() -> None:
    model = tiny_model("BertModel")
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    assert_equal(*both_ways(EncoderModule(model, modes), ROWS))
    masked = tiny_model("BertForMaskedLM")
    for splade in (Splade("max", "relu"), Splade("sum", "log1p_relu")):
        assert_equal(*both_ways(EncoderModule(masked, (), splade=splade), ROWS))


def test_texts_with_unseen_tokens_are_padded_beside_packed_ones(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries of ColBERT are filled up with such tokens, by whose number FlashAttention would shift windows."""
    spec = open_encoder(make_encoder(tmp_path, "ModernBertModel", **sentence_transformer()))
    session = TorchSession(spec, msgspec.structs.replace(CONFIG, dtype="float32"), "cpu")
    queries, documents = some_rows(32, 32, num_seen=5), some_rows(9, 40) + some_rows(5, num_seen=5)
    mixed = [documents[0], queries[0], documents[1], queries[1], documents[2]]
    right = session.run_padded(mixed)
    seen: list[Any] = []
    monkeypatch.setattr(PackedModule, "forward", lambda *_, **__: pytest.fail("packed"))
    assert_equal(session.run_padded(queries), session.run_packed(queries))
    monkeypatch.undo()
    monkeypatch.setattr("noria.engine.encoder.torch_session.pack", lambda rows, *_: seen.extend(rows) or pack(rows, *_))
    session.packed_from = 1
    assert_equal(right, session.run(mixed))
    assert [len(row.ids) for row in seen] == [9, 40, 5]


def test_texts_and_tokens_that_fill_up_a_shape_change_nothing() -> None:
    module = EncoderModule(tiny_model("RobertaModel"), ("mean", "max", "cls", "lasttoken"))
    packed = PackedModule(module)
    total = sum(len(row.ids) for row in ROWS)
    for num_tokens in (total, total + 9):
        tensors = [torch.from_numpy(array) for array in pack(ROWS, INPUTS, packed.pad_id, 8, num_tokens)]
        assert [tuple(each.shape) for each in tensors] == [(1, num_tokens)] * 3 + [(1, 9), (1, num_tokens)]
        texts = tensors[2][0]
        hidden = torch.randn(1, num_tokens, 3)
        hidden[0, total:] = float("nan")  # as memory that no kernel has written
        assert (texts[total:] == 8).all()
        for mode in ("mean", "max", "cls", "lasttoken", "weightedmean"):
            assert pool(mode, hidden, PackedTexts(tensors[3][0], texts))[: len(ROWS)].isfinite().all()


@pytest.mark.parametrize(
    ("architecture", "files"),
    [("BertModel", sentence_transformer()), ("RobertaForSequenceClassification", {})],
)
def test_a_session_packs_texts_in_any_batch_as_it_computes_them_alone(
    tmp_path: pathlib.Path, architecture: str, files: dict[str, Any]
) -> None:
    make_encoder(tmp_path, architecture, **files)
    spec = open_encoder(tmp_path)
    (padded,) = load_sessions(spec, msgspec.structs.replace(CONFIG, encoder_packing="auto"), "cpu")
    (packed,) = load_sessions(spec, CONFIG, "cpu")
    assert (padded.is_packed, packed.is_packed) == (False, True)
    rows = [TokenRow(row.ids) for row in some_rows(3, spec.max_length, 1, 17, vocab_size=spec.vocab_size)]
    right = padded.run(rows)
    assert_equal(right, packed.run(rows))
    assert_equal(right, [result for row in rows for result in packed.run([row])])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: make_encoder(folder, "DebertaModel"), "type deberta are not packed. Use engine.encoder_packi"),
        (lambda folder: make_encoder(folder, "EuroBertForSequenceClassification", {"classifier_pooling": "late"}),
         "a head with the classifier_pooling late is not packed"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_packed_is_rejected_only_if_packing_is_on(
    tmp_path: pathlib.Path, make: Any, words: str
) -> None:
    make(tmp_path)
    spec = open_encoder(tmp_path)
    with pytest.raises(ModelError, match=words):
        load_sessions(spec, CONFIG, "cpu")
    session = TorchSession(spec, msgspec.structs.replace(CONFIG, dtype="float32"), "cpu")
    choose_packing(spec, session, "auto", 0.999)
    assert not session.is_packed


def test_packing_needs_torch(tmp_path: pathlib.Path) -> None:
    make_encoder(tmp_path, **sentence_transformer())
    config = EngineConfig(encoder_packing="on", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"encoder_packing is 'on', and ONNX Runtime or OpenVINO"):
        load_sessions(open_encoder(tmp_path), config, "cpu")


ANY_SPEC: Any = SimpleNamespace(name="a", task="embedding", max_length=512, vocab_size=100)


class TimedSession:
    """Computes ones, and takes what it is given for each batch."""

    packed_from: int | None = None
    packing_obstacle = None
    has_packed = False

    def __init__(self, padded_s: float, packed_s: float, lone_packed_s: float, packed: float = 1.0) -> None:
        self.now, self.num_texts = 0.0, 0
        self._padded_s, self._packed_s, self._lone_packed_s, self._packed = padded_s, packed_s, lone_packed_s, packed

    def run_padded(self, rows: Any) -> list[FloatArray]:
        self.now += self._padded_s
        return [np.array([1.0, 1.0], np.float32)] * len(rows)

    def run_packed(self, rows: Any) -> list[FloatArray]:
        self.now += self._lone_packed_s if len(rows) == 1 else self._packed_s
        self.num_texts += len(rows)
        self.has_packed = True
        return [np.array([1.0, self._packed], np.float32)] * len(rows)

    def drop_packed(self) -> None:
        self.has_packed = False


@pytest.mark.parametrize(
    ("session", "packed_from"),
    [
        (TimedSession(2.0, 1.0, 2.0), 1),
        (TimedSession(2.0, 1.0, 3.0), 2),
        (TimedSession(2.0, 3.0, 1.0), None),
        (TimedSession(2.0, 1.0, 1.0, packed=-1.0), None),  # other results
        (TimedSession(2.0, 1.0, 1.0, packed=float("nan")), None),
    ],
)
def test_auto_packs_where_that_was_measured_to_be_no_slower_and_has_the_same_results(
    session: TimedSession, packed_from: int | None
) -> None:
    choose_packing(ANY_SPEC, session, "auto", 0.999, clock=lambda: session.now)
    assert session.packed_from == packed_from
    assert session.has_packed is (packed_from is not None)  # graphs that are not used take no memory


def test_on_compares_the_results_of_a_few_texts_and_times_nothing() -> None:
    session = TimedSession(2.0, 3.0, 3.0)
    choose_packing(ANY_SPEC, session, "on", 0.999, clock=lambda: pytest.fail("timed"))
    assert (session.packed_from, session.num_texts) == (1, 8)
    with pytest.raises(ModelError, match="packed texts have other results"):
        choose_packing(ANY_SPEC, TimedSession(2.0, 1.0, 1.0, packed=-1.0), "on", 0.999)


def test_a_session_drops_what_packed_batches_hold(tmp_path: pathlib.Path) -> None:
    spec = open_encoder(make_encoder(tmp_path, **sentence_transformer()))
    session = TorchSession(spec, msgspec.structs.replace(CONFIG, dtype="float32"), "cpu")
    session.run_packed([TokenRow(np.arange(9))])
    assert session._packed is not None
    packed = weakref.ref(session._packed)
    choose_packing(spec, session, "auto", min_fidelity=1.1)
    assert (session.is_packed, packed()) == (False, None)


def test_buckets_of_packed_tokens_waste_at_most_an_eighth() -> None:
    for number in range(1, 5000):
        assert number <= fine_bucket(number) < max(number * 9 / 8, number + 16)
    assert len({fine_bucket(number) for number in range(1, 16_385)}) == 64


@pytest.mark.gpu
def test_packed_batches_on_a_gpu_compute_what_padded_ones_do(tmp_path: pathlib.Path) -> None:
    """Each three times: without a graph, captured, and by the graph."""
    for number, architecture in enumerate(("BertModel", "ModernBertModel", "Qwen3Model")):
        folder = make_encoder(tmp_path / str(number), architecture, **sentence_transformer())
        spec = open_encoder(folder)
        session = TorchSession(spec, EngineConfig(dtype="bfloat16"), "cuda:0")
        for lengths in ((3, 60, 1, 17), (5, 58, 2, 16), (4, 59, 1, 17), (64,)):
            rows = some_rows(*lengths, vocab_size=spec.vocab_size)
            for right, got in zip(session.run_padded(rows), session.run_packed(rows), strict=True):
                assert right @ got / (np.linalg.norm(right) * np.linalg.norm(got)) > 0.999
