"""Says what is wrong with a body: turns msgspec's messages into errors that name fields, values got and allowed.

One error names all invalid fields, and unknown ones.
"""

import contextlib
import math
import re
from collections.abc import Sequence
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from noria.errors import InvalidBody, InvalidField, did_you_mean, short_repr
from noria.errors.problems import combined

T = TypeVar("T", bound=msgspec.Struct)

INVALID_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of msgspec for invalid JSON; a string in an ignored field is decoded only when the field is."""

_JSON_TYPE_NAMES = {  # one, several
    "int": ("an integer", "integers"),
    "float": ("a number", "numbers"),
    "str": ("a string", "strings"),
    "bool": ("true or false", "true or false"),
    "array": ("a list", "lists"),
    "object": ("an object", "objects"),
    "null": ("null", "null"),
}


# Names that other APIs have for fields of this server's; the first that a body has is suggested.
_NAMES_ELSEWHERE = {
    "inference_steps": ("num_inference_steps", "num_steps", "sample_steps", "sampling_steps", "steps"),
    "guidance_scale": ("cfg", "cfg_scale", "guidance"),
    "scheduler": ("sampler", "sampler_name", "sampling_method"),
    "size": ("aspect_ratio", "height", "image_size", "resolution", "width"),
    "n": ("batch_size", "n_iter", "num_images", "num_images_per_prompt", "num_outputs"),
    "strength": ("denoising_strength", "image_strength", "prompt_strength"),
    "image": ("image_url", "init_image", "init_images", "input_image"),
    "mask": ("mask_image", "mask_url"),
    "output_format": ("file_format", "format"),
    "format": ("file_format", "output_format"),
    "model": ("checkpoint", "model_id", "model_name", "sd_model_checkpoint"),
    "deadline_ms": ("timeout", "timeout_ms", "timeout_s"),
    "input": ("inputs", "text", "texts"),
    "inputs": ("input", "text", "texts"),
}


def _integer_if_integral(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


INTEGRAL_DECODER = msgspec.json.Decoder(float_hook=_integer_if_integral)

_BOUNDS = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}
_MAX_NAMED = 8  # unknown fields in a message
_MAX_SEARCHED_BYTES = 65_536  # bytes of a body that are searched for what is wrong with its JSON


def all_problems(
    text: str, raw: bytes, struct_type: type[T], *, strict: bool
) -> tuple[InvalidBody | InvalidField | None, dict[str, Any]]:
    """Return the error of all invalid fields, of which msgspec's message `text` has the first, and the valid fields.

    An empty text is a field that is left out, unless it is needed. None: there is no other invalid field.
    """
    try:
        fields = INTEGRAL_DECODER.decode(raw)
    except INVALID_JSON as error:  # in another field; a number out of range, or nesting too deep
        why = "in a body that is not UTF-8" if isinstance(error, UnicodeDecodeError) else "out of range"
        return _translate_validation_error(text, why, struct_type), {}
    first = _translate_validation_error(text, fields, struct_type)
    if not isinstance(first, InvalidField) or not isinstance(fields, dict):
        return first, {}
    found: list[InvalidField] = []
    valid, has_empty = {}, False
    for field in msgspec.structs.fields(struct_type):
        name = field.name
        if name not in fields:
            if field.required:
                found.append(InvalidField(f"{name} is missing.", field=name))
            continue
        try:
            msgspec.convert(fields[name], field.type, strict=strict)
            valid[name] = fields[name]
        except msgspec.ValidationError as error:
            if fields[name] == "" and not field.required:
                has_empty = True
                continue
            problem, _, path = str(error).partition(" - at `$")
            translated = _translate_validation_error(f"{problem} - at `$.{name}{path or '`'}", fields, struct_type)
            assert isinstance(translated, InvalidField)
            found.append(translated)
    unknown = [name for name in fields if name not in struct_type.__struct_fields__]
    if unknown and struct_type.__struct_config__.forbid_unknown_fields:
        found.append(_unknown_fields(unknown, struct_type.__struct_fields__))
    if not found:
        return None if has_empty else first, valid
    is_first = len(found) == 1 and not has_empty  # msgspec names the wrong value of a key that is there twice
    return first if is_first and len(unknown) < 2 else combined(found), valid


def _unknown_fields(names: Sequence[str], known: Sequence[str]) -> InvalidField:
    meanings = {other: name for name, others in _NAMES_ELSEWHERE.items() if name in known for other in others}
    hints = "".join(dict.fromkeys(did_you_mean(name, known, meanings) for name in names[:_MAX_NAMED]))
    named = ", ".join(map(short_repr, names[:_MAX_NAMED])) + (" and others" if len(names) > _MAX_NAMED else "")
    return InvalidField(
        f"unknown field{'s' if len(names) > 1 else ''} {named}.{hints} Known are: {', '.join(known)}.",
        field=names[0][:80],
    )


def invalid_json_message(raw: bytes, error: Exception) -> str:
    """Return the message for a body that is no JSON, which `error`, one of `INVALID_JSON`, says."""
    if not raw.strip():
        return "the body is empty; send a JSON object, whose fields /docs has."
    start = raw[:_MAX_SEARCHED_BYTES]
    hint = " NaN and Infinity are no JSON numbers." if re.search(rb"\b(NaN|Infinity)\b", start) else ""
    if re.search(rb"\\u[dD][89a-fA-F]", start):
        hint += r" Surrogates such as \ud83d are characters in pairs only."
    return f"the body is not JSON: {error}.{hint}"


def _translate_validation_error(text: str, fields: Any, struct_type: type[T]) -> InvalidBody | InvalidField:
    """Translate msgspec's message, such as "Expected `int | null`, got `str` - at `$.seed`".

    `fields` is the body, or what is said in place of values if it cannot be decoded.
    """
    problem, _, path = text.partition(" - at `$")
    path = path.strip("`").lstrip(".")
    field = re.split(r"[.\[]", path)[0]
    if (wrong := re.fullmatch(r"Expected `(.*)`, got `\w+`", problem)) and path not in ("", field):
        # With a key that is there twice, the path may lead nowhere.
        with contextlib.suppress(LookupError, TypeError, ValueError):
            allowed = _alternatives([_JSON_TYPE_NAMES[name][0] for name in wrong[1].split(" | ")])
            return InvalidField(f"{path} is {_value_at(path, fields)}; allowed is {allowed}.", field=field)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return InvalidField(f"{path}.{missing[1]} is missing.".lstrip("."), field=field or missing[1])
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        name = unknown[1]
        if path:
            return InvalidField(f"{path} has the unknown field {short_repr(name)}.", field=field)
        return _unknown_fields([name], struct_type.__struct_fields__)
    if "." in path or ("[" in path and problem.startswith("Expected `object`")):  # an object in a list
        return InvalidField(f"{path}: {problem}.", field=field)
    if not field:
        return InvalidBody(f"the body is not an object: {problem}.")
    if too_long := re.fullmatch(r"Expected `str` of length <= (\d+)", problem):
        return InvalidField(f"{field} has more than {too_long[1]} characters.", field=field)
    if kind := re.fullmatch(r"Expected `str` ((?:of length|matching regex) .*)", problem, re.DOTALL):
        return InvalidField(f"{field} is {_value_of(field, fields)}; allowed is a string {kind[1]}.", field=field)
    if bound := re.fullmatch(r"Expected `\w+` (>=|<=|>|<) (\S+)", problem):
        allowed = _BOUNDS[bound[1]].format(bound[2])
        return InvalidField(f"{field} is {_value_of(field, fields)}; allowed is {allowed}.", field=field)
    return InvalidField(f"{field} is {_value_of(field, fields)}; {_allowed_types(field, struct_type)}.", field=field)


def _value_at(path: str, value: Any) -> str:
    """Return what is at a path such as `inputs[0].shape`. Raises LookupError, TypeError and ValueError."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(.+?)\]", path):
        value = value[name] if name else value[int(index)]
    return _json_repr(value)


