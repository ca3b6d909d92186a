"""Knows by their metadata the programs whose settings are not read, so that errors name them. Pure; never raises.

Their settings are graphs, or have other meanings than names suggest: read as A1111's text they would be wrong.
"""

import json
from collections.abc import Mapping
from typing import Any

_BY_KEYWORD: Mapping[str, str] = {
    "workflow": "ComfyUI",
    "prompt": "ComfyUI",
    "invokeai_metadata": "InvokeAI",
    "invokeai_graph": "InvokeAI",
    "invokeai_workflow": "InvokeAI",
    "sd-metadata": "InvokeAI",
    "Dream": "InvokeAI",
    "fooocus_scheme": "Fooocus",
    "use_stable_diffusion_model": "Easy Diffusion",
    "sui_image_params": "SwarmUI",
}
"""Programs by the keyword of a PNG's text that only they write."""

_BY_NAME: Mapping[str, str] = {
    "novelai": "NovelAI",
    "comfyui": "ComfyUI",
    "invokeai": "InvokeAI",
    "draw things": "Draw Things",
    "swarmui": "SwarmUI",
    "fooocus": "Fooocus",
    "easy diffusion": "Easy Diffusion",
    "midjourney": "Midjourney",
    " job id: ": "Midjourney",  # behind the prompt
    "dreamstudio": "DreamStudio",
}
"""Programs by what a text that names a program has in it, in lower case."""

_BY_JSON_KEY: Mapping[str, str] = {
    "sui_image_params": "SwarmUI",
    "metadata_scheme": "Fooocus",
    "adm_guidance": "Fooocus",
    "fooocus_v2_expansion": "Fooocus",
    "class_type": "ComfyUI",
    "last_node_id": "ComfyUI",
    "app_version": "InvokeAI",
    "v2": "Draw Things",
    "uc": "NovelAI",
}
"""Programs by a key of their JSON; the first that is found."""

PROGRAM_KEYWORDS = ("Software", "Title", "Source", "Author", "Description", "Comment", "XML:com.adobe.xmp")
"""PNG's keywords whose text may name a program."""

KEYWORDS = (*_BY_KEYWORD, *PROGRAM_KEYWORDS)
"""All of PNG's keywords by which `name_program` knows programs."""


def name_program(texts: Mapping[str, str]) -> str | None:
    """Return the program that wrote these texts, by their keywords or names of entries; None: nothing says."""
    for keyword, program in _BY_KEYWORD.items():
        if keyword in texts and (keyword != "prompt" or is_json(texts[keyword])):
            return program
    for text in texts.values():
        lower = text[:10_000].lower()
        if found := next((program for name, program in _BY_NAME.items() if name in lower), None):
            return found
        if by_key := _program_of_json(text):
            return by_key
    return None


def is_json(text: str) -> bool:
    """Whether a text is a JSON object or list, as no text of A1111 is."""
    return isinstance(_parse(text), dict | list)


def _program_of_json(text: str) -> str | None:
    tree = _parse(text)
    objects = [tree, *tree.values()] if isinstance(tree, dict) else []
    keys = {str(key).lower() for each in objects if isinstance(each, dict) for key in each}
    return next((program for key, program in _BY_JSON_KEY.items() if key in keys), None)


def _parse(text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
