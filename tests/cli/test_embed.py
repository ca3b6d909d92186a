"""`noria embed`: embeddings of texts, without a server."""

import io
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from encoders import make_encoder, open_exported, transformers_alone
from noria.cli.main import main
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import TokenRow

TEXTS = ["a red circle", "a blue square", "word " * 300]


def test_no_text_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["embed", "-"]) != 0
    assert "no text" in capsys.readouterr().err


def test_each_text_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    spec = open_exported("minilm")
    assert main(["embed", *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    assert [(line["tokens"], line["cut"]) for line in lines] == [(5, 0), (5, 0), (256, 46)]
    rows = [TokenRow.of(text) for text in HuggingFaceTokenizer(spec).encode(TEXTS)]
    means = np.stack([tokens.mean(0) for tokens in transformers_alone(spec.path, "BertModel", rows)])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose([line["embedding"] for line in lines], expected, atol=1e-5)


@pytest.mark.parametrize("suffix", [".npy", ".jsonl"])
def test_a_file_can_be_written_and_texts_read_from_standard_input(
    suffix: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_encoder(tmp_path / "model")
    open_exported(str(folder))
    file = tmp_path / f"out{suffix}"
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    assert main(["embed", "-", "third", "--model", str(folder), "-o", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    if suffix == ".npy":
        embeddings = np.load(file)
        assert (embeddings.shape, embeddings.dtype) == ((3, 32), np.float32)
    else:
        assert [json.loads(line)["text"] for line in file.read_text().splitlines()] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["a", "-o", "out.txt"], 2, "--output is 'out.txt'; its suffix must be one of .jsonl, .npy"),
        (["a", " "], 2, "text 1 (counted from 0) is empty"),
        (["a", "--model", "bundled"], 3, "is a model of kind diffusion"),
        (["a", "--devices", "cuda:7"], 2, "device 'cuda:7' does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", *arguments]) == status
    assert words in capsys.readouterr().err


def test_a_model_that_only_classifies_is_rejected(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder(tmp_path, "BertForSequenceClassification")
    assert main(["embed", "a", "--model", str(tmp_path)]) == 2
    assert "whose task is classification" in capsys.readouterr().err


def test_an_installation_for_encoders_alone_needs_no_torch(tmp_path: pathlib.Path) -> None:
    folder, file = make_encoder(tmp_path / "model"), tmp_path / "out.npy"
    cache = ["--cache-dir", str(tmp_path / "cache")]
    open_exported(str(folder), str(tmp_path / "cache"))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'diffusers', 'transformers', 'scipy', 'tqdm']));"
        "from noria.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)

    assert run("embed", "a", "--model", str(folder), "-o", str(file), *cache).returncode == 0
    assert np.load(file).shape == (1, 32)
    for command in (["doctor", "bundled"], ["generate", "a circle"], ["serve"]):
        result = run(*command, *cache)
        assert result.returncode == (1 if command[0] == "doctor" else 2), result.stderr
        assert "pip install 'noria-serve[diffusion]'" in result.stdout + result.stderr
