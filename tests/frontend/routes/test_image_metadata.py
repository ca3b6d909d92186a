"""POST /v1/images/parameters: what a file says comes back as settings that draw it again, and what cannot be had is told."""

import base64
import contextlib
import io
import socket
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from noria.frontend.http import body as bodies
from noria.frontend.routes import image_metadata
from noria.frontend.routes.image_metadata import MAX_BYTES, MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import save_options

PATH = "/v1/images/parameters"
SAID = GenerationMetadata("a red circle", "blurry", 7, 32, 24, 20, 7.5, "euler", "tiny", "0123456789ab", "0.1.0")


def file_of(parameters, file_format="png"):
    file = io.BytesIO()
    Image.new("RGB", (32, 24)).save(file, format=file_format, **save_options(parameters, file_format))
    return file.getvalue()


def a1111_file(text):
    chunks = PngInfo()
    chunks.add_text("parameters", text)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format="png", pnginfo=chunks)
    return file.getvalue()


def png(*chunks):
    body = [(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)), *chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in body
    )


@pytest.mark.parametrize("file_format", ["png", "webp", "jpeg"])
def test_a_drawn_file_draws_itself_again(client, file_format):
    asked = {"prompt": "two stars, 星", "negative_prompt": "grey", "seed": 2**62 + 1, "width": 32, "height": 16,
             "inference_steps": 3, "guidance_scale": 2.5, "scheduler": "euler", "format": file_format}  # fmt: skip
    drawn = client.post("/t2i", json=asked)
    recalled = client.post(PATH, content=drawn.content, headers={"content-type": f"image/{file_format}"}).json()
    assert recalled["source"] == "noria"
    assert recalled["unusable"] == []
    assert recalled["settings"] == {name: asked[name] for name in asked if name != "format"} | {"model": "tiny"}
    again = client.post("/t2i", json=recalled["settings"] | {"format": file_format})
    assert again.content == drawn.content


def test_what_a_file_does_not_say_is_left_to_the_server(client):
    recalled = client.post(PATH, content=file_of(GenerationMetadata("a cat", model="tiny"))).json()
    assert recalled["settings"] == {"prompt": "a cat", "model": "tiny"}


def test_a1111s_words_are_translated_and_the_rest_is_told(client):
    text = "a cat\nNegative prompt: dog\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 5, Size: 64x48, Clip skip: 2"
    recalled = client.post(PATH, content=a1111_file(text)).json()
    assert recalled["source"] == "a1111"
    assert recalled["settings"] == {
        "prompt": "a cat", "negative_prompt": "dog", "seed": 5, "width": 64, "height": 48,
        "inference_steps": 20, "guidance_scale": 7.0, "scheduler": "euler", "model": "tiny",
    }  # fmt: skip
    assert recalled["other"] == {"Clip skip": "2"}


def test_what_cannot_be_had_here_is_told_with_the_words_of_its_refusal(client):
    text = "a cat\nSteps: 500, Sampler: DPM++ SDE, CFG scale: 7, Seed: 5, Size: 512x100, Model: dreams"
    recalled = client.post(PATH, content=a1111_file(text)).json()
    reasons = {each["field"]: each["reason"] for each in recalled["unusable"]}
    assert set(reasons) == {"model", "inference_steps", "scheduler", "width", "height"}
    assert "'tiny'" in reasons["model"]
    assert "allowed are 1 to 100" in reasons["inference_steps"]
    assert "Brownian" in reasons["scheduler"]
    assert "multiple of 8" in reasons["height"]
    assert recalled["settings"] == {"prompt": "a cat", "seed": 5, "guidance_scale": 7.0, "model": "tiny"}
    assert client.post("/t2i", json=recalled["settings"]).status_code == 200


def test_other_weights_of_the_same_name_are_told(client):
    recalled = client.post(PATH, content=file_of(msgspec.structs.replace(SAID, model_version="ffffffffffff"))).json()
    (told,) = recalled["unusable"]
    assert (told["field"], told["value"]) == ("model_version", "ffffffffffff")
    assert "'0123456789ab'" in told["reason"]


def test_a_prompt_that_is_too_long_here_is_told(client):
    recalled = client.post(PATH, content=file_of(msgspec.structs.replace(SAID, prompt="p" * 300))).json()
    assert recalled["settings"]["prompt"] == ""
    assert [each["field"] for each in recalled["unusable"]] == ["prompt"]


