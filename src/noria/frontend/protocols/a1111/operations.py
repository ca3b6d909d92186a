"""The operations of A1111's API and of its ControlNet extension: what they take and return, and their errors."""

import functools
from typing import Any

from msgspec.structs import replace

from noria.errors import EngineUnavailable, OperationNotSupported
from noria.frontend.bodies.image_fields import EXAMPLE_FILE, add_bounds, bound_fields
from noria.frontend.http.errors import ErrorBody, ErrorDialect, error_body
from noria.frontend.http.operations import JsonObject, Operation, Served
from noria.frontend.protocols.a1111 import bodies, extras
from noria.frontend.protocols.a1111.bodies import FILE_FORMATS, Img2Img, Txt2Img
from noria.frontend.protocols.a1111.init_images import IMAGE_LIMITS, RESIZE_MODES
from noria.frontend.protocols.a1111.routes import (
    A1111Options,
    A1111Routes,
    Img2ImgResponse,
    ProgressResponse,
    Txt2ImgResponse,
)
from noria.frontend.services.images.request_validation import Limits, limits
from noria.images.a1111_names import samplers_and_types

_ROOT, _CONTROLNET_ROOT = "/sdapi/v1", "/controlnet"

A1111_ERRORS = ErrorDialect(
    ErrorBody,  # with the message as `detail`, which A1111's clients read
    lambda error, request_id: replace(error_body(error, request_id), detail=error.message),
    roots=(_ROOT, _CONTROLNET_ROOT),
)

_FIELDS = bodies.DESCRIPTIONS | {
    "sd_model_checkpoint": "the model of later requests of this API: a title of `sd-models`, a name or a fingerprint",
    "samples_format": "the file format of later requests of this API: `png`, `webp` or `jpg`",
    bodies.CLIP_SKIP: "which layer of the text encoder later requests of this API read, from the end: 1 to 12",
}

_BOOLEANS = {"enum": [0, 1, "0", "1", "true", "false"]}


def a1111_operations(routes: A1111Routes) -> list[Operation]:
    """Return the operations that `routes` serve."""
    operation = functools.partial(Operation, group="A1111's API", scopes=("generate",), errors_as=A1111_ERRORS)
    controlnets = routes.controlnets
    lists = {
        f"{_ROOT}/sd-models": (routes.sd_models, "The models served."),
        f"{_ROOT}/samplers": (routes.samplers, "The samplers of the selected model."),
        f"{_ROOT}/schedulers": (routes.schedulers, "The schedule types of the selected model."),
        f"{_ROOT}/upscalers": (routes.extras.upscalers, "The upscalers of pixels."),
        f"{_ROOT}/latent-upscale-modes": (routes.fixed, "The names of `hr_upscaler` that enlarge latents."),
        f"{_ROOT}/sd-vae": (routes.fixed, "Empty: models use their own VAE."),
        f"{_ROOT}/embeddings": (routes.embeddings, "The embeddings that prompts for the selected model can name."),
        f"{_ROOT}/loras": (routes.loras, "The LoRAs of the selected model."),
        f"{_ROOT}/scripts": (routes.fixed, "The scripts: controlnet."),
        f"{_CONTROLNET_ROOT}/version": (routes.fixed, "The version of the extension's API."),
        f"{_CONTROLNET_ROOT}/settings": (routes.fixed, "The number of units that a request may have."),
        f"{_CONTROLNET_ROOT}/model_list": (
            controlnets.model_list,
            "The ControlNets and the IP-Adapters of the selected model.",
        ),
        f"{_CONTROLNET_ROOT}/module_list": (
            routes.fixed,
            "The preprocessors: the one that does nothing, and the one by which a unit is an IP-Adapter.",
        ),
        f"{_CONTROLNET_ROOT}/control_types": (
            controlnets.control_types,
            "Both lists, by type: all units, and IP-Adapters if the model has some.",
        ),
    }
    return [
        operation(
            method="POST",
            path=f"{_ROOT}/txt2img",
            handler=routes.txt2img,
            summary="Generate images with A1111's API",
            description="Features that Noria does not have are rejected unless they are off. As in A1111, numbers may "
            "be strings, and unknown fields are ignored. ControlNets and an IP-Adapter are units of "
            "`alwayson_scripts.controlnet`.",
            body=Txt2Img,
            fields=_FIELDS,
            example={"prompt": "a red circle above a blue square", "sampler_name": "Euler", "steps": 20, "seed": -1},
            response=Txt2ImgResponse,
            describe=_describe,
        ),
        operation(
            method="POST",
            path=f"{_ROOT}/img2img",
            handler=routes.img2img,
            summary="Generate images from an image with A1111's API",
            description="As `txt2img`. With a mask what is generated is pasted into the image.",
            body=Img2Img,
            fields=_FIELDS,
            example={"prompt": "a blue circle", "init_images": [EXAMPLE_FILE], "denoising_strength": 0.6},
            response=Img2ImgResponse,
        ),
        operation(
            method="POST",
            path=f"{_ROOT}/extra-single-image",
            handler=routes.extras.single_image,
            summary="Enlarge an image with A1111's API",
            description="By a filter, or by a file of `engine.upscalers`. Restoration of faces and a second upscaler "
            "are rejected unless they are off.",
            body=extras.ExtraSingleImage,
            fields=extras.EXTRAS_FIELDS,
            example={"image": EXAMPLE_FILE, "upscaler_1": "Lanczos", "upscaling_resize": 2},
            response=extras.ExtraSingleImageResponse,
            describe=_describe_extras,
        ),
        operation(
            method="POST",
            path=f"{_ROOT}/extra-batch-images",
            handler=routes.extras.batch_images,
            summary="Enlarge images with A1111's API",
            description="As `extra-single-image`, one after the other.",
            body=extras.ExtraBatchImages,
            fields=extras.EXTRAS_FIELDS,
            example={"imageList": [{"data": EXAMPLE_FILE, "name": "a.png"}], "upscaler_1": "Lanczos"},
            response=extras.ExtraBatchImagesResponse,
        ),
        operation(
            method="POST",
            path=f"{_CONTROLNET_ROOT}/detect",
            handler=controlnets.detect,
            summary="Not supported",
            description="No preprocessor is run.",
            errors=[OperationNotSupported],
        ),
        operation(
            method="GET",
            path=f"{_ROOT}/options",
            handler=routes.options,
            summary="Get the settings of A1111's API",
            description="Those that have an effect here.",
            response=A1111Options,
            errors=[EngineUnavailable],
        ),
        operation(
            method="POST",
            path=f"{_ROOT}/options",
            handler=routes.set_options,
            summary="Change the settings of A1111's API",
            description="For later requests of the same key; on a server without keys, of all clients.",
            body=A1111Options,
            fields=_FIELDS,
            example={"samples_format": "png"},
            response=Any,
        ),
        operation(
            method="GET",
            path=f"{_ROOT}/progress",
            handler=routes.progress,
            summary="Get the progress of A1111's API",
            description="Of the client's oldest running request; `?skip_current_image=true` leaves out its preview.",
            response=ProgressResponse,
        ),
        operation(
            method="POST",
            path=f"{_ROOT}/interrupt",
            handler=routes.interrupt,
            summary="Cancel all requests of A1111's API",
            description="Their status is 499; requests of other routes continue.",
            response=Any,
        ),
        operation(
            method="POST",
            path=f"{_ROOT}/skip",
            handler=routes.skip,
            summary="Cancel one request of A1111's API",
            description="The client's oldest running request.",
            response=Any,
        ),
        *(
            operation(
                method="GET",
                path=path,
                handler=handler,
                summary="List for A1111's API",
                description=description,
                response=Any,
            )
            for path, (handler, description) in lists.items()
        ),
    ]


