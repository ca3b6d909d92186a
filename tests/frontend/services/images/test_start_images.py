"""Start images and masks of /t2i and of jobs; and hostile ones."""

import contextlib
import gc
import hashlib
import io
import json
import re
import socket
import sqlite3
import struct
import threading
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image

from frontends import served_client
from noria.config import Config, FrontendConfig, JobsConfig
from noria.errors import UnreadableImage
from noria.frontend.access.api_keys import generate_key
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.access.fair_threads import FairTurns
from noria.frontend.protocols.t2i.metadata import MAX_UPLOADS_PER_CLIENT
from noria.frontend.services.images import start_images
from noria.frontend.services.images.start_images import StartImages, decode_files
from noria.images.metadata_io import read_metadata
from noria.images.start_image import ImageFiles, RequestImages, StartImage
from uploads import b64, file_of, left_half, photo
from waiting import wait_until

SIZE = (64, 48)


def png(width, height, rows=b"", colour_type=2, *chunks):
    head = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


PHOTO = file_of(photo())
MASK = file_of(left_half())


def t2i(client, file=PHOTO, **fields):
    return client.post("/t2i", json={"prompt": "p", "image": b64(file), "seed": 5} | fields)


def pixels_of(response):
    return np.asarray(Image.open(io.BytesIO(response.content)).convert("RGB"))


def test_the_engine_gets_the_pixels_beside_the_request(client, engine):
    response = t2i(client)
    assert response.status_code == 200
    (request,), (data,) = engine.submitted, engine.data
    assert (request.payload.strength, request.payload.has_mask) == (0.8, False)
    assert (request.payload.width, request.payload.height) == SIZE
    assert data == photo().tobytes()


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_with_a_mask_only_white_is_repainted(client, engine, prefix):
    response = t2i(client, PHOTO, mask=prefix + b64(MASK), strength=0.5)
    (request,), (data,) = engine.submitted, engine.data
    assert (request.payload.strength, request.payload.has_mask) == (0.5, True)
    assert data == photo().tobytes() + left_half().tobytes()
    repainted = pixels_of(response)
    assert (repainted[:, :32] == engine.colour(5)).all()
    assert (repainted[:, 32:] == np.asarray(photo())[:, 32:]).all()


def test_a_mask_is_divided_at_half(client, engine):
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    t2i(client, file_of(photo((16, 16))), mask=b64(file_of(grey)))
    mask = np.frombuffer(engine.data[0][16 * 16 * 3 :], np.uint8)
    assert (mask == np.where(np.arange(256) >= 128, 255, 0)).all()


@pytest.mark.parametrize(
    ("size", "fields", "expected"),
    [
        ((40, 24), {}, (40, 24)),
        ((47, 30), {}, (40, 24)),  # rounded down
        ((47, 30), {"width": 48}, (48, 24)),
        ((400, 200), {}, (128, 64)),  # smaller, with its proportions
        ((8, 4), {}, (32, 16)),
        ((2000, 10), {}, (128, 16)),
        ((40, 24), {"width": 64, "height": 32}, (64, 32)),
    ],
)
def test_the_default_size_is_the_images(client, engine, size, fields, expected):
    assert t2i(client, file_of(photo(size)), **fields).status_code == 200
    (request,) = engine.submitted
    assert (request.payload.width, request.payload.height) == expected
    assert engine.data[0] == photo(size).resize(expected, Image.Resampling.LANCZOS).tobytes()


def test_what_is_transparent_becomes_white_and_orientation_is_applied(client, engine):
    transparent = photo().convert("RGBA")
    transparent.putalpha(left_half())
    t2i(client, file_of(transparent))
    data = np.frombuffer(engine.data[0], np.uint8).reshape(48, 64, 3)
    assert (data[:, :32] == np.asarray(photo())[:, :32]).all()
    assert (data[:, 32:] == 255).all()
    exif = Image.Exif()
    exif[0x0112] = 6
    t2i(client, file_of(photo(), exif=exif))
    assert (engine.submitted[1].payload.width, engine.submitted[1].payload.height) == (48, 64)
    assert engine.data[1] == photo().transpose(Image.Transpose.ROTATE_270).tobytes()


