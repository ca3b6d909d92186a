"""`noria show`: what it prints, and its exit status."""

import json

import pytest
from PIL import Image

from noria.cli.main import main
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import save_options

WHOLE = GenerationMetadata(
    "a red circle\nabove", "blurry", 7, 32, 24, 20, 7.5, "dpm++2m-karras", "tiny", "0123456789ab", "0.1.0"
)


@pytest.fixture
def save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def of(name: str, metadata: GenerationMetadata | None) -> str:
        kind = name.rpartition(".")[2]
        Image.new("RGB", (32, 24)).save(name, format=kind, **(save_options(metadata, kind) if metadata else {}))
        return name

    return of


def test_it_prints_a_line_for_each_setting(save, capsys):
    assert main(["show", save("a.png", WHOLE)]) == 0
    assert capsys.readouterr().out == (
        "a.png\n"
        "  prompt           a red circle\n"
        "                   above\n"
        "  negative prompt  blurry\n"
        "  seed             7\n"
        "  size             32×24\n"
        "  steps            20\n"
        "  scheduler        dpm++2m-karras\n"
        "  guidance         7.5\n"
        "  model            tiny\n"
        "  model version    0123456789ab\n"
        "  drawn by         noria 0.1.0\n"
    )


def test_json_is_a_line_for_each_file(save, capsys):
    assert main(["show", "--json", save("a.webp", WHOLE), save("b.jpeg", GenerationMetadata("p", seed=1))]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["file"] == "a.webp"
    assert (first["prompt"], first["inference_steps"], first["noria"]) == (WHOLE.prompt, 20, "0.1.0")
    assert second == {"file": "b.jpeg", "prompt": "p", "seed": 1}


def test_a_file_without_parameters_fails_and_the_others_are_shown(save, capsys):
    assert main(["show", save("none.png", None), "missing.png", save("a.png", WHOLE)]) == 1
    output = capsys.readouterr()
    assert "a red circle" in output.out
    assert output.err.splitlines() == [
        "noria: error: 'none.png' says nothing of how it was made.",
        "noria: error: there is no file 'missing.png'.",
    ]


def test_nothing_in_a_file_commands_the_terminal(save, capsys):
    save("a.png", GenerationMetadata("\x1b[2Jred\rblue\u202e", other={"\x9bName": "\x07"}))
    assert main(["show", "a.png"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[2Jred\\rblue\\u202e" in out
    assert "\\x9bName" in out
    assert not set(out) & set("\x1b\r\x9b\x07\u202e")
