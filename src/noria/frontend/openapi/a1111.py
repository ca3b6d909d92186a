"""A1111's routes in /openapi.json."""

from typing import Any

from noria.frontend.openapi.operations import get_only, json_content, operation
from noria.frontend.routes.a1111.bodies import Txt2Img
from noria.frontend.routes.a1111.routes import ROOT, Options, ProgressResponse, Txt2ImgResponse


def a1111_paths() -> dict[str, Any]:
    """Each path with its operations."""
    lists = {
        "sd-models": "the models served",
        "samplers": "the samplers of the model that is set",
        "schedulers": "its schedule types",
        "upscalers": "no upscaler",
        "latent-upscale-modes": "none",
        "sd-vae": "none beside the models' own",
        "loras": "none",
    }
    return {
        f"{ROOT}/txt2img": {
            "post": operation(
                "Draw images, as A1111's API does",
                "Bounds are those of `/t2i`. What A1111 has and Noria has not is refused unless it is off.",
                body=Txt2Img,
                content=json_content(Txt2ImgResponse),
            )
        },
        f"{ROOT}/options": {
            "get": operation(
                "Tell the settings of A1111's routes", "Those that mean something.", content=json_content(Options)
            ),
            "post": operation(
                "Change them", "For all users of A1111's routes.", body=Options, content={"application/json": {}}
            ),
        },
        f"{ROOT}/progress": {
            "get": operation(
                "Tell how far A1111's clients' requests are",
                "Of the one that has been drawn for longest; `?skip_current_image=true` leaves its picture out.",
                content=json_content(ProgressResponse),
            )
        },
        f"{ROOT}/interrupt": {
            "post": operation(
                "End all requests of A1111's clients",
                "They are answered 499; those that came by other routes go on.",
                content={"application/json": {}},
            )
        },
        f"{ROOT}/skip": {
            "post": operation(
                "End one request of A1111's clients",
                "The one that has been drawn for longest.",
                content={"application/json": {}},
            )
        },
    } | {
        f"{ROOT}/{name}": get_only("List, as A1111's API does", description.capitalize() + ".", "application/json")
        for name, description in lists.items()
    }
