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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from noria.errors import InvalidField, short_repr
from noria.images.a1111_names import UPSCALERS, a1111_name, scheduler_for
from noria.images.metadata import GenerationMetadata
from noria.protocol.diffusion import Control, IpAdapter, Lora, PromptSyntax, Refinement, SecondPass

_NEGATIVE_PREFIX = "Negative prompt:"
_NUMBER = r"\d{1,9}(\.\d{1,17})?(e-\d{1,3})?"
_VERSION_PREFIX = "noria "  # A1111 interprets a bare "v0.1" as an old version of its own and generates as that did
_MIN_SETTINGS = 3  # a last line with fewer is part of the prompt, as in A1111
_FIRST_SETTING = "Steps: "  # in A1111's order
_WEIGHTS = re.compile(r"[()\[\]]|\b(?:BREAK|AND)\b")  # A1111's syntax
_NAME = re.compile(r"[A-Z][\w ]{0,40}", re.ASCII)  # the name of a setting on a line of its own
_NETWORK_TAG = re.compile(r"<(\w+):([^<>]+)>")
_LORA_KINDS = frozenset({"lora", "lyco"})
_BAR_SEPARATED = re.compile(r"[^:,|]*:[^,|]*\|")
_MAX_JSON_VALUES = 20  # nested ones that are damaged take time for each level, from each of their colons on
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
    units: list[Control | IpAdapter] = [*metadata.controls]
    units += [] if metadata.ip_adapter is None else [metadata.ip_adapter]
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
        **_describe_second_pass(metadata.second_pass, metadata.scheduler),
        "Clip skip": metadata.clip_skip,
        "Prompt syntax": metadata.prompt_syntax,
        "Calls": None if metadata.calls in (None, 1) else _number(metadata.calls),
        "Lora hashes": ", ".join(f"{lora.name}: {lora.digest}" for lora in metadata.loras if lora.digest) or None,
        **{f"ControlNet {k}": _describe_unit(unit) for k, unit in enumerate(units)},
        **{f"Reference {k}": each.digest for k, each in enumerate(metadata.reference_images)},
        "Refiner": _describe_refiner(metadata.refiner),
        "Refiner switch at": None if metadata.refiner is None else _number(metadata.refiner.start),
        "Version": None if metadata.noria is None else _VERSION_PREFIX + metadata.noria,
    }
    return ((name, str(value)) for name, value in settings.items() if value is not None)


def _describe_unit(unit: Control | IpAdapter) -> str:
    """Return a control or an IP-Adapter as A1111's extension writes it, in quotes, as far as it has these settings."""
    settings = {
        "Module": "none" if isinstance(unit, Control) else "ip-adapter-auto",
        "Model": unit.name + (f" [{unit.digest}]" if unit.digest else ""),
        "Weight": _number(unit.scale),
    }
    if isinstance(unit, Control):
        settings |= {"Guidance Start": _number(unit.start), "Guidance End": _number(unit.end)}
    return ", ".join(f"{name}: {value}" for name, value in settings.items())


def _describe_second_pass(second: SecondPass | None, scheduler: str | None) -> dict[str, str | int]:
    if second is None or scheduler is None:
        return {}
    return {
        "Denoising strength": _number(second.strength),
        "Hires resize": f"{second.width}x{second.height}",
        "Hires steps": second.num_made(scheduler),
        "Hires upscaler": second.pixel_upscaler.name
        if second.pixel_upscaler is not None
        else next(name for name, upscaler in UPSCALERS.items() if upscaler == second.upscaler),
    }


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
    if len(settings) >= _MIN_SETTINGS:
        lines.pop()
    else:
        lines, settings = _split_settings(lines)
    lines = [line.strip() for line in lines]
    first_negative = next((index for index, line in enumerate(lines) if line.startswith(_NEGATIVE_PREFIX)), len(lines))
    negative = [line.removeprefix(_NEGATIVE_PREFIX).strip() for line in lines[first_negative:]]
    return _metadata_from("\n".join(lines[:first_negative]), "\n".join(negative), settings)


