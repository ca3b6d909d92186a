"""The paths of A1111's API in the OpenAPI document."""

from typing import Any

from noria.errors import EngineUnavailable
from noria.frontend.http.paths import A1111_ROOT
from noria.frontend.openapi.operations import get_only, json_content, operation
from noria.frontend.routes.a1111.bodies import Txt2Img
from noria.frontend.routes.a1111.routes import Options, ProgressResponse, Txt2ImgResponse


def a1111_paths() -> dict[str, Any]:
    """Return the operations by path."""
    lists = {
        "sd-models": "the models served",
        "samplers": "the samplers of the selected model",
        "schedulers": "the schedule types of the selected model",
        "upscalers": "no upscaler is supported",
        "latent-upscale-modes": "empty",
        "sd-vae": "empty: models use their own VAE",
        "loras": "empty",
    }
    return {
        f"{A1111_ROOT}/txt2img": {
            "post": operation(
                "Generate images with A1111's API",
                "Bounds are those of `/t2i`. Features that Noria does not have are rejected unless they are off. As in "
                "A1111, numbers may be strings, and unknown fields are ignored.",
                body=Txt2Img,
                content=json_content(Txt2ImgResponse),
            )
        },
        f"{A1111_ROOT}/options": {
            "get": operation(
                "Get the settings of A1111's API",
                "Those that have an effect here.",
                content=json_content(Options),
                errors=[EngineUnavailable],
            ),
            "post": operation(
                "Change the settings of A1111's API",
                "For all clients of this API.",
                body=Options,
                content={"application/json": {}},
            ),
        },
        f"{A1111_ROOT}/progress": {
            "get": operation(
                "Get the progress of A1111's API",
                "Of the client's oldest running request; `?skip_current_image=true` leaves out its preview.",
                content=json_content(ProgressResponse),
            )
        },
        f"{A1111_ROOT}/interrupt": {
            "post": operation(
                "Cancel all requests of A1111's API",
                "Their status is 499; requests of other routes continue.",
                content={"application/json": {}},
            )
        },
        f"{A1111_ROOT}/skip": {
            "post": operation(
                "Cancel one request of A1111's API",
                "The client's oldest running request.",
                content={"application/json": {}},
            )
        },
    } | {
        f"{A1111_ROOT}/{name}": get_only(
            "List for A1111's API", description[0].upper() + description[1:] + ".", "application/json"
        )
        for name, description in lists.items()
    }
