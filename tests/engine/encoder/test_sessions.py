"""Sessions: results equal sentence-transformers' and transformers' in any batch, and settings choose the form."""

import pathlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from encoders import PAIRS, TEXTS, make_encoder, open_exported, sentence_transformer, transformers_alone
from noria.config import EngineConfig
from noria.engine.encoder import sessions as module
from noria.engine.encoder.fidelity import corpus_rows
from noria.engine.encoder.graph_sessions import import_openvino
from noria.engine.encoder.sessions import find_device, load_sessions, num_cores, precision_of, resolve_sessions
from noria.engine.encoder.torch_session import TorchSession, bucket
from noria.errors import ConfigError, MissingExtra, ModelError
from noria.models.catalog import open_model_of
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import TokenRow, compute
from noria.protocol.text import EncoderModelSpec

CONFIG = EngineConfig(encoder_sessions=2, threads=1)


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """Sessions of torch on a CPU set it for the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tokenize(spec: EncoderModelSpec, inputs: list[Any]) -> list[TokenRow]:
    return [TokenRow.of(text) for text in HuggingFaceTokenizer(spec).encode(inputs)]


def test_minilms_embeddings_equal_sentence_transformers_in_any_batch(minilm: EncoderModelSpec) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [*TEXTS[2:], "word " * 400, "a"]
    expected = SentenceTransformer(minilm.folder, device="cpu").encode(texts)
    first, second = load_sessions(minilm, CONFIG, "cpu")
    rows = tokenize(minilm, texts)
    for session, batches in ((first, [rows]), (second, [[row] for row in rows])):
        got = np.stack([embedding for batch in batches for embedding in session.run(batch)])
        got /= np.linalg.norm(got, axis=1, keepdims=True)
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "num_labels", "inputs"),
    [
        ("BertForSequenceClassification", 3, TEXTS),
        ("BertForSequenceClassification", 1, PAIRS),
        ("DistilBertForSequenceClassification", 2, TEXTS),
        ("RobertaForTokenClassification", 5, TEXTS),
        ("ModernBertForSequenceClassification", 1, PAIRS),
        ("ModernBertModel", 2, TEXTS),
    ],
)
def test_results_equal_transformers_with_each_text_alone(
    tmp_path: pathlib.Path, architecture: str, num_labels: int, inputs: list[Any]
) -> None:
    folder = make_encoder(tmp_path / "model", architecture, {"num_labels": num_labels})
    spec = open_exported(str(folder), str(tmp_path / "cache"))
    config = msgspec.structs.replace(CONFIG, cache_dir=str(tmp_path / "cache"))
    rows = tokenize(spec, inputs)
    expected = transformers_alone(folder, architecture, rows)
    if spec.task == "embedding":
        expected = [tokens.mean(0) for tokens in expected]
    on_torch = load_sessions(spec, msgspec.structs.replace(config, encoder_backend="torch"), "cpu")
    assert [type(session) for session in on_torch] == [TorchSession] * 2
    for session in (*load_sessions(spec, config, "cpu"), on_torch[0]):
        for got, right in zip(session.run(rows), expected, strict=True):
            np.testing.assert_allclose(got, right, atol=1e-5 * max(1.0, np.abs(right).max()))


def test_sessions_of_one_thread_share_the_weights_and_run_side_by_side(minilm: EncoderModelSpec) -> None:
    first, second = load_sessions(minilm, CONFIG, "cpu")
    assert first is second
    rows = corpus_rows(minilm)[:8]
    expected = compute(first, rows)
    results: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: results.append(compute(first, rows))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, expected)
    assert len(results) == 4


@pytest.fixture
def claim_capabilities(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let OpenVINO's Core report the capabilities of another CPU."""
    try:
        openvino = import_openvino()
    except MissingExtra as error:
        pytest.skip(error.message)
    core = openvino.Core()

    def claim(*capabilities: str) -> None:
        other = SimpleNamespace(compile_model=core.compile_model, get_property=lambda *_: capabilities)
        monkeypatch.setattr(openvino, "Core", lambda: other)

    return claim