def _split_settings(lines: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the lines before the last one of settings, and these; extensions write lines `Template: …` behind it."""
    index = next((k for k in reversed(range(len(lines))) if lines[k].startswith(_FIRST_SETTING)), len(lines))
    behind = [line.partition(": ") for line in lines[index + 1 :]]
    if index == len(lines) or not all(_NAME.fullmatch(name) for name, _, _ in behind):
        return lines, {}
    settings = dict(_parse_settings(lines[index]))
    if len(settings) < _MIN_SETTINGS:
        return lines, {}
    return lines[:index], settings | {name: value.strip() for name, _, value in behind}


class ExtraNetwork(NamedTuple):
    """A tag of a prompt, such as `<lora:NAME:WEIGHT>`."""

    tag: str
    lora: str | None  # its part after the kind, if it is a LoRA


def split_networks(prompt: str) -> tuple[str, list[ExtraNetwork]]:
    """Return a prompt without its tags of extra networks, and these, as A1111 does; `lyco` is a LoRA, too."""
    networks = [
        ExtraNetwork(tag[0], tag[2] if tag[1].lower() in _LORA_KINDS else None) for tag in _NETWORK_TAG.finditer(prompt)
    ]
    return (_NETWORK_TAG.sub("", prompt).strip(), networks) if networks else (prompt, [])


def loras_of(networks: Sequence[ExtraNetwork]) -> list[Lora]:
    """Return the LoRAs among `networks`; without a weight it is 1, as in A1111, and equal weights are one.

    Raises InvalidField: a weight is no number; A1111's separate weights for text encoder and UNet are not supported.
    """
    loras = []
    for tag, lora in networks:
        if lora is None:
            continue
        name, *weights = lora.split(":")
        try:
            (weight,) = {float(each) if each else 1.0 for each in weights} or {1.0}
        except ValueError as error:
            raise InvalidField(
                f"prompt has {short_repr(tag)}, whose weight is not one number; allowed is <lora:NAME:WEIGHT>.",
                field="prompt",
            ) from error
        loras.append(Lora(name, weight))
    return loras


def _parse_settings(line: str) -> Iterator[tuple[str, str]]:
    """Yield the settings of `Name: value, Name: "a value, in quotes", Name: [JSON], …`; SD.Next has "|" for ","."""
    position, separator = 0, "|" if _BAR_SEPARATED.match(line) else ","
    starts: tuple[str, ...] = ('"', "[", "{")
    num_json = 0
    while (colon := line.find(":", position)) >= 0:
        name = line[position:colon].rpartition(separator)[2].strip()
        start = colon + 1 + (line[colon + 1 : colon + 2] == " ")
        end, value = line.find(separator, start), None
        if line.startswith(starts, start):
            num_json += line[start] != '"'
            starts = starts if num_json < _MAX_JSON_VALUES else starts[:1]
            with contextlib.suppress(ValueError, RecursionError):
                decoded, after = _JSON_DECODER.raw_decode(line, start)
                value = decoded if isinstance(decoded, str) else line[start:after]
                value = value.encode("utf-8", "replace").decode()  # unpaired surrogates, which JSON can contain
                end = line.find(separator, after)
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

    has_settings = bool(settings)
    size = take("Size", r"\d{1,6}x\d{1,6}")
    width, height = (int(side) for side in size.split("x")) if size else (None, None)
    guidance = take("CFG scale", _NUMBER)
    # Forge's name for what FLUX was distilled from; its CFG scale is then 1, which is none.
    if guidance in (None, "1", "1.0") and (distilled := take("Distilled CFG Scale", _NUMBER)) is not None:
        guidance = distilled
    strength = None if "Hires upscale" in settings else take("Denoising strength", r"[01](\.\d{1,17})?")
    version = take("Version", rf"{_VERSION_PREFIX}\S+")
    calls = take("Calls", r"0\.\d{1,17}") if version else None
    clip_skip = take("Clip skip", r"[1-9]\d?")
    syntax: PromptSyntax | None = None
    if version:
        syntax = "a1111" if take("Prompt syntax", "a1111") else None
    elif has_settings and _WEIGHTS.search(f"{prompt} {negative_prompt}"):
        syntax = "a1111"
    loras: tuple[Lora, ...] = ()
    with contextlib.suppress(InvalidField):  # then the tags stay in the prompt
        plain, networks = split_networks(prompt)
        if all(network.lora is not None for network in networks):
            loras, prompt = tuple(loras_of(networks)), plain
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
        calls=None if calls is None else float(calls),
        prompt_syntax=syntax,
        clip_skip=None if clip_skip is None else int(clip_skip),
        other=settings,
    )


def _scheduler_name(sampler: str | None, schedule_type: str | None) -> str | None:
    if sampler is None:
        return None
    try:
        return scheduler_for(sampler, schedule_type)
    except InvalidField:  # shown as it is; a request with it is rejected by name
        return sampler if schedule_type is None else f"{sampler} {schedule_type}"
