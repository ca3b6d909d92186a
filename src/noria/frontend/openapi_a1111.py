"""A1111's routes in /openapi.json."""

from typing import Any

from noria.frontend.a1111 import ROOT, Options, ProgressAnswer, Txt2ImgAnswer
from noria.frontend.a1111_bodies import Txt2Img
from noria.frontend.openapi_parts import json_of, operation, plain


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
                answers=json_of(Txt2ImgAnswer),
            )
        },
        f"{ROOT}/options": {
            "get": operation(
                "Tell the settings of A1111's routes", "Those that mean something.", answers=json_of(Options)
            ),
            "post": operation(
                "Change them", "For all users of A1111's routes.", body=Options, answers={"application/json": {}}
            ),
        },
        f"{ROOT}/progress": {
            "get": operation(
                "Tell how far A1111's clients' requests are",
                "Of the one that has been drawn for longest; `?skip_current_image=true` leaves its picture out.",
                answers=json_of(ProgressAnswer),
            )
        },
        f"{ROOT}/interrupt": {
            "post": operation(
                "End all requests of A1111's clients",
                "They are answered 499; those that came by other routes go on.",
                answers={"application/json": {}},
            )
        },
        f"{ROOT}/skip": {
            "post": operation(
                "End one request of A1111's clients",
                "The one that has been drawn for longest.",
                answers={"application/json": {}},
            )
        },
    } | {
        f"{ROOT}/{name}": plain("List, as A1111's API does", what.capitalize() + ".", "application/json")
        for name, what in lists.items()
    }