@pytest.mark.slow  # 200 texts in two precisions; test_fidelity.py holds the floor
def test_bfloat16_on_a_cpu_keeps_the_embeddings(
    minilm: EncoderModelSpec, claim_capabilities: Callable[..., None]
) -> None:
    """Without bfloat16, OpenVINO computes in float32."""
    claim_capabilities("FP32", "BF16")
    sessions = load_sessions(minilm, msgspec.structs.replace(CONFIG, encoder_precision="bfloat16"), "cpu")
    rows = corpus_rows(minilm)[:24]
    (reference, _), results = load_sessions(minilm, CONFIG, "cpu"), dict[int, Any]()
    threads = [
        threading.Thread(target=lambda index=index: results.update({index: compute(sessions[index], rows)}))
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    exact = np.stack(compute(reference, rows))
    for got in map(np.stack, results.values()):
        assert ((exact * got).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(got, axis=1)).min() > 0.9995
    assert len(results) == 2


@pytest.mark.slow  # quantizes, and computes 200 texts in two precisions
def test_int8_is_rejected_by_the_floor_unless_it_is_lowered(minilm: EncoderModelSpec) -> None:
    config = msgspec.structs.replace(CONFIG, encoder_precision="int8")
    with pytest.raises(ModelError, match=r"fidelity min 0\.9\d+, mean 0\.99\d+ on 200 samples; .* is 0.999"):
        load_sessions(minilm, config, "cpu")
    assert len(load_sessions(minilm, msgspec.structs.replace(config, encoder_min_fidelity=0.9), "cpu")) == 2
    precision = precision_of(minilm, config, "cpu")
    assert (precision.dtype, 0.9 < precision.fidelity < 0.999) == ("int8", True)


def test_a_cpu_without_bfloat16_is_rejected(small: EncoderModelSpec, claim_capabilities: Callable[..., None]) -> None:
    claim_capabilities("FP32")
    with pytest.raises(ConfigError, match=r"'bfloat16'.* Use float32"):
        load_sessions(small, msgspec.structs.replace(CONFIG, encoder_precision="bfloat16"), "cpu")


@pytest.mark.parametrize(
    ("precision", "package", "extra"), [("float32", "onnxruntime", "encoders"), ("bfloat16", "openvino", "openvino")]
)
def test_a_missing_package_is_named_with_its_extra(
    small: EncoderModelSpec, monkeypatch: pytest.MonkeyPatch, precision: str, package: str, extra: str
) -> None:
    load_sessions(small, CONFIG, "cpu")
    installed = module.importlib.util.find_spec  # type: ignore[attr-defined]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else installed(name))
    with pytest.raises(MissingExtra, match=rf"{package}, which is not installed: pip install 'noria-serve\[{extra}\]'"):
        load_sessions(small, msgspec.structs.replace(CONFIG, encoder_precision=precision), "cpu")


@pytest.mark.parametrize(
    ("settings", "num_parameters", "cores", "expected"),
    [
        ({}, 23_000_000, 2, (2, 1)),
        ({}, 23_000_000, 16, (16, 1)),
        ({}, 335_000_000, 16, (2, 8)),
        ({}, 335_000_000, 1, (1, 1)),
        ({"encoder_sessions": 4}, 23_000_000, 16, (4, 4)),
        ({"encoder_sessions": 4}, 23_000_000, 2, (4, 1)),
        ({"threads": 3}, 23_000_000, 2, (2, 3)),
    ],
)
def test_small_models_have_a_session_for_each_core(
    settings: dict[str, Any], num_parameters: int, cores: int, expected: tuple[int, int]
) -> None:
    assert resolve_sessions(EngineConfig(**settings), num_parameters, cores) == expected


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ({}, 8),
        ({"encoder_cores": 3}, 3),
        ({"encoder_cores": 9}, 8),
        ({"encoder_cores": 6, "devices": ("cpu", "cpu")}, 3),
    ],
)
def test_encoders_use_the_cores_that_are_theirs(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], cores: int
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda *_: 8)
    assert num_cores(EngineConfig(**settings)) == cores


def test_a_device_that_does_not_exist_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu") == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert find_device("cuda") == "cuda:0"
    with pytest.raises(ConfigError, match=r"'cuda:1'.* 1 CUDA devices"):
        find_device("cuda:1")


@pytest.mark.parametrize(("device", "backend"), [("cuda", "auto"), ("cpu", "torch")])
def test_torch_rejects_int8(
    small: EncoderModelSpec, monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = msgspec.structs.replace(CONFIG, encoder_precision="int8", encoder_backend=backend)
    with pytest.raises(ConfigError, match="torch does not compute"):
        load_sessions(small, config, device)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_torch_on_a_cpu_needs_no_export_and_keeps_its_fidelity_apart(
    small: EncoderModelSpec, tmp_path: pathlib.Path, precision: str
) -> None:
    config = msgspec.structs.replace(
        CONFIG, cache_dir=str(tmp_path), encoder_precision=precision, encoder_backend="torch", encoder_min_fidelity=0.9
    )
    first, second = load_sessions(small, config, "cpu")
    assert first is second and not list(tmp_path.rglob("*.onnx"))
    found = precision_of(small, config, "cpu")
    assert found.dtype == precision and found.fidelity is not None and 0.99 < found.fidelity <= 1.0
    names = [file.name for file in tmp_path.rglob("fidelity-*.json")]
    assert [name.startswith("fidelity-bfloat16-torch-") for name in names] == [True] * (precision == "bfloat16")


def test_buckets_waste_at_most_a_half() -> None:
    assert [bucket(number, 1) for number in (1, 2, 3, 4, 5, 6, 7, 9, 13)] == [1, 2, 3, 4, 6, 6, 8, 12, 16]
    assert [bucket(number, 16) for number in (3, 16, 17, 25, 200)] == [16, 16, 24, 32, 256]
    assert all(number <= bucket(number, 16) < 1.5 * number for number in range(16, 1000))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_a_gpu_compute_what_the_cpu_does(tmp_path: pathlib.Path, dtype: str) -> None:
    folder = make_encoder(tmp_path, "BertModel", {"max_position_embeddings": 256}, **sentence_transformer())
    spec = open_model_of(EncoderModelSpec, str(folder), EngineConfig())
    session = TorchSession(spec, EngineConfig(dtype=dtype), "cuda:0")  # type: ignore[arg-type]
    exact = TorchSession(spec, EngineConfig(dtype="float32"), "cpu")
    rows = corpus_rows(spec)
    for batch in (rows[:1], rows[:5], rows[5:13], rows[:2], rows[20:60], rows[:5]):
        for got, right in zip(session.run(batch), exact.run(batch), strict=True):
            cosine = got @ right / np.linalg.norm(got) / np.linalg.norm(right)
            assert cosine > (0.99999 if dtype == "float32" else 0.999)