def test_files_name_the_images_they_were_made_from(client):
    response = t2i(client, mask=b64(MASK), strength=0.6)
    metadata = read_metadata(io.BytesIO(response.content))
    digests = tuple(hashlib.sha256(file).hexdigest()[:12] for file in (PHOTO, MASK))
    assert (metadata.strength, metadata.image_digest, metadata.mask_digest) == (0.6, *digests)
    assert "Denoising strength: 0.6" in Image.open(io.BytesIO(response.content)).text["parameters"]
    recovered = client.post("/v1/images/metadata", content=response.content).json()
    assert [(each["field"], each["value"]) for each in recovered["rejected"]] == [
        ("image", digests[0]),
        ("mask", digests[1]),
    ]
    assert "with strength 0.6" in recovered["rejected"][0]["reason"]
    assert client.post("/t2i", json=recovered["settings"]).status_code == 200


# ── What is rejected ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"strength": 0}, "strength", "allowed are 0.01 to 1.0"),
        ({"strength": "0.5"}, "strength", "a number"),
        ({"strength": 0.2, "inference_steps": 4}, "strength", "leaves none of 4 inference_steps; allowed are 0.25"),
        ({"image": None, "strength": 0.5}, "strength", "there is no image"),
        ({"image": None, "mask": b64(MASK)}, "mask", "mask is there without image; send both."),
        (
            {"mask": b64(file_of(left_half((32, 48))))},
            "mask",
            "32 × 48 pixels; it must have those of the image, 64 × 48",
        ),
        ({"width": 20}, "width", "multiple of 8"),
        ({"image": 5}, "image", "a string"),
    ],
)
def test_values_that_are_not_allowed(client, engine, fields, param, says):
    response = t2i(client, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_field", param)
    assert says in error["message"]
    assert engine.submitted == []


def jpeg_with(*segments):
    file = file_of(photo(), "jpeg")
    return (
        file[:2]
        + b"".join(b"\xff" + kind + struct.pack(">H", len(data) + 2) + data for kind, data in segments)
        + file[2:]
    )


ANIMATION = [photo(seed=seed) for seed in range(2)]
JPEG = file_of(photo(), "jpeg", progressive=True)
SCAN = JPEG[JPEG.index(b"\xff\xda") : JPEG.index(b"\xff\xda") + 20]
HOSTILE = {
    "no image": (b"MZ" + b"\0" * 100, "no PNG, WebP or JPEG"),
    "empty": (b"", "no PNG, WebP or JPEG: it is empty."),
    "a GIF": (file_of(photo(), "gif"), "no PNG, WebP or JPEG: it is GIF."),
    "a phone's HEIC": (b"\0\0\0\x18ftypheic" + b"\0" * 100, "no PNG, WebP or JPEG: it is HEIC."),
    "an AVIF": (b"\0\0\0\x1cftypavif" + b"\0" * 100, "no PNG, WebP or JPEG: it is AVIF."),
    "an error page": (b"<!doctype html><html>", "no PNG, WebP or JPEG: it is HTML, XML or SVG."),
    "PNG cut short": (PHOTO[:-200], "truncated"),
    "PNG without pixels": (png(64, 48), "damaged"),
    "PNG with a wrong checksum": (PHOTO.replace(b"IDAT", b"IDAT\0", 1)[:-1], "damaged"),
    "a size of zero": (png(0, 48), "0 × 48"),
    "16 megapixels in a row": (png(16_000_000, 1), "16383 pixels a side"),
    "16 megapixels in a column": (png(1, 16_000_000), "16383 pixels a side"),
    "40 megapixels": (png(8000, 5000), "8000 × 5000 pixels; at most 16 megapixels"),
    "a size that needs 16 GB": (png(65_000, 65_000), "at most 16 megapixels"),
    "40 megapixels that exist": (file_of(Image.new("1", (8000, 5000))), "at most 16 megapixels"),
    "animated PNG": (file_of(ANIMATION[0], "png", save_all=True, append_images=ANIMATION[1:]), "animated"),
    "animated WebP": (file_of(ANIMATION[0], "webp", save_all=True, append_images=ANIMATION[1:]), "animated"),
    "WebP cut short": (file_of(photo(), "webp")[:-300], "damaged"),
    "WebP that claims 268 megapixels": (
        b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0" + b"\0" * 14, "16384 × 16384"),
    "JPEG cut short": (JPEG[:-200], "damaged"),
    "JPEG without end": (JPEG[:40], "damaged"),
    "JPEG with too many segments": (jpeg_with(*[(b"\xe5", b"")] * 2000), "more than 1000"),
    "JPEG with too many segments between its scans": (
        JPEG[:-2] + b"\xff\xfe\0\2" * 1000 + JPEG[-2:], "more than 1000"),
    "JPEG with a marker at its end": (JPEG[:-2] + b"\xff\xda", "truncated"),
    "JPEG with too many scans": (JPEG[:-2] + SCAN * 200 + JPEG[-2:], "more than 100 scans"),
    "PNG with too many chunks": (png(64, 48, b"", 2, *[(b"tEXt", b"")] * 21_000), "more than 20000"),
}  # fmt: skip


MP4 = b"MotionPhoto_Data" + SCAN * 150 + b"\xff\xd9" + bytes(range(256)) * 40
BEHIND = {
    "a phone's moving photo": MP4,
    "Samsung's trailer": MP4 + b"\0\0\x31\x0aSEFT",
    "a second image, as in MPO files": JPEG * 3,
    "a gain map and its PNG": JPEG + PHOTO + b"\xff\xda" * 500,
    "zeros": bytes(100_000),
    "one byte": b"\xff",
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("kind", ["jpeg", "progressive", "restarts", "png", "webp"])
def test_what_stands_behind_an_image_is_neither_decoded_nor_counted(client, engine, kind, behind):
    """It could be a video, in which the bytes of a JPEG's markers occur by chance."""
    options = {"progressive": {"progressive": True}, "restarts": {"restart_marker_blocks": 1}}.get(kind, {})
    image = file_of(photo(), kind if kind in ("png", "webp") else "jpeg", **options)
    file = image + BEHIND[behind]
    assert t2i(client, file).status_code == 200
    assert engine.data == [Image.open(io.BytesIO(image)).convert("RGB").tobytes()]
    assert len(StartImage(ImageFiles(file))._image._chunks.content) <= len(image)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_rejected(client, engine, case):
    file, says = HOSTILE[case]
    for response in (t2i(client, file), t2i(client, mask=b64(file))):
        assert response.status_code == 422
        error = response.json()["error"]
        assert error["code"] == "unreadable_image"
        assert says in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(
    "head",
    [
        "DATA:IMAGE/PNG;BASE64,", "data:;base64,", "data:image/png;charset=utf-8;base64,", "Data:image/x-png;Base64,",
        " data:image/png;name=a.png;base64, ", "data: image/png; base64 ,", "data:application/octet-stream;base64,",
    ],
)  # fmt: skip
def test_data_urls_of_any_form_are_read(client, engine, head):
    text = b64(PHOTO)
    for each in (text, text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D") + "%0d%0A%20"):
        assert client.post("/t2i", json={"prompt": "p", "image": head + each}).status_code == 200
    assert engine.data[0] == engine.data[1]


@pytest.mark.parametrize(
    "location",
    [
        "https://example.com/a.png", "HTTP://example.com/a", "file:///tmp/a.png", "s3://bucket/key", "/tmp/a.png",
        "blob:https://a.example/1", "/tmp/image", "./a.jpg", "~/a", "C:\\a.png", "c:/a", "photo.webp",
        "folder/my photo.JPEG", " ~/a\n",
        " https://example.com/" + "a" * 600,
    ],
)  # fmt: skip
def test_a_url_or_a_path_is_said_not_to_be_fetched(client, engine, location):
    response = client.post("/t2i", json={"prompt": "p", "image": location})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "image")
    assert "is not fetched" in response.json()["error"]["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(
    "text",
    [
        "$$$", "abc", "data:image/png,abc", "data:", "é", "https://example.com/a.png", "QUI%3D", " " * 700 + "a.png",
        "data:;base64,%41", "data:;base64,QUJD%", "data:;base64,QUJD%2", "data:;base64,QUJD%252B",
    ],
)  # fmt: skip
def test_texts_that_are_no_base64_are_rejected(client, engine, text):
    response = client.post("/t2i", json={"prompt": "p", "image": text})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "image")
    assert engine.submitted == []


DAMAGED = b64(b"damaged")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/t2i", {"image": DAMAGED, "width": 33}, ["width is 33"]),
        (
            "/t2i",
            {"image": DAMAGED, "strength": 2, "seed": "x", "n": 9, "negative_prompt": "x" * 201},
            ["seed is 'x'", "strength is 2.0", "n is 9", "negative_prompt has 201 characters"],
        ),
        ("/t2i", {"image": DAMAGED, "model": "none", "seed": "x"}, ["seed is 'x'", "model 'none' is not served"]),
        ("/t2i", {"mask": DAMAGED, "width": 33}, ["mask is there without image", "width is 33"]),
        ("/t2i", {"image": 5, "strength": 0.5, "mask": DAMAGED}, ["image is 5"]),
        (
            "/t2i",
            {"controls": [{"name": "a", "image": DAMAGED, "scale": 9}], "reference_images": [DAMAGED], "width": 33},
            ["controls[0].scale is 9", "width is 33"],
        ),
        (
            "/sdapi/v1/img2img",
            {"init_images": [], "tiling": True, "steps": 9999,
             "alwayson_scripts": {"controlnet": {"args": [{"image": DAMAGED, "model": "a", "weight": "x"}]}}},
            ["tiling is true", "args[0].weight is 'x'", "init_images has 0 images", "steps is 9999"],
        ),
        (
            "/sdapi/v1/txt2img",
            {"tiling": True, "steps": 9999, "alwayson_scripts": {"controlnet": {"args": 7}}},
            ["tiling is true", "controlnet.args is 7", "steps is 9999"],
        ),
        (
            "/sdapi/v1/img2img",
            {"init_images": [DAMAGED], "denoising_strength": 3, "override_settings": {"sd_model_checkpoint": "no"},
             "cfg_scale": "x"},
            ["cfg_scale is 'x'", "sd_model_checkpoint 'no' is not served"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_besides_images_is_said_at_once_and_none_is_read(client, engine, monkeypatch, path, body, says):
    opened = []
    monkeypatch.setattr(StartImages, "_open", lambda _, load: opened.append(load()))
    answer = client.post(path, json={"prompt": "p"} | body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert [each for each in says if each not in message] == []
    assert opened == engine.submitted == []


def test_long_files_are_decoded_in_pieces_as_at_once(monkeypatch):
    monkeypatch.setattr(start_images, "_PIECE_CHARS", 64)
    content = bytes(range(256)) * 2
    for num_bytes in range(40, 110):
        text = b64(content[:num_bytes])
        with_lines = "\r\n".join(text[k : k + 19] for k in range(0, len(text), 19))
        for each in (text, with_lines):
            assert decode_files(each, None).image == content[:num_bytes]
        bare = text.rstrip("=")
        for each in (bare, f"{bare}=", text.replace("+", "-").replace("/", "_"), f" \t{text}\n", "\v".join(text)):
            assert decode_files(each, None).image == content[:num_bytes]
        after_padding = [f"{text}QUJD"] if text[-1] == "=" else []
        for damaged in (text[: 4 * (len(text) // 4) - 3], f"{text[:50]}*{text[51:]}", *after_padding):
            with pytest.raises(UnreadableImage, match="is not base64"):
                decode_files(damaged, None)
        escaped = "".join(f"%{ord(each):02x}" if each in "+/=" else each for each in with_lines)
        assert decode_files(f"data:;base64,{escaped}", None).image == content[:num_bytes]
    with pytest.raises(UnreadableImage, match="is not base64"):
        decode_files(b64(content[:46]) + b64(content[:46]), None)  # the first ends with a piece


@pytest.mark.parametrize(
    "text",
    [" " * 4_000_000 + "!", "." + " " * 4_000_000 + "!", "data:;base64," + "%41" * 2_000_000],
    ids=["spaces", "spaces of a path", "escapes"],
)
def test_long_texts_that_are_no_base64_are_rejected_soon(text):
    started = time.process_time()
    with pytest.raises(UnreadableImage):
        decode_files(text, None)
    assert time.process_time() - started < 2


def traced_bytes(call):
    """Return the result of `call`, the most bytes that Python's objects took in it, and those that they take later."""
    gc.collect()
    tracemalloc.start()
    try:
        result = call()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return result, peak, kept


def test_metadata_of_a_start_image_reach_no_decoder(client, engine):
    """Each of 2000 entries of this EXIF has the same 60 kB: Pillow would copy them all, 120 MB."""
    entries = b"".join(struct.pack("<HHII", 40_000 + tag, 7, 60_000, 8) for tag in range(2000))
    exif = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 2000) + entries
    file = jpeg_with((b"\xe1", b"Exif\0\0" + exif.ljust(65_000, b"\0")))
    assert t2i(client, file).status_code == 200
    assert engine.data == [Image.open(io.BytesIO(file_of(photo(), "jpeg"))).convert("RGB").tobytes()]
    pixels, peak, _ = traced_bytes(lambda: StartImage(ImageFiles(file)).pixels(*SIZE))
    assert pixels == engine.data[0]
    assert peak < 1_000_000


def test_a_start_image_keeps_no_metadata_of_its_files():
    text = (b"tEXt", b"prompt\0" + b"x" * 3_000_000)
    image, _, kept = traced_bytes(lambda: StartImage(ImageFiles(png(64, 48, b"", 2, text), png(64, 48, b"", 2, text))))
    assert image.facts.width_px == 64
    assert kept < 100_000


def test_an_upload_that_is_decoded_holds_its_file_and_neither_its_body_nor_base64(client, engine, monkeypatch):
    file = file_of(photo((1500, 1000)))  # noise: as long as its pixels
    json = b'{"prompt": "p", "width": 64, "height": 64, "image": "%s"}' % b64(file).encode()
    boundary, name = b"\r\n--b", b'\r\nContent-Disposition: form-data; name="%s"'
    form = boundary[2:] + name % b"prompt" + b"\r\n\r\np" + boundary + name % b'image"; filename="a'
    form += b"\r\n\r\n" + file + boundary + b"--"
    held = []

    def pixels(*_):
        # The thread that has decoded base64 lets go of it a moment later.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: tracemalloc.get_traced_memory()[0] < 1.5 * len(file), 10)
        held.append(tracemalloc.get_traced_memory()[0])
        return bytes(64 * 64 * 3)

    monkeypatch.setattr(StartImage, "pixels", pixels)
    for path, content, media_type in (
        ("/t2i", json, "application/json"),
        ("/v1/images/edits", form, 'multipart/form-data; boundary="b"'),
    ):
        headers = {"content-type": media_type}
        response, _, _ = traced_bytes(lambda: client.post(path, content=content, headers=headers))  # noqa: B023
        assert response.status_code in (200, 400), response.text  # an engine is given too few pixels for edits
    assert max(held) < 1.5 * len(file)


def test_a_client_over_its_quota_is_rejected_before_its_image_is_read(new_engine, tmp_path):
    token, table = generate_key("alice")
    keys = tmp_path / "keys.toml"
    keys.write_text(f"{table}images_per_minute = 1\n")
    config = Config(data_dir=str(tmp_path / "data"), frontend=FrontendConfig(api_keys_file=str(keys)))
    headers = {"authorization": f"Bearer {token}"}
    with served_client(config, new_engine(), headers=headers) as client:
        assert t2i(client, b"damaged").status_code == 422
        assert t2i(client).status_code == 200
        assert t2i(client, b"damaged").status_code == 429
        assert client.post("/v1/jobs", json={"input": {"prompt": "p", "image": "damaged"}}).status_code == 429


def test_requests_of_a_key_at_the_same_time_count_before_images_are_read(serve, new_engine, tmp_path, monkeypatch):
    opened, go = [], threading.Event()
    open_files = StartImages._open
    monkeypatch.setattr(
        StartImages, "_open", lambda self, load: (opened.append(1), go.wait(30), open_files(self, load))[-1]
    )
    token, table = generate_key("alice")
    keys = tmp_path / "keys.toml"
    keys.write_text(f"{table}max_images_in_flight = 2\n")
    config = Config(data_dir=str(tmp_path / "data"), frontend=FrontendConfig(api_keys_file=str(keys)))
    headers = {"authorization": f"Bearer {token}"}
    with (
        serve(config, new_engine()) as (url, _),
        httpx.Client(base_url=url, verify=False, headers=headers) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        wait_until(lambda: client.get("/readyz").status_code == 200)
        sent = [pool.submit(t2i, client) for _ in range(8)]
        wait_until(lambda: sum(each.done() for each in sent) == 6)
        go.set()
        assert sorted(each.result().status_code for each in sent) == [200, 200, *[429] * 6]
        assert len(opened) == 2
        assert t2i(client, n=2).status_code == 200


def test_pixels_are_not_decoded_after_the_deadline(client, engine, monkeypatch):
    read = RequestImages.__init__
    monkeypatch.setattr(RequestImages, "__init__", lambda self, files: (time.sleep(0.05), read(self, files))[1])
    monkeypatch.setattr(RequestImages, "pixels", lambda *_: pytest.fail("pixels were decoded"))
    answer = t2i(client, deadline_ms=20)
    assert answer.status_code == 504
    assert re.search(r"the deadline, 20 ms after the request, passed after \d+ ms of", answer.text), answer.text
    assert engine.submitted == []


def test_a_client_that_disconnects_gives_up_its_turn(client, engine, monkeypatch):
    opened, asked, removed, go = [], [], [], threading.Event()
    open_files, acquire, remove = StartImages._open, FairTurns.acquire, FairTurns._remove
    monkeypatch.setattr(
        StartImages, "_open", lambda self, load: (opened.append(1), go.wait(30), open_files(self, load))[-1]
    )
    monkeypatch.setattr(FairTurns, "acquire", lambda self, who: asked.append(who) or acquire(self, who))
    monkeypatch.setattr(FairTurns, "_remove", lambda self, *turn: removed.append(turn) or remove(self, *turn))
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(t2i, client) for _ in range(2)]
        wait_until(lambda: len(opened) == 2)
        body = json.dumps({"prompt": "p", "image": b64(PHOTO)})
        with socket.create_connection((client.base_url.host, client.base_url.port)) as leaving:
            head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            leaving.sendall(f"POST /t2i HTTP/1.1\r\n{head}{body}".encode())
            wait_until(lambda: len(asked) == 3)
        wait_until(lambda: removed)
        go.set()
        assert [each.result().status_code for each in busy] == [200, 200]
    assert t2i(client).status_code == 200
    assert len(opened) == 3


def test_files_that_are_too_large_are_rejected(new_engine):
    config = Config(frontend=FrontendConfig(max_body_bytes=4096, max_image_bytes=20_000))
    large = file_of(photo((100, 60)))  # 18 kB
    with served_client(config, new_engine()) as client:
        assert t2i(client, large).status_code == 200
        for fields in ({"mask": b64(large)}, {"image": b64(bytes(30_000))}):
            response = t2i(client, large, **fields)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        # Image and mask are short enough as a body, and too long as files.
        form = {"image": ("a.png", large), "mask": ("b.png", large[:4000])}
        response = client.post("/v1/images/edits", files=form, data={"prompt": "p"})
        assert response.status_code == 413
        assert "frontend.max_image_bytes" in response.json()["error"]["message"]
        assert client.post("/t2i", json={"prompt": "p" * 5000}).status_code == 413
        long_beside_it = t2i(client, file_of(photo((4, 4))), prompt="p" * 5000)
        assert (long_beside_it.status_code, long_beside_it.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_with_an_image_has_few_other_values(new_engine):
    """Millions of empty lists take a hundred times their bytes when they are decoded."""
    with served_client(Config(), new_engine()) as client:
        many = b'{"prompt": "p", "image": "eA==", "input": {"image": "eA==", "a": [%s[]]}}' % (b"[]," * 1_000_000)
        for path in ("/t2i", "/v1/jobs", "/sdapi/v1/img2img"):
            response = client.post(path, content=many, headers={"content-type": "application/json"})
            assert response.status_code == 413, response.text
            assert "at most 10000 are allowed" in response.text


def test_large_bodies_count_as_uploads(new_engine, monkeypatch):
    held, hold = [], ConcurrencyLimiter.hold

    def noted(limiter, client):
        if limiter._resource_name == "uploads of image files":
            held.append(client)
        return hold(limiter, client)

    monkeypatch.setattr(ConcurrencyLimiter, "hold", noted)
    config = Config(frontend=FrontendConfig(max_body_bytes=1024))
    with served_client(config, new_engine()) as client:
        assert t2i(client).status_code == 200

        def endless():
            yield b'{"prompt": "' + b"p" * 2000
            wait_until(lambda: done)
            yield b'"}'

        done = []
        held.clear()
        headers = {"content-type": "application/json"}
        with ThreadPoolExecutor(MAX_UPLOADS_PER_CLIENT) as pool:
            responses = [
                pool.submit(
                    httpx.post, f"{client.base_url}/t2i", content=endless(), headers=headers, verify=False, timeout=60
                )
                for _ in range(MAX_UPLOADS_PER_CLIENT)
            ]
            wait_until(lambda: len(held) == MAX_UPLOADS_PER_CLIENT)
            assert "uploads of image files" in t2i(client).json()["error"]["message"]
            done.append(1)
            assert {each.result().status_code for each in responses} == {413}  # they have no image
        assert t2i(client).status_code == 200


# ── Jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ended(client, job_id):
    wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["completed_at"])
    return client.get(f"/v1/jobs/{job_id}").json()


def test_a_job_with_an_image_survives_a_restart(serve, new_engine, tmp_path):
    config = Config(data_dir=str(tmp_path))
    body = {"input": {"prompt": "p", "seed": 5, "image": b64(PHOTO), "mask": b64(MASK), "strength": 0.5}}
    headers = {"idempotency-key": "one"}
    engine = new_engine()
    with served_client(config, engine) as client:
        engine.never_answers = True
        job = client.post("/v1/jobs", json=body, headers=headers)
        assert job.status_code == 202
        digests = [hashlib.sha256(file).hexdigest()[:12] for file in (PHOTO, MASK)]
        assert [job.json()["input"][name] for name in ("image", "mask")] == [f"sha256:{each}" for each in digests]
        assert client.post("/v1/jobs", json=body, headers=headers).json()["id"] == job.json()["id"]
        wait_until(lambda: engine.submitted)
    engine = new_engine()
    with serve(config, engine) as (url, _), httpx.Client(base_url=url, verify=False) as client:
        assert ended(client, job.json()["id"])["status"] == "succeeded"
        file = client.get(f"/v1/jobs/{job.json()['id']}/images/0")
        repainted = pixels_of(file)
        assert (repainted[:, :32] == engine.colour(5)).all()
        assert (repainted[:, 32:] == np.asarray(photo())[:, 32:]).all()
        assert read_metadata(io.BytesIO(file.content)).image_digest == digests[0]
    assert engine.data == [photo().tobytes() + left_half().tobytes()]
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM noria_job_texts").fetchone() == (0,)
        (stored,) = database.execute("SELECT image_bytes FROM noria_jobs").fetchone()
        assert stored > 10_000


def test_images_of_jobs_are_limited_together(new_engine, tmp_path):
    config = Config(data_dir=str(tmp_path), jobs=JobsConfig(max_queued_bytes=20_000))
    engine = new_engine()
    body = {"input": {"prompt": "p", "image": b64(PHOTO)}}  # 12 kB as it is stored
    with served_client(config, engine) as client:
        engine.never_answers = True
        first = client.post("/v1/jobs", json=body)
        full = client.post("/v1/jobs", json=body)
        assert (first.status_code, full.status_code, full.json()["error"]["code"]) == (202, 429, "queue_full")
        assert client.post("/v1/jobs", json={"input": {"prompt": "p"}}).status_code == 202
        client.delete(f"/v1/jobs/{first.json()['id']}")
        assert client.post("/v1/jobs", json=body).status_code == 202


def test_jobs_with_files_that_cannot_be_used_are_rejected(client, engine):
    response = client.post("/v1/jobs", json={"input": {"prompt": "p", "image": b64(PHOTO[:-200])}})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "unreadable_image")
    strength = client.post("/v1/jobs", json={"input": {"prompt": "p", "strength": 0.5}}).json()
    assert strength["error"]["param"] == "input.strength"
    assert client.post("/v1/jobs", json={"input": {"prompt": "p" * 5000}}).status_code == 413


# ── Retries and shadows ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_retry_has_the_same_pixels(client, engine):
    engine.num_crashes_left = 1
    assert t2i(client).status_code == 200
    assert engine.data == [photo().tobytes()] * 2
