"""POST /v1/images/metadata: returns a file's settings, and rejects those that this server does not support."""

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

from noria.frontend.protocols.t2i import metadata as route
from noria.frontend.protocols.t2i.metadata import MAX_BYTES, MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import save_options
from waiting import wait_until

PATH = "/v1/images/metadata"
METADATA = GenerationMetadata("a red circle", "blurry", 7, 32, 24, 20, 7.5, "euler", "tiny", "0123456789ab", "0.1.0")


def file_of(metadata, file_format="png"):
    file = io.BytesIO()
    Image.new("RGB", (32, 24)).save(file, format=file_format, **save_options(metadata, file_format))
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
def test_generated_file_gives_settings_that_generate_it_again(client, file_format):
    asked = {"prompt": "two stars, 星", "negative_prompt": "grey", "seed": 2**62 + 1, "width": 32, "height": 16,
             "inference_steps": 13, "calls": 0.5, "guidance_scale": 2.5, "scheduler": "euler",
             "format": file_format}  # fmt: skip
    generated = client.post("/t2i", json=asked)
    recovered = client.post(PATH, content=generated.content, headers={"content-type": f"image/{file_format}"}).json()
    assert recovered["source"] == "noria"
    assert recovered["rejected"] == []
    assert recovered["settings"] == {name: asked[name] for name in asked if name != "format"} | {"model": "tiny"}
    assert 'denoise;desc="7 of 13 calls";dur=' in generated.headers["server-timing"]
    again = client.post("/t2i", json=recovered["settings"] | {"format": file_format})
    assert again.content == generated.content


def test_missing_settings_are_left_to_the_server(client):
    recovered = client.post(PATH, content=file_of(GenerationMetadata("a cat", model="tiny"))).json()
    assert recovered["settings"] == {"prompt": "a cat", "model": "tiny"}


def test_a1111_settings_are_translated_and_unknown_ones_returned(client):
    text = "a cat\nNegative prompt: dog\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 5, Size: 64x48, Eta: 0.5"
    recovered = client.post(PATH, content=a1111_file(text)).json()
    assert recovered["source"] == "a1111"
    assert recovered["settings"] == {
        "prompt": "a cat", "negative_prompt": "dog", "seed": 5, "width": 64, "height": 48,
        "inference_steps": 20, "guidance_scale": 7.0, "scheduler": "euler", "model": "tiny",
    }  # fmt: skip
    assert recovered["other"] == {"Eta": "0.5"}


def test_unsupported_settings_are_returned_with_the_error_they_would_get(client):
    text = "a cat\nSteps: 500, Sampler: DPM++ SDE, CFG scale: 7, Seed: 5, Size: 512x100, Model: dreams"
    recovered = client.post(PATH, content=a1111_file(text)).json()
    reasons = {each["field"]: each["reason"] for each in recovered["rejected"]}
    assert set(reasons) == {"model", "inference_steps", "scheduler", "width", "height"}
    assert "'tiny'" in reasons["model"]
    assert "allowed are 1 to 100" in reasons["inference_steps"]
    assert "Brownian" in reasons["scheduler"]
    assert "multiple of 8" in reasons["height"]
    assert recovered["settings"] == {"prompt": "a cat", "seed": 5, "guidance_scale": 7.0, "model": "tiny"}
    assert client.post("/t2i", json=recovered["settings"]).status_code == 200


def test_other_weights_of_the_same_name_are_reported(client):
    recovered = client.post(
        PATH, content=file_of(msgspec.structs.replace(METADATA, model_version="ffffffffffff"))
    ).json()
    (rejected,) = recovered["rejected"]
    assert (rejected["field"], rejected["value"]) == ("model_version", "ffffffffffff")
    assert "'0123456789ab'" in rejected["reason"]


def test_malicious_files_are_rejected_with_the_usual_error_body(client):  # tests/images has others
    response = client.post(PATH, content=b"MZ" + b"\0" * 100)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["code"] == "unreadable_image"
    assert error["message"].startswith("the file ")
    assert error["request_id"] == response.headers["x-request-id"]


def test_number_of_concurrent_reads_is_limited(client, monkeypatch):
    reading, num_reading, proceed = [], [], threading.Event()

    def read_slowly(*_):
        reading.append(1)
        num_reading.append(len(reading))
        proceed.wait(60)
        reading.pop()
        return METADATA

    monkeypatch.setattr(route, "read_metadata", read_slowly)
    with ThreadPoolExecutor(MAX_UPLOADS_PER_CLIENT) as pool:
        responses = [pool.submit(client.post, PATH, content=b"x") for _ in range(MAX_UPLOADS_PER_CLIENT)]
        wait_until(lambda: len(reading) == 2)
        assert client.get("/healthz").status_code == 200
        proceed.set()
        assert [each.result().status_code for each in responses] == [200] * MAX_UPLOADS_PER_CLIENT
    assert max(num_reading) == 2


CONTINUE = "HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def upload(client):
    """Announce a file from an address, as curl does; returns the connection and the first response."""
    host = client.base_url
    with contextlib.ExitStack() as stack:

        def start(address, body=b""):
            connection = stack.enter_context(socket.create_connection((host.host, host.port), 60, (address, 0)))
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
            connection.sendall(head.encode() + body)
            response = connection.recv(4096)
            while not (response == CONTINUE.encode() or response.endswith(b"}}")):
                response += connection.recv(4096)
            return connection, response.decode()

        yield start
    wait_until(lambda: client.post(PATH, content=b"x").status_code == 422)  # all uploads are released


def test_one_client_cannot_use_all_uploads(client, upload):
    uploads = [upload("127.0.0.2") for _ in range(MAX_UPLOADS_PER_CLIENT)]
    assert {response for _, response in uploads} == {CONTINUE}
    _, rejection = upload("127.0.0.2")
    assert rejection.startswith("HTTP/1.1 429 ")
    assert "\r\nretry-after: 5\r\n" in rejection.lower()
    assert f"the address 127.0.0.2 has {MAX_UPLOADS_PER_CLIENT} uploads of image files already" in rejection
    assert client.post(PATH, content=file_of(METADATA)).status_code == 200
    uploads[0][0].close()
    wait_until(lambda: upload("127.0.0.2")[1] == CONTINUE)


def test_total_number_of_uploads_is_limited(upload):
    for number in range(MAX_UPLOADS):
        assert upload(f"127.0.0.{number // MAX_UPLOADS_PER_CLIENT + 2}")[1] == CONTINUE
    _, rejection = upload("127.0.0.100")
    assert rejection.startswith("HTTP/1.1 429 ")
    assert f"{MAX_UPLOADS} uploads of image files are under way already" in rejection


def test_file_that_is_being_read_counts_as_an_upload(client, upload, monkeypatch):
    reading, proceed = [], threading.Event()
    monkeypatch.setattr(route, "read_metadata", lambda *_: (reading.append(1), proceed.wait(60), METADATA)[-1])
    with ThreadPoolExecutor(2) as pool:
        responses = [pool.submit(client.post, PATH, content=b"x") for _ in range(2)]
        wait_until(lambda: len(reading) == 2)
        first_responses = [upload("127.0.0.1")[1] for _ in range(MAX_UPLOADS_PER_CLIENT - 1)]
        assert [text.startswith("HTTP/1.1 429") for text in first_responses] == [False] * (
            MAX_UPLOADS_PER_CLIENT - 2
        ) + [True]
        proceed.set()
        assert [each.result().status_code for each in responses] == [200, 200]


def test_too_large_file_is_rejected(client):
    response = client.post(PATH, content=b"\0" * (MAX_BYTES + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
