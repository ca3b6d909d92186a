"""The fields of `/t2i`, and of other bodies with settings of images, in the OpenAPI document."""

import copy

from noria.frontend.http.operations import JsonObject, Served
from noria.frontend.services.images.request_images import MAX_CONTROL_SCALE, MAX_CONTROLS, MAX_REFERENCES
from noria.frontend.services.images.request_validation import MAX_LORA_WEIGHT, MAX_LORAS, Limits, limits
from noria.images import scheduler_names
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageRequestBody

EXAMPLE_FILE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel, in base64."""

IMAGE_FIELDS = {
    "prompt": "what the image shows",
    "negative_prompt": "what it should not show; has an effect only with a guidance_scale above 1 (Z-Image and "
    "Krea 2: above 0). For SDXL, null is not an empty one; of Qwen-Image it means no guidance",
    "seed": "the same seed and settings give the same image; image k of n uses seed + k; default: random",
    "width": "in pixels",
    "height": "in pixels",
    "inference_steps": "denoising steps",
    "guidance_scale": "strength of classifier-free guidance; 1 or less (Z-Image and Krea 2: 0) switches it off and "
    "halves the work",
    "calls": "the share of the model's calls that are made: with 0.5 an image takes half of the time, and is nearly "
    "that of all calls; the outputs of the others are extrapolated. Needs a scheduler that draws no noise and 12 steps",
    "prompt_syntax": "how prompts are read: `plain`, or `a1111` with its weights of words such as `(word:1.3)`, of any "
    "length and with `BREAK`, edits and `AND`, for Stable Diffusion 1, 2 and XL",
    "clip_skip": "which layer of a CLIP text encoder is read, from the end: 1 is the last one, 2 that of SDXL",
    "n": "number of images; more than one are returned as JSON",
    "scheduler": "the sampler: its short name, an alias or its class name in diffusers",
    "format": "the image file's format; webp has quality 90, jpeg 95",
    "model": "the name of a served model, or `noria` for the first one",
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
    "ip_adapter": "an IP-Adapter by name, which conditions the images on an `image` beside the prompt, in the formats "
    "of `image`, of which it takes the middle square; a `scale` of 0 has no effect",
    "refiner": "the model's refiner makes the steps after `start`, a part of the noise's times (0.8); a `name` and a "
    "`digest` must be its own",
    "image": "the start image: a PNG, WebP or JPEG file of at most 16 megapixels, in base64 or as a data: URL; `width` "
    "and `height` are its own by default",
    "mask": "likewise, of the image's size; white is repainted, black is kept",
    "strength": "how much of the start image is replaced",
}
"""The descriptions of the fields of `POST /t2i`."""


def describe_t2i(schemas: dict[str, JsonObject], served: Served) -> None:
    """Add what the types of the body of `/t2i` and of its members do not say, and the schema of its form."""
    schemas["Lora"]["properties"]["weight"] |= {"minimum": -MAX_LORA_WEIGHT, "maximum": MAX_LORA_WEIGHT}
    schemas["Refinement"]["properties"]["start"] |= {"exclusiveMinimum": 0.0, "exclusiveMaximum": 1.0}
    control = schemas["ControlField"]["properties"]
    for name, most in (("scale", MAX_CONTROL_SCALE), ("start", 1.0), ("end", 1.0)):
        control[name] |= {"minimum": 0.0, "maximum": most}
    control["image"] = {"type": "string", "minLength": 1}  # a form's `controls`, whose images are files, is a text here
    schemas["ControlField"]["required"] = ["name", "image"]
    adapter = schemas["IpAdapterField"]
    adapter["properties"]["scale"] |= {"minimum": 0.0, "maximum": MAX_CONTROL_SCALE}
    adapter["properties"]["image"] = {"type": "string", "minLength": 1}
    adapter["required"] = ["name", "image"]
    body = schemas[ImageRequestBody.__name__]
    describe_settings(body, served)
    body["allOf"] = [  # `mask` and `strength` need `image`
        {
            "anyOf": [
                {"properties": {"image": {"type": "string"}}, "required": ["image"]},
                {"properties": {"mask": {"type": "null"}, "strength": {"type": "null"}}},
            ]
        }
    ]
    if served.spec is not None and served.spec.needs_mask:
        for name in ("image", "mask"):
            body["properties"][name] = {"type": "string", "description": IMAGE_FIELDS[name]}
        body["example"] = body["example"] | dict.fromkeys(("image", "mask"), EXAMPLE_FILE)
    schemas["ImageRequestForm"] = form = copy.deepcopy(body)
    describe_form(form)


def describe_settings(body: JsonObject, served: Served) -> None:
    """Add bounds and samplers to the schema of a body with the settings of images, and its condition on previews."""
    properties, spec = body["properties"], served.spec
    bound_fields(properties, served)
    for name, most in (("loras", MAX_LORAS), ("controls", MAX_CONTROLS), ("reference_images", MAX_REFERENCES)):
        properties[name]["maxItems"] = most
    body["anyOf"] = [  # `partial_images` needs `stream`
        {"properties": {"partial_images": {"enum": [0, None]}}},
        {"properties": {"stream": {"const": True}}, "required": ["stream"]},
    ]
    if spec is None:
        return
    properties["scheduler"] |= {
        "anyOf": [{"enum": list(spec.schedulers)}, {"enum": _other_spellings(spec)}, {"type": "null"}],
        "default": spec.default_scheduler,
        "examples": list(spec.schedulers),
    }
    if "strength" in properties:
        description = f"{IMAGE_FIELDS['strength']}; with an image {spec.default_strength} by default"
        properties["strength"]["description"] = description
        if spec.needs_mask:
            body["required"] = sorted({*body["required"], "image", "mask"})


def bound_fields(properties: JsonObject, served: Served) -> None:
    """Add the longest prompt, and the model's bounds and defaults, to fields that have the names of `/t2i`."""
    for name in {"prompt", "negative_prompt"} & properties.keys():
        properties[name]["maxLength"] = served.config.max_prompt_chars
    if served.spec is not None:
        for name, allowed in limits(served.spec, served.config).items():
            if name in properties:
                add_bounds(properties[name], allowed)


