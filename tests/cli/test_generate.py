"""`noria generate` writes files that say how they were made, and draws like them."""

import pathlib

import msgspec
import pytest
from PIL import Image

import noria.cli.generate
from noria.cli.main import main
from noria.config import Config
from noria.frontend.engines.pool import RawImage
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import read_metadata, save_options
from noria.models.catalog import open_model
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest


@pytest.fixture
def generated(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[ImageRequest]:
    """The requests that would have been drawn, in a folder of their own."""
    requests: list[ImageRequest] = []

    def generate(config: Config, spec: ModelSpec, request: ImageRequest) -> list[RawImage]:
        requests.append(request)
        size = request.width_px, request.height_px
        black = memoryview(bytes(3 * size[0] * size[1]))
        return [RawImage(request.seed + index, *size, black) for index in range(request.num_images)]

    monkeypatch.setattr(noria.cli.generate, "_generate", generate)
    monkeypatch.chdir(tmp_path)
    return requests


def save(name: str, metadata: GenerationMetadata) -> str:
    Image.new("RGB", (8, 8)).save(name, **save_options(metadata, "png"))
    return name


NORIA_METADATA = GenerationMetadata("a star", "blurry", 11, 64, 96, 4, 2.5, "euler-a", "noria-shapes", noria="0.1.0")


@pytest.fixture
def noria_metadata() -> GenerationMetadata:
    return msgspec.structs.replace(NORIA_METADATA, model_version=open_model("bundled").fingerprint)


def test_files_say_how_they_were_made(generated):
    options = "--negative-prompt blurry --seed 7 --width 64 --height 96 --steps 4 --guidance 2.5 --scheduler euler-a"
    assert main(["generate", "a star", *options.split(), "-n", "2", "-o", "a.webp"]) == 0
    for index in (0, 1):
        metadata = read_metadata(pathlib.Path(f"a-{index}.webp"))
        assert metadata.seed == 7 + index
        assert (metadata.prompt, metadata.width, metadata.height) == ("a star", 64, 96)
        assert (metadata.scheduler, metadata.model) == ("euler-a", "noria-shapes")


def test_files_are_silent_if_asked(generated, capsys):
    assert main(["generate", "a star", "--no-metadata", "-o", "a.png"]) == 0
    assert main(["show", "a.png"]) == 1


def test_like_takes_every_setting(generated, noria_metadata, capsys):
    assert main(["generate", "--like", save("a.png", noria_metadata), "-o", "b.png"]) == 0
    assert read_metadata(pathlib.Path("b.png")) == noria_metadata
    assert "warning" not in capsys.readouterr().err


def test_flags_win_over_the_file(generated, noria_metadata):
    flags = ["--seed", "5", "--steps", "6", "--negative-prompt=", "-n", "2"]
    assert main(["generate", "a circle", "--like", save("a.png", noria_metadata), *flags]) == 0
    (request,) = generated
    assert (request.prompt, request.negative_prompt, request.seed, request.num_steps) == ("a circle", "", 5, 6)
    assert (request.num_images, request.scheduler, request.guidance_scale) == (2, "euler-a", 2.5)


def test_another_model_than_the_files_is_refused(generated, capsys):
    file = save("a.png", msgspec.structs.replace(NORIA_METADATA, model="mine", model_version="ffffffffffff"))
    assert main(["generate", "--like", file]) == 2
    error = capsys.readouterr().err
    assert "'a.png' was drawn by mine (ffffffffffff); this is noria-shapes" in error
    assert "--model" in error
    assert generated == []


def test_another_model_that_is_asked_for_is_warned_of(generated, capsys):
    file = save("a.png", msgspec.structs.replace(NORIA_METADATA, model_version="ffffffffffff"))
    assert main(["generate", "--like", file, "--model", "bundled"]) == 0
    assert "the image will differ" in capsys.readouterr().err
    assert len(generated) == 1


def test_a_file_of_another_program_is_followed_as_far_as_possible(generated, capsys):
    a1111_metadata = GenerationMetadata("a star", seed=11, width=64, height=64, scheduler="euler", model="v1-5", model_version="6ce0161689")  # fmt: skip
    chunk = save_options(a1111_metadata, "png")["pnginfo"]
    chunk.chunks = [each for each in chunk.chunks if b"noria\0" not in each[1]]
    Image.new("RGB", (8, 8)).save("a.png", pnginfo=chunk)
    assert main(["generate", "--like", "a.png", "--steps", "3"]) == 0
    assert "v1-5 (6ce0161689); this is noria-shapes" in capsys.readouterr().err
    assert (generated[0].seed, generated[0].width_px, generated[0].num_steps) == (11, 64, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scheduler": "DPM++ SDE Karras"}, "scheduler"),
        ({"width": 65}, "width is 65"),
        ({"inference_steps": 5000}, "inference_steps is 5000"),
    ],
)
def test_what_the_model_cannot_repeat_is_refused(generated, noria_metadata, change, says, capsys):
    assert main(["generate", "--like", save("a.png", msgspec.structs.replace(noria_metadata, **change))]) == 2
    assert says in capsys.readouterr().err


def test_things_that_noria_has_not_are_named(generated, noria_metadata, capsys):
    file = save("a.png", msgspec.structs.replace(noria_metadata, other={"Clip skip": "2"}))
    assert main(["generate", "--like", file]) == 0
    assert "Clip skip: 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--like", "missing.png"], "there is no file 'missing.png'"), ([], "there is no prompt")]
)
def test_without_a_prompt_there_is_nothing_to_draw(generated, arguments, says, capsys):
    assert main(["generate", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("scheduler", ["euler-a", "unipc"])
def test_an_image_is_repeated_pixel_for_pixel(scheduler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["a red circle above a blue square", "--steps", "4", "--guidance", "3.5", "--scheduler", scheduler]
    assert main(["generate", *arguments, "-o", "first.png"]) == 0
    assert main(["generate", "--like", "first.png", "-o", "again.png"]) == 0
    first, again = Image.open("first.png"), Image.open("again.png")
    assert first.tobytes() == again.tobytes()
    assert first.info["noria"] == again.info["noria"]
    assert first.getextrema() != ((0, 0),) * 3