PIXELS = ((b"IDAT", zlib.compress(b"\0" * 4)), (b"IEND", b""))
BOMB = zlib.compress(b" " * 100_000_000)
HOSTILE = {
    "empty": b"",
    "no image": b"MZ" + b"\0" * 100,
    "json": b'{"prompt": "p"}',
    "another kind of image": base64.b64decode("R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="),
    "cut short": file_of(SAID)[:60],
    "no text": png(*PIXELS),
    "a text that unpacks to 100 MB": png((b"zTXt", b"noria\0\0" + BOMB)),
    "an international one": png((b"iTXt", b"noria\0\1\0\0\0" + BOMB)),
    "settings without end": png((b"tEXt", b"parameters\0" + b"a:," * 2**20), *PIXELS),
    "JSON without end": png((b"iTXt", b"noria\0\0\0\0\0" + b'{"prompt": "' + b"a" * 2**20 + b'"}'), *PIXELS),
    "a size that needs 16 GB": png((b"IHDR", struct.pack(">IIBBBBB", 65_000, 65_000, 8, 6, 0, 0, 0))),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_the_usual_shape(client, case):
    refusal = client.post(PATH, content=HOSTILE[case])
    assert refusal.status_code == 422
    error = refusal.json()["error"]
    assert error["code"] == "unreadable_image"
    assert error["message"].startswith("the file ")
    assert error["request_id"] == refusal.headers["x-request-id"]


def test_few_files_are_read_at_once(client, monkeypatch, until):
    reading, most, go = [], [], threading.Event()

    def slowly(*_):
        reading.append(1)
        most.append(len(reading))
        go.wait(60)
        reading.pop()
        return SAID

    monkeypatch.setattr(image_metadata, "read_parameters", slowly)
    with ThreadPoolExecutor(MAX_UPLOADS_PER_CLIENT) as pool:
        asked = [pool.submit(client.post, PATH, content=b"x") for _ in range(MAX_UPLOADS_PER_CLIENT)]
        until(lambda: len(reading) == 2)
        assert client.get("/healthz").status_code == 200
        go.set()
        assert [each.result().status_code for each in asked] == [200] * MAX_UPLOADS_PER_CLIENT
    assert max(most) == 2


GO_ON = "HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def upload(client, until):
    """Announces a file from an address, as curl does, and returns the connection and what the server says to it first."""
    host = client.base_url
    with contextlib.ExitStack() as stack:

        def begin(address, body=b""):
            begun = stack.enter_context(socket.create_connection((host.host, host.port), 60, (address, 0)))
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
            begun.sendall(head.encode() + body)
            said = begun.recv(4096)
            while not (said == GO_ON.encode() or said.endswith(b"}}")):
                said += begun.recv(4096)
            return begun, said.decode()

        yield begin
    until(lambda: client.post(PATH, content=b"x").status_code == 422)  # no place is left taken


def test_one_client_has_its_share_of_uploads_and_leaves_the_others(client, upload, until):
    begun = [upload("127.0.0.2") for _ in range(MAX_UPLOADS_PER_CLIENT)]
    assert {said for _, said in begun} == {GO_ON}
    _, refused = upload("127.0.0.2")
    assert refused.startswith("HTTP/1.1 429 ")
    assert "\r\nretry-after: 5\r\n" in refused.lower()
    assert f"the address 127.0.0.2 has {MAX_UPLOADS_PER_CLIENT} uploads to {PATH} already" in refused
    assert client.post(PATH, content=file_of(SAID)).status_code == 200
    begun[0][0].close()
    until(lambda: upload("127.0.0.2")[1] == GO_ON)


def test_only_so_many_uploads_are_held_by_all_together(upload):
    for number in range(MAX_UPLOADS):
        assert upload(f"127.0.0.{number // MAX_UPLOADS_PER_CLIENT + 2}")[1] == GO_ON
    _, refused = upload("127.0.0.100")
    assert refused.startswith("HTTP/1.1 429 ")
    assert f"{MAX_UPLOADS} uploads to {PATH} are under way already" in refused


def test_an_upload_that_does_not_go_on_gives_its_place_back(upload, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(bodies, "_TIMEOUT_S", 0.3)
        for begun, said in [upload("127.0.0.2", b"\x89PNG") for _ in range(MAX_UPLOADS_PER_CLIENT)]:
            refused = said.removeprefix(GO_ON) or begun.recv(4096).decode()  # it may have come with the first words
            assert refused.startswith("HTTP/1.1 400 ")
    assert upload("127.0.0.2")[1] == GO_ON


def test_who_is_refused_and_sends_the_file_all_the_same_is_told_and_may_ask_again(upload, client):
    for _ in range(MAX_UPLOADS_PER_CLIENT):
        assert upload("127.0.0.1")[1] == GO_ON
    for _ in range(3):
        refused = client.post(PATH, content=b"\0" * MAX_BYTES)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")


def test_a_file_that_is_being_read_holds_its_place(client, upload, monkeypatch, until):
    reading, go = [], threading.Event()
    monkeypatch.setattr(image_metadata, "read_parameters", lambda *_: (reading.append(1), go.wait(60), SAID)[-1])
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(client.post, PATH, content=b"x") for _ in range(2)]
        until(lambda: len(reading) == 2)
        said = [upload("127.0.0.1")[1] for _ in range(MAX_UPLOADS_PER_CLIENT - 1)]
        assert [words.startswith("HTTP/1.1 429") for words in said] == [False] * (MAX_UPLOADS_PER_CLIENT - 2) + [True]
        go.set()
        assert [each.result().status_code for each in asked] == [200, 200]


def test_a_file_beyond_the_bound_is_not_read(client):
    refusal = client.post(PATH, content=b"\0" * (MAX_BYTES + 1))
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (413, "body_too_large")


def test_nothing_can_be_said_before_a_model_is_known(folder):
    from starlette.testclient import TestClient

    from noria.config import Config
    from noria.frontend.app import build_app
    from noria.frontend.engines.pool import EnginePool

    with TestClient(build_app(Config(), EnginePool([f"ipc://{folder}/nobody"]))) as client:
        assert client.post(PATH, content=file_of(SAID)).status_code == 503