def _json_repr(value: object) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "out of range"  # JSON has no infinity: it is what `INTEGRAL_DECODER` makes of 1e999
    return msgspec.json.encode(value).decode() if value is None or isinstance(value, bool) else short_repr(value)


def _value_of(field: str, fields: Any) -> str:
    return fields if isinstance(fields, str) else _json_repr(fields[field])


def _allowed_types(field: str, struct_type: type[T]) -> str:
    declared = next(each.type for each in msgspec.structs.fields(struct_type) if each.name == field)
    return f"allowed is {_alternatives(_type_names(declared))}"


def _alternatives(names: list[str]) -> str:
    """Return "a", "a or b", "a, b or c"."""
    names = [each for name in names for each in (("true", "false") if name == _JSON_TYPE_NAMES["bool"][0] else (name,))]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _type_names(declared: Any, *, plural: bool = False) -> list[str]:
    """Return `int | None` as ["an integer", "null"], and `Literal["png", "webp"]` as ['"png"', '"webp"']."""
    if declared is NoneType:
        return ["null"]
    if isinstance(declared, str | int | float):
        return [msgspec.json.encode(declared).decode()]
    if get_origin(declared) in (list, tuple):
        items = _alternatives(_type_names(get_args(declared)[0], plural=True))
        return [f"{_JSON_TYPE_NAMES['array'][plural]} of {items}"]
    if get_origin(declared) is dict or (isinstance(declared, type) and issubclass(declared, msgspec.Struct)):
        return [_JSON_TYPE_NAMES["object"][plural]]
    if isinstance(declared, type):
        return [_JSON_TYPE_NAMES.get(declared.__name__, (declared.__name__, declared.__name__))[plural]]
    return [type_name for argument in get_args(declared) for type_name in _type_names(argument, plural=plural)]
