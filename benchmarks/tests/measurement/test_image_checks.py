"""Replies that are found to be incorrect."""

import base64
import io
import itertools
import json
import math
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from noria.config import EngineConfig
from noria.models.catalog import open_model
from noria_bench.load.workload import uniform
from noria_bench.measurement.image_checks import MIN_PSNR_DB, SoloGenerator, check_replies, check_reply, psnr_db

RED = np.full((8, 8, 3), (200, 10, 10), dtype=np.uint8)
HUGE = b"\x89PNG\r\n\x1a\n" + b"".join(  # a header that says 100,000 x 100,000 pixels
    struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for kind, data in ((b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)), (b"IDAT", b""))
)
RNG = np.random.default_rng(1)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def check_content(tmp_path, content, expected, name="7.image"):
    (tmp_path / name).write_bytes(content)
    return check_reply(7, tmp_path / name, expected)


def test_the_psnr_of_noise_follows_from_its_variance():
    grey = np.full((64, 64, 3), 128, dtype=np.uint8)
    assert psnr_db(grey, grey) == math.inf
    assert psnr_db(grey, grey + np.uint8(10)) == pytest.approx(20 * math.log10(255 / 10))


def test_an_identical_image_is_correct_and_rounding_is_tolerated(tmp_path):
    found = check_content(tmp_path, png(RED), [RED])
    assert (found.psnr_db, found.problem) == (None, "")
    rounded = check_content(tmp_path, png(RED + RNG.integers(0, 2, RED.shape, dtype=np.uint8)), [RED])
    assert rounded.problem == ""
    assert rounded.psnr_db > 48.0  # every channel off by one at most


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (png(RED[::-1] // 2), "is another image: .* dB"),
        (png(RED)[:-30], "cannot be decoded"),
        (b"", "cannot be decoded"),
        (HUGE, "cannot be decoded"),
        (png(RED[:4]), "is 8 × 4 instead of 8 × 8 pixels"),
    ],
)
def test_a_wrong_image_has_its_problem_named(tmp_path, content, words):
    assert re.search(words, check_content(tmp_path, content, [RED]).problem)


def test_every_image_of_several_is_checked(tmp_path):
    def document(*files):
        return json.dumps({"images": [{"b64_json": base64.b64encode(file).decode()} for file in files]}).encode()

    blue = RED[:, :, ::-1]
    assert check_content(tmp_path, document(png(RED), png(blue)), [RED, blue], "7.json").problem == ""
    assert "another image" in check_content(tmp_path, document(png(RED), png(RED)), [RED, blue], "7.json").problem
    assert "1 images instead of 2" in check_content(tmp_path, document(png(RED)), [RED, blue], "7.json").problem
    for malformed in (b'{"detail": "no"}', b'{"images": [', b"<html>", b'{"images": [{"b64_json": "!"}]}'):
        assert "cannot be decoded" in check_content(tmp_path, malformed, [RED], "7.json").problem


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' schedulers, newest NumPy
def test_another_seed_or_prompt_is_another_image():
    """The threshold's reason, on the bundled model."""
    runs = SoloGenerator(open_model("bundled"), EngineConfig(threads=1))
    body, next_body = (template.body for template in itertools.islice(uniform(open_model("bundled")).templates(1), 2))
    image = runs.generate(body)[0]
    for other in (body | {"seed": body["seed"] + 1}, body | {"prompt": next_body["prompt"]}):
        assert psnr_db(image, runs.generate(other)[0]) < MIN_PSNR_DB - 5


def test_each_reply_is_compared_with_its_own_body(tmp_path):
    colours = [RED, RED[:, :, ::-1]]
    for number, pixels in enumerate(colours):
        (tmp_path / f"{number}.image").write_bytes(png(pixels))
    found = check_replies(tmp_path, lambda number: {"number": number}, lambda body: [colours[body["number"]]])
    assert [(check.number, check.problem) for check in found] == [(0, ""), (1, "")]


def test_of_many_replies_a_few_at_even_distances_are_checked(tmp_path):
    for number in range(0, 90, 9):
        (tmp_path / f"{number}.image").write_bytes(png(RED))
    found = check_replies(tmp_path, lambda number: {}, lambda body: [RED], max_replies=4)
    assert [check.number for check in found] == [0, 27, 54, 81]