def _describe_extras(schemas: dict[str, JsonObject], _: Served) -> None:
    """Add bounds to the fields of the extras, and which are required."""
    for body, name in ((extras.ExtraSingleImage, "image"), (extras.ExtraBatchImages, "imageList")):
        schema = schemas[body.__name__]
        schema["properties"]["upscaling_crop"]["anyOf"].insert(1, _BOOLEANS)
        for field, allowed in extras.EXTRAS_LIMITS.items():
            add_bounds(schema["properties"][field], allowed)
        schema["properties"][name]["anyOf"] = schema["properties"][name]["anyOf"][:1]
        schema["required"] = [name]


def _describe(schemas: dict[str, JsonObject], served: Served) -> None:
    """Add bounds, names, and what the bodies' types do not say."""
    options = schemas[A1111Options.__name__]["properties"]
    options["samples_format"] = {"enum": [*FILE_FORMATS, "", None], "description": _FIELDS["samples_format"]}
    for body in (Txt2Img, Img2Img):
        schemas[body.__name__] |= _describe_txt2img(schemas[body.__name__]["properties"], served)
    body_of_image = schemas[Img2Img.__name__]
    fields = body_of_image["properties"]
    fields["init_images"] |= {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
    del fields["init_images"]["anyOf"]
    body_of_image["required"] = ["init_images"]
    for name in ("inpainting_mask_invert", "inpaint_full_res"):
        fields[name]["anyOf"].insert(1, _BOOLEANS)
    for name, allowed in IMAGE_LIMITS.items():
        add_bounds(fields[name], allowed)
    fields["resize_mode"]["anyOf"] = [{"type": "integer"}, {"type": "null"}]  # names are taken, too
    add_bounds(fields["resize_mode"], Limits(0, len(RESIZE_MODES) - 1, 0))
    if served.spec is not None:
        add_bounds(fields["denoising_strength"], limits(served.spec, served.config)["strength"])
        if served.spec.needs_mask:
            body_of_image["required"] = ["init_images", "mask"]
            fields["mask"] = {"type": "string", "description": _FIELDS["mask"]}
            body_of_image["example"] = body_of_image["example"] | {"mask": EXAMPLE_FILE}


def _describe_txt2img(properties: JsonObject, served: Served) -> JsonObject:
    """Add bounds and names to the fields of A1111's body; returns its condition for the number of images."""
    bound_fields(properties, served)
    spec, config = served.spec, served.config
    for name in ("send_images", "metadata", "disable_extra_networks", "enable_hr"):
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
