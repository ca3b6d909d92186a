"""Names what a body of A1111's asks for that has no effect here, so that no image is silently another one. Pure."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from noria.errors import short_repr
from noria.frontend.protocols.a1111.off_values import is_off

HEADER = "X-Noria-Ignored"
_MAX_NAMED = 20
_MAX_WEIGHTS = 3  # that are named of a prompt
_MAX_HEADER_CHARS = 1000

# Weights of words, which A1111 reads unless they are escaped; and words that divide a prompt.
_WEIGHT = re.compile(r"(?<!\\)\((?:[^()\\]|\\.)*\)|(?<!\\)\[(?:[^\[\]\\]|\\.)*\]|\b(?:AND|BREAK)\b")

# These change no image: they are about files, or of a feature that is off.
_WITHOUT_EFFECT = frozenset({
    "comments", "do_not_save_grid", "do_not_save_samples", "firstpass_image", "firstphase_height", "firstphase_width",
    "force_task_id", "image_cfg_scale", "include_init_images", "inpaint_full_res_padding", "mask_round",
    "override_settings_restore_afterwards", "s_tmax", "s_tmin", "save_images", "script_args", "subseed",
})  # fmt: skip
_OFF_VALUES = {"clip_skip": (1,)}


def ignored_fields(sent: Mapping[str, object], known: frozenset[str], prefix: str = "") -> Iterator[str]:
    """Yield the names of fields that are on and not `known`."""
    for name, value in sent.items():
        is_known = name in known or name in _WITHOUT_EFFECT or name.startswith("hr_")
        if not is_known and not is_off(value, *_OFF_VALUES.get(name, ())):
            yield f"{prefix}{name[:80]}"


def ignored_weights(field: str, prompt: str) -> Iterator[str]:
    """Yield what says that the weights of a prompt's words are taken literally, if it has some."""
    found = list(dict.fromkeys(match[0] for match in _WEIGHT.finditer(prompt)))
    if found:
        more = " and others" if len(found) > _MAX_WEIGHTS else ""
        yield f"weights in {field}: {', '.join(map(short_repr, found[:_MAX_WEIGHTS]))}{more}"


def ignored_tokens(num_tokens: int) -> list[str]:
    """Return what says that the ends of the prompts are not read, if they are not."""
    return [f"{num_tokens} tokens at the end of the prompts: the model reads no more"] if num_tokens else []


def header_of(ignored: list[str]) -> dict[str, str]:
    """Return the header of a response that names what was ignored."""
    text = "; ".join(ignored[:_MAX_NAMED])
    while len(quoted := quote(text, safe=" ;:,()[]<>'\"=/")) > _MAX_HEADER_CHARS:
        text = text[: len(text) * _MAX_HEADER_CHARS // len(quoted)]  # whole characters
    return {HEADER: quoted} if quoted else {}
