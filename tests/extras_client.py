"""A1111's extras, as webuiapi asks for them."""

import base64
import io

import httpx
import pytest
from PIL import Image

from noria.config import Config, EngineConfig
from noria.models.adapters.upscaler_folders import UpscalerFolders
from uploads import b64, file_of, photo

# What webuiapi sends.
WEBUIAPI = {
    "resize_mode": 0, "show_extras_results": True, "gfpgan_visibility": 0, "codeformer_visibility": 0,
    "codeformer_weight": 0, "upscaling_resize": 2, "upscaling_resize_w": 512, "upscaling_resize_h": 512,
    "upscaling_crop": True, "upscaler_1": "Lanczos", "upscaler_2": "None", "extras_upscaler_2_visibility": 0,
    "upscale_first": False,
}  # fmt: skip
IMAGE = photo((40, 24))


def opened(text):
    """An image of a response."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def extra(client, **fields):
    """The response to an image that is to be enlarged."""
    return client.post("/sdapi/v1/extra-single-image", json=WEBUIAPI | {"image": b64(file_of(IMAGE))} | fields)


@pytest.fixture
def upscaling_server(serve, new_engine, tmp_path):
    """A client of a server with an upscaler, its engine, and the upscaler."""
    (tmp_path / "4x-Tiny.pth").write_bytes(b"weights")
    engine = new_engine()
    config = Config(engine=EngineConfig(upscalers=(str(tmp_path),)))
    with serve(config, engine) as (url, _), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        yield client, engine, UpscalerFolders((str(tmp_path),)).complete("4x-Tiny", "upscaler_1")
