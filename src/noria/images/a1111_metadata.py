"""A1111's text form of metadata, which its "PNG info", Civitai and many viewers read.

It has the prompt, the negative prompt, and one line of settings:

    a red circle
    Negative prompt: blurry
    Steps: 20, Sampler: DPM++ 2M Karras, CFG scale: 7.5, Seed: 7, Size: 512x512, Model hash: 0123456789, Model: tiny,
    Version: noria 0.1.0

The form is lossy (a prompt with a line "Negative prompt: …" is read back differently, and spaces around lines are
lost), so Noria also writes its own JSON and reads that first. This text is read from untrusted files of other programs:
reading never raises, and takes time linear in the length of the text.
"""

import contextlib
import json
import re
from collections.abc import Iterator

import msgspec

from noria.errors import InvalidField, short_repr
from noria.images.a1111_names import a1111_name, scheduler_for
from noria.images.metadata import GenerationMetadata
from noria.protocol.diffusion import Control, Lora, Refinement

_NEGATIVE_PREFIX = "Negative prompt:"
_VERSION_PREFIX = "noria "  # A1111 interprets a bare "v0.1" as an old version of its own and generates as that did
_MIN_SETTINGS = 3  # a last line with fewer is part of the prompt, as in A1111
_LORA_TAG = re.compile(r"<lora:([^<>]*)>")
_JSON_DECODER = json.JSONDecoder(strict=False)


def to_infotext(metadata: GenerationMetadata) -> str:
    """Format metadata as A1111 does; unset values are left out."""
    tags = [f"<lora:{lora.name}:{_number(lora.weight)}>" for lora in metadata.loras]
    lines = [" ".join([metadata.prompt, *tags])]
    if metadata.negative_prompt:
        lines.append(f"{_NEGATIVE_PREFIX} {metadata.negative_prompt}")
    lines.append(", ".join(f"{name}: {_quote(value)}" for name, value in _settings(metadata)))
    return "\n".join(lines).strip()


def _settings(metadata: GenerationMetadata) -> Iterator[tuple[str, str]]:
    """Yield settings in A1111's order: some readers expect "Steps" first."""
    sampler, schedule_type = (None, None) if metadata.scheduler is None else a1111_name(metadata.scheduler)
    guidance, size = metadata.guidance_scale, None
    if metadata.width is not None and metadata.height is not None:
        size = f"{metadata.width}x{metadata.height}"
    settings = {
        "Steps": metadata.inference_steps,
        "Sampler": sampler,
        "Schedule type": schedule_type,
        "CFG scale": None if guidance is None else _number(guidance),
        "Seed": metadata.seed,
        "Size": size,
        "Model hash": metadata.model_version,
        "Model": metadata.model,
        "Denoising strength": None if metadata.strength is None else _number(metadata.strength),
        "Lora hashes": ", ".join(f"{lora.name}: {lora.digest}" for lora in metadata.loras if lora.digest) or None,
        **{f"ControlNet {k}": _describe_control(control) for k, control in enumerate(metadata.controls)},
        **{f"Reference {k}": each.digest for k, each in enumerate(metadata.reference_images)},
        "Refiner": _describe_refiner(metadata.refiner),
        "Refiner switch at": None if metadata.refiner is None else _number(metadata.refiner.start),
        "Version": None if metadata.noria is None else _VERSION_PREFIX + metadata.noria,
    }
    return ((name, str(value)) for name, value in settings.items() if value is not None)


def _describe_control(control: Control) -> str:
    """Return a control as A1111's extension writes it, in quotes, as far as it has the same settings."""
    settings = {
        "Module": "none",
        "Model": control.name + (f" [{control.digest}]" if control.digest else ""),
        "Weight": _number(control.scale),
        "Guidance Start": _number(control.start),
        "Guidance End": _number(control.end),
    }
    return ", ".join(f"{name}: {value}" for name, value in settings.items())


def _describe_refiner(refiner: Refinement | None) -> str | None:
    if refiner is None or refiner.name is None:
        return None
    return refiner.name + (f" [{refiner.digest}]" if refiner.digest else "")


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def _quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if re.search(r"[,:\n]", value) else value


def from_infotext(text: str) -> GenerationMetadata:
    """Parse a text in A1111's form; a text without settings is all prompt."""
    lines = text.strip().split("\n")
    settings = dict(_parse_settings(lines[-1]))
    if len(settings) < _MIN_SETTINGS:
        settings = {}
    else:
        lines.pop()
    lines = [line.strip() for line in lines]
    first_negative = next((index for index, line in enumerate(lines) if line.startswith(_NEGATIVE_PREFIX)), len(lines))
    negative = [line.removeprefix(_NEGATIVE_PREFIX).strip() for line in lines[first_negative:]]
    return _metadata_from("\n".join(lines[:first_negative]), "\n".join(negative), settings)


