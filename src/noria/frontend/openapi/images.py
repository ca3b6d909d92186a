"""The bodies of `/t2i` and of OpenAI's image route in the OpenAPI document, and their paths."""

import copy
from typing import Any

from msgspec import Struct

from noria.errors import OperationNotSupported
from noria.frontend.http.body import FORM
from noria.frontend.openapi.operations import EVENT_STREAM_CONTENT, IMAGE_CONTENT, json_content, operation
from noria.frontend.routes.images.t2i import ImagesResponse
from noria.frontend.routes.openai.edits import EditsFields
from noria.frontend.routes.openai.images import IGNORED_FIELDS, GenerationsRequestBody, GenerationsResponse
from noria.frontend.services.images.request_images import MAX_CONTROL_SCALE, MAX_CONTROLS, MAX_REFERENCES
from noria.frontend.services.images.request_validation import (
    MAX_LORA_WEIGHT,
    MAX_LORAS,
)
from noria.images import scheduler_names
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageRequestBody

EXAMPLE_FILE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel, in base64."""

DESCRIPTIONS = {
    "prompt": "what the image shows",
    "negative_prompt": "what it should not show; has an effect only with a guidance_scale above 1 (Z-Image and "
    "Krea 2: above 0). "
    "For SDXL, null is not an empty one; of Qwen-Image it means no guidance",
    "seed": "the same seed and settings give the same image; image k of n uses seed + k; default: random",
    "width": "in pixels",
    "height": "in pixels",
    "inference_steps": "denoising steps",
    "guidance_scale": "strength of classifier-free guidance; 1 or less (Z-Image and Krea 2: 0) switches it off and "
    "halves the work",
    "n": "number of images; more than one are returned as JSON",
    "scheduler": "the sampler: its short name, an alias or its class name in diffusers",
    "format": "the image file's format; webp has quality 90, jpeg 95",
    "model": "the name of a served model, or `noria` for the first one",
    "size": "`WIDTHxHEIGHT` in pixels, or `auto` for the model's default",
    "output_format": "the image file's format",
    "output_compression": "quality of webp and jpeg, 0 to 100; no effect on png",
    "response_format": "`b64_json`; `url` is rejected, because only images of jobs are stored",
    "stream": "return server-sent events: progress, previews, the finished images",
    "partial_images": "number of previews of each image in a stream; needs `stream`",
    "priority": "`low`, `normal` or `high`: the order in which queued images join the running batch",
    "deadline_ms": "milliseconds from now in which the images are needed; rejected at once if that is not possible",
    "metadata": "whether the files contain their settings",
    "loras": "LoRA adapters by name, whose changes are added, each with a `weight` (1); a `digest` must be that of the "
    "file",
    "controls": "ControlNets that steer the images, each by an image of its own, in the formats of `image`, that is "
    "used as it is: no edges are detected in it; their residuals are added. `start` and `end` are parts of the steps",
    "reference_images": "images that the model is shown beside the prompt, in the formats of `image`, for models whose "
    "`max_references` is above 0; `width` and `height` are by default those of the first one as it is shown",
    "refiner": "the model's refiner makes the steps after `start`, a part of the noise's times (0.8); a `name` and a "
    "`digest` must be its own",
    "image": "the start image: a PNG, WebP or JPEG file of at most 16 megapixels, in base64 or as a data: URL; `width` "
    "and `height` are its own by default",
    "mask": "likewise, of the image's size; white is repainted, black is kept",
    "strength": "how much of the start image is replaced",
} | dict.fromkeys((*IGNORED_FIELDS, "input_fidelity"), "accepted for OpenAI's clients and ignored")


def add_to_schemas(schemas: dict[str, Any], spec: DiffusionModelSpec | None) -> None:
    """Add the samplers, the sizes, and what the bodies' types do not say."""
    schemas["Lora"]["properties"]["weight"] |= {"minimum": -MAX_LORA_WEIGHT, "maximum": MAX_LORA_WEIGHT}
    schemas["Refinement"]["properties"]["start"] |= {"exclusiveMinimum": 0.0, "exclusiveMaximum": 1.0}
    control = schemas["ControlField"]["properties"]
    for name, most in (("scale", MAX_CONTROL_SCALE), ("start", 1.0), ("end", 1.0)):
        control[name] |= {"minimum": 0.0, "maximum": most}
    control["image"] = {"type": "string", "minLength": 1}  # a form's `controls`, whose images are files, is a text here
    schemas["ControlField"]["required"] = ["name", "image"]
    for body in (ImageRequestBody, GenerationsRequestBody, EditsFields):
        schemas[body.__name__]["properties"]["loras"]["maxItems"] = MAX_LORAS
        schemas[body.__name__]["properties"]["controls"]["maxItems"] = MAX_CONTROLS
        schemas[body.__name__]["properties"]["reference_images"]["maxItems"] = MAX_REFERENCES
        if spec is not None:
            schemas[body.__name__]["properties"]["scheduler"] |= {
                "anyOf": [{"enum": list(spec.schedulers)}, {"enum": _other_spellings(spec)}, {"type": "null"}],
                "default": spec.default_scheduler,
                "examples": list(spec.schedulers),
            }
        schemas[body.__name__]["anyOf"] = [  # `partial_images` needs `stream`
            {"properties": {"partial_images": {"enum": [0, None]}}},
            {"properties": {"stream": {"const": True}}, "required": ["stream"]},
        ]
    for body in (GenerationsRequestBody, EditsFields):
        _describe_size(schemas[body.__name__]["properties"], spec)
    schemas["ImageRequestBody"]["allOf"] = [  # `mask` and `strength` need `image`
        {
            "anyOf": [
                {"properties": {"image": {"type": "string"}}, "required": ["image"]},
                {"properties": {"mask": {"type": "null"}, "strength": {"type": "null"}}},
            ]
        }
    ]
    _describe_form(schemas["EditsFields"], needs_image=True)
    if spec is not None:
        _describe_start_image(schemas, spec)
    for body, starts in ((ImageRequestBody, True), (GenerationsRequestBody, False)):
        schemas[_form_of(body)] = form = copy.deepcopy(schemas[body.__name__])
        _describe_form(form, starts=starts)


