"""A1111's API in the OpenAPI document: its bodies and its paths."""

from typing import Any

from noria.config import FrontendConfig
from noria.errors import EngineUnavailable, OperationNotSupported
from noria.frontend.http.paths import A1111_CONTROLNET_ROOT, A1111_ROOT
from noria.frontend.openapi.images import EXAMPLE_FILE
from noria.frontend.openapi.operations import add_bounds, get_only, json_content, operation
from noria.frontend.routes.a1111 import bodies
from noria.frontend.routes.a1111.bodies import FILE_FORMATS, Img2Img, Txt2Img
from noria.frontend.routes.a1111.routes import Img2ImgResponse, Options, ProgressResponse, Txt2ImgResponse
from noria.frontend.services.images.request_validation import Limits, limits
from noria.images.a1111_names import samplers_and_types
from noria.protocol.diffusion import DiffusionModelSpec

DESCRIPTIONS = bodies.DESCRIPTIONS | {
    "sd_model_checkpoint": "the model of later requests of this API: a title of `sd-models`, a name or a fingerprint",
    "samples_format": "the file format of later requests of this API: `png`, `webp` or `jpg`",
}

_BOOLEANS = {"enum": [0, 1, "0", "1", "true", "false"]}


def add_to_schemas(schemas: dict[str, Any], spec: DiffusionModelSpec | None, config: FrontendConfig) -> None:
    """Add bounds, names, and what the bodies' types do not say."""
    schemas["Options"]["properties"]["samples_format"] = {"enum": [*FILE_FORMATS, "", None]} | {
        "description": DESCRIPTIONS["samples_format"]
    }
    for body in (Txt2Img, Img2Img):
        schemas[body.__name__] |= _describe_txt2img(schemas[body.__name__]["properties"], spec, config)
    image_fields = schemas["Img2Img"]["properties"]
    image_fields["init_images"] |= {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
    del image_fields["init_images"]["anyOf"]
    schemas["Img2Img"]["required"] = ["init_images"]
    image_fields["inpainting_mask_invert"]["anyOf"].insert(1, _BOOLEANS)
    if spec is not None:
        add_bounds(image_fields["denoising_strength"], limits(spec, config)["strength"])
        if spec.needs_mask:
            schemas["Img2Img"]["required"] = ["init_images", "mask"]
            image_fields["mask"] = {"type": "string", "description": DESCRIPTIONS["mask"]}
            schemas["Img2Img"]["example"] = schemas["Img2Img"]["example"] | {"mask": EXAMPLE_FILE}


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    return {
        f"{A1111_ROOT}/txt2img": {
            "post": operation(
                "Generate images with A1111's API",
                "Bounds are those of `/t2i`. Features that Noria does not have are rejected unless they are off. As in "
                "A1111, numbers may be strings, and unknown fields are ignored. ControlNets are units of "
                "`alwayson_scripts.controlnet`.",
                body=Txt2Img,
                content=json_content(Txt2ImgResponse),
            )
        },
        f"{A1111_ROOT}/img2img": {
            "post": operation(
                "Generate images from an image with A1111's API",
                "As `txt2img`. Soft masks, filling and cropping are rejected unless they are off.",
                body=Img2Img,
                content=json_content(Img2ImgResponse),
            )
        },
        f"{A1111_CONTROLNET_ROOT}/detect": {
            "post": operation("Not supported", "No preprocessor is run.", content={}, errors=[OperationNotSupported])
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
    } | _lists()


def _lists() -> dict[str, Any]:
    descriptions = {
        f"{A1111_ROOT}/sd-models": "the models served",
        f"{A1111_ROOT}/samplers": "the samplers of the selected model",
        f"{A1111_ROOT}/schedulers": "the schedule types of the selected model",
        f"{A1111_ROOT}/upscalers": "no upscaler is supported",
        f"{A1111_ROOT}/latent-upscale-modes": "empty",
        f"{A1111_ROOT}/sd-vae": "empty: models use their own VAE",
        f"{A1111_ROOT}/loras": "the LoRAs of the selected model",
        f"{A1111_ROOT}/scripts": "the scripts: controlnet",
        f"{A1111_CONTROLNET_ROOT}/version": "the version of the extension's API",
        f"{A1111_CONTROLNET_ROOT}/settings": "the number of units that a request may have",
        f"{A1111_CONTROLNET_ROOT}/model_list": "the ControlNets of the selected model",
        f"{A1111_CONTROLNET_ROOT}/module_list": "the preprocessors: only the one that does nothing",
        f"{A1111_CONTROLNET_ROOT}/control_types": "both lists, of the only type",
    }
    return {
        path: get_only("List for A1111's API", text[0].upper() + text[1:] + ".", "application/json")
        for path, text in descriptions.items()
    }


def _describe_txt2img(
    properties: dict[str, Any], spec: DiffusionModelSpec | None, config: FrontendConfig
) -> dict[str, Any]:
    """Add bounds and names to the fields of A1111's body; returns its condition for the number of images."""
    for name in ("send_images", "metadata"):
        properties[name]["anyOf"].insert(1, _BOOLEANS)
    if spec is None:
        return {}
    allowed = limits(spec, config)
    for name, noria_name in (("steps", "inference_steps"), ("cfg_scale", "guidance_scale"), ("seed", "seed")):
        add_bounds(properties[name], allowed[noria_name])
    properties["seed"]["minimum"] = -1
    samplers, types = samplers_and_types(spec.schedulers)
    for name, values in (("sampler_name", samplers), ("sampler_index", samplers), ("scheduler", types)):
        properties[name]["anyOf"] = [{"enum": [*values, ""]}, {"type": "null"}]
    max_images = config.max_images
    for name in ("batch_size", "n_iter"):
        add_bounds(properties[name], Limits(1, max_images, None))
    # The product is bounded: the largest n_iter for each batch_size.
    pairs = {
        max_images // num_batches: max_images // (max_images // num_batches) for num_batches in range(1, max_images + 1)
    }
    return {
        "anyOf": [
            {"properties": {"batch_size": {"maximum": batch_size}, "n_iter": {"maximum": num_batches}}}
            for batch_size, num_batches in pairs.items()
        ]
    }