def split_loras(prompt: str) -> tuple[str, tuple[Lora, ...]]:
    """Return a prompt without its `<lora:NAME:WEIGHT>`, and these; without a weight it is 1, as in A1111.

    Raises:
        InvalidField: there is no name, or a weight is no number; A1111's separate weights for text encoder and UNet
            are not supported.

    """
    loras = []
    for tag in _LORA_TAG.findall(prompt):
        name, _, weight = tag.partition(":")
        try:
            loras.append(Lora(name, float(weight) if weight else 1.0))
        except ValueError as error:
            raise InvalidField(
                f"prompt has {short_repr(f'<lora:{tag}>')}, whose weight is not one number; allowed is "
                "<lora:NAME:WEIGHT>.",
                field="prompt",
            ) from error
    return (_LORA_TAG.sub("", prompt).strip(), tuple(loras)) if loras else (prompt, ())


def _parse_settings(line: str) -> Iterator[tuple[str, str]]:
    """Yield the settings of `Name: value, Name: "a value, in quotes", …`."""
    position = 0
    while (colon := line.find(":", position)) >= 0:
        name = line[position:colon].rpartition(",")[2].strip()
        start = colon + 1 + (line[colon + 1 : colon + 2] == " ")
        end, value = line.find(",", start), None
        if line.startswith('"', start):
            with contextlib.suppress(ValueError):
                value, end = _JSON_DECODER.raw_decode(line, start)
                value = value.encode("utf-8", "replace").decode()  # unpaired surrogates, which JSON can contain
                end = line.find(",", end)
        end = len(line) if end < 0 else end
        yield name, line[start:end].strip() if value is None else value
        position = end + 1


def _metadata_from(prompt: str, negative_prompt: str, settings: dict[str, str]) -> GenerationMetadata:
    """Convert the settings that Noria knows, and remove them from `settings`; invalid values stay there, in `other`."""

    def take(name: str, pattern: str) -> str | None:
        return settings.pop(name) if re.fullmatch(pattern, settings.get(name, ""), re.ASCII) else None

    def take_int(name: str) -> int | None:
        text = take(name, r"\d{1,19}")
        return None if text is None else int(text)

    size = take("Size", r"\d{1,6}x\d{1,6}")
    width, height = (int(side) for side in size.split("x")) if size else (None, None)
    guidance = take("CFG scale", r"\d{1,9}(\.\d{1,17})?(e-\d{1,3})?")
    strength = None if "Hires upscale" in settings else take("Denoising strength", r"[01](\.\d{1,17})?")
    version = take("Version", rf"{_VERSION_PREFIX}\S+")
    loras: tuple[Lora, ...] = ()
    with contextlib.suppress(InvalidField):  # then the tags stay in the prompt
        prompt, loras = split_loras(prompt)
    refiner = None
    if "Refiner" in settings and (start := take("Refiner switch at", r"0\.\d{1,17}")) is not None:
        name, _, digest = settings.pop("Refiner").partition(" [")
        refiner = Refinement(float(start), name, (digest.rstrip("]") or None) if version else None)
    digests = {}
    if version and loras:  # A1111's hashes are of other bytes of the files
        digests = dict(each.rpartition(": ")[::2] for each in settings.pop("Lora hashes", "").split(", "))
    return GenerationMetadata(
        prompt=prompt,
        negative_prompt=negative_prompt or None,
        seed=take_int("Seed"),
        width=width,
        height=height,
        inference_steps=take_int("Steps"),
        guidance_scale=None if guidance is None else float(guidance),
        scheduler=_scheduler_name(settings.pop("Sampler", None), settings.pop("Schedule type", None)),
        loras=tuple(msgspec.structs.replace(lora, digest=digests.get(lora.name)) for lora in loras),
        model=settings.pop("Model", None),
        model_version=settings.pop("Model hash", None),
        noria=version and version.removeprefix(_VERSION_PREFIX),
        strength=None if strength is None else float(strength),
        refiner=refiner,
        other=settings,
    )


def _scheduler_name(sampler: str | None, schedule_type: str | None) -> str | None:
    if sampler is None:
        return None
    try:
        return scheduler_for(sampler, schedule_type)
    except InvalidField:  # shown as it is; a request with it is rejected by name
        return sampler if schedule_type is None else f"{sampler} {schedule_type}"