def _form_of(body: type[Struct]) -> str:
    """Return the name of the schema of a form with the fields of `body`."""
    return body.__name__.replace("Body", "Form")


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    return {
        "/t2i": {
            "post": operation(
                "Generate images",
                "One image is returned as a file, with its seed in X-Noria-Seed and its timings in Server-Timing; "
                "several, or one for a client that accepts JSON but no image, as JSON.",
                body=_json_or_form(ImageRequestBody),
                content=IMAGE_CONTENT | json_content(ImagesResponse) | EVENT_STREAM_CONTENT,
            )
        },
        "/v1/images/edits": {
            "post": operation(
                "Generate images from an image with OpenAI's API",
                "The body is a form, and the unmodified OpenAI clients work; send Noria's own fields in `extra_body`.",
                body={FORM: {"schema": {"$ref": "#/components/schemas/EditsFields"}}},
                content=json_content(GenerationsResponse) | EVENT_STREAM_CONTENT,
            )
        },
        "/v1/images/variations": {
            "post": operation("Not supported", "The models need a prompt.", content={}, errors=[OperationNotSupported])
        },
        "/v1/images/generations": {
            "post": operation(
                "Generate images with OpenAI's API",
                "The unmodified OpenAI clients work; send Noria's own fields in `extra_body`.",
                body=_json_or_form(GenerationsRequestBody),
                content=json_content(GenerationsResponse) | EVENT_STREAM_CONTENT,
            )
        },
    }


def _describe_start_image(schemas: dict[str, Any], spec: DiffusionModelSpec) -> None:
    """Add the default of `strength` and, if requests of the model need an image and a mask, these."""
    for body in (ImageRequestBody, EditsFields):
        schema = schemas[body.__name__]
        schema["properties"]["strength"]["description"] += f"; with an image {spec.default_strength} by default"
        if spec.needs_mask:
            schema["required"] = sorted({*schema["required"], "image", "mask"})
    if spec.needs_mask:
        body = schemas["ImageRequestBody"]
        for name in ("image", "mask"):
            body["properties"][name] = {"type": "string", "description": DESCRIPTIONS[name]}
        body["example"] = body["example"] | dict.fromkeys(("image", "mask"), EXAMPLE_FILE)


def _json_or_form(body: type[Struct]) -> dict[str, Any]:
    """Return a content object: the fields as JSON, or as a form with files."""
    return json_content(body) | {FORM: {"schema": {"$ref": f"#/components/schemas/{_form_of(body)}"}}}


def _other_spellings(spec: DiffusionModelSpec) -> list[str]:
    """Return what else than the short names names one of the model's schedulers."""
    return [
        spelling
        for choice in map(scheduler_names.find, spec.schedulers)
        for spelling in (*choice.aliases, choice.diffusers_class)
        if scheduler_names.find(spelling) is choice
    ]


def _describe_form(schema: dict[str, Any], *, starts: bool = True, needs_image: bool = False) -> None:
    """Add the files of a form, and what is a text in it; `starts`: it may have a start image.

    What is null in JSON is left out of a form.
    """
    schema.pop("allOf", None)
    schema["properties"].pop("reference_images")
    if not needs_image:
        schema["properties"]["reference_image"] = {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": DESCRIPTIONS["reference_images"],
            "maxItems": MAX_REFERENCES,
        }
    for field in schema["properties"].values():
        if "anyOf" in field:
            field["anyOf"] = [each for each in field["anyOf"] if each.get("type") != "null"]
        if isinstance(field.get("type"), list):
            field["type"] = [each for each in field["type"] if each != "null"]
        if field.get("default", "") is None:
            del field["default"]
    if starts:
        repainted = "what is transparent in it is repainted" if needs_image else "white is repainted"
        files = {
            "image": "the start image: a PNG, WebP or JPEG file of at most 16 megapixels; its size is the default"
            + ("; of a model that takes reference images these, unless there is a mask or a strength" * needs_image),
            "mask": f"a file of the image's size; {repainted}",
        }
        schema["properties"] |= {
            name: {"type": "string", "format": "binary", "description": text} for name, text in files.items()
        }
    schema["properties"]["control"] = {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "description": "the images of `controls`, in their order",
    }
    for name in ("loras", "controls", "refiner"):
        schema["properties"][name] = {"type": "string", "description": f"JSON: {DESCRIPTIONS[name]}"}
    if needs_image:
        schema["required"] = [*schema["required"], "image"]


def _describe_size(properties: dict[str, Any], spec: DiffusionModelSpec | None) -> None:
    """Describe the sizes of OpenAI's body, which are a text, and its `response_format`."""
    sides = "[0-9]{1,6}"
    if spec is not None:
        sides = f"({'|'.join(map(str, range(spec.min_side_px, spec.max_side_px + 1, spec.multiple_px)))})"
    properties["size"] |= {"anyOf": [{"type": "string", "pattern": f"^(auto|{sides}x{sides})$"}, {"type": "null"}]}
    properties["response_format"]["anyOf"] = [{"enum": ["b64_json"]}, {"type": "null"}]