def add_bounds(field: JsonObject, allowed: Limits) -> None:
    """Add the model's bounds and default to a number."""
    types = [each["type"] for each in field.pop("anyOf", [field])]
    field |= {"type": types if len(types) > 1 else types[0], "minimum": allowed.min, "maximum": allowed.max}
    if allowed.multiple > 1:
        field["multipleOf"] = allowed.multiple
    if allowed.default is not None:
        field["default"] = allowed.default


def _other_spellings(spec: DiffusionModelSpec) -> list[str]:
    """Return what else than the short names names one of the model's schedulers."""
    return [
        spelling
        for choice in map(scheduler_names.find, spec.schedulers)
        for spelling in (*choice.aliases, choice.diffusers_class)
        if scheduler_names.find(spelling) is choice
    ]


def describe_form(schema: JsonObject, *, starts: bool = True, needs_image: bool = False) -> None:
    """Add the files of a form, and what is a text in it; `starts`: it may have a start image.

    What is null in JSON is left out of a form.
    """
    schema.pop("allOf", None)
    schema["properties"].pop("reference_images")
    if not needs_image:
        schema["properties"]["reference_image"] = {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": IMAGE_FIELDS["reference_images"],
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
    schema["properties"]["ip_adapter_image"] = {
        "type": "string",
        "format": "binary",
        "description": "the image of `ip_adapter`",
    }
    for name in ("loras", "controls", "ip_adapter", "refiner"):
        schema["properties"][name] = {"type": "string", "description": f"JSON: {IMAGE_FIELDS[name]}"}
    if needs_image:
        schema["required"] = sorted({*schema["required"], "image"})
