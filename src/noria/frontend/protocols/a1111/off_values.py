"""The values of A1111's clients that turn a feature off, in any form, and the error of a feature that is on. Pure."""

import contextlib
from collections.abc import Mapping, Sequence

from noria.errors import InvalidField, short_repr

Feature = tuple[str, tuple[object, ...]]
"""The feature that a field turns on, and the values besides the usual ones that mean it is off."""

_WORDS = {"": None, "none": None, "null": None, "false": False, "true": True}
_OFF_WORDS = ("no", "off")  # words of switches; a model may be called so
_SWITCHES = ("enabled", "enable", "is_enabled", "ad_enable", "ad_model", "soft inpainting")
_MAX_CHARS = 64  # characters of a text that may turn something off; files in base64 are longer
_MAX_VALUES = 1000  # values of a list or object that may be off
_USUAL = (0, -1)
_ZERO_IS_ON = frozenset({"initial_noise_multiplier"})


def is_off(value: object, *others: object, usual: Sequence[object] = _USUAL) -> bool:
    """Whether `value` is null, "", "None", false, 0, -1 or one of `others`, in any form; or has only such values.

    A list or object with more than `_MAX_VALUES` on all levels is on: to look at each would take long.
    """
    off_values, values, num_more = (*usual, *map(_plain, others)), [value], _MAX_VALUES
    while values:
        each = values.pop()
        if not isinstance(each, list | dict):
            if (plain := _plain(each)) is not None and plain not in off_values:
                return False
        elif (num_more := num_more - len(each)) < 0:
            return False
        else:
            values += each.values() if isinstance(each, dict) else each
    return True


def is_empty(value: object) -> bool:
    """Whether `value` says nothing: null, "", "None", or a list or an object of such values."""
    return is_off(value, usual=())


def _plain(value: object) -> object:
    """Return what a text says: a word of JSON, a number, or the text in lower case."""
    if not isinstance(value, str) or len(value) > _MAX_CHARS:
        return value
    text = value.strip().lower()
    with contextlib.suppress(ValueError):
        return float(text) if text[-1:].isdigit() else _WORDS.get(text, text)
    return text


def features_on(sent: Mapping[str, object], features: Mapping[str, Feature]) -> list[InvalidField]:
    """Return an error for each of `features` that `sent` turns on."""
    errors = []
    for name, (feature, off_values) in features.items():
        usual = (-1,) if name in _ZERO_IS_ON else _USUAL
        if not is_off(value := sent.get(name), *off_values, *_OFF_WORDS, usual=usual):
            off = " or ".join(map(short_repr, (*off_values, None)))
            message = f"{name} is {short_repr(value)}; {feature} is not supported: leave it out, or send {off}."
            errors.append(InvalidField(message, field=name))
    return errors


def is_script_off(script: object) -> bool:
    """Whether an always-on script does nothing: it has no arguments that are on, or the first switch is off."""
    arguments = script.get("args", None) if isinstance(script, dict) else script
    if is_off(arguments):
        return True
    values = arguments if isinstance(arguments, list) else [arguments]
    if len(values) > _MAX_VALUES:
        return False
    units = [each for each in values if isinstance(each, dict)]
    if units and all(isinstance(each, dict | bool) for each in values) and all(map(_is_unit_off, units)):
        return True
    if len(units) == len(values):
        return False
    for value in values:
        if _plain(value) is False:
            return True
        if not (is_off(value) or isinstance(value, str)) or _plain(value) is True:
            return False
    return False


def _is_unit_off(unit: Mapping[str, object]) -> bool:
    switches = [value for name, value in unit.items() if name.lower() in _SWITCHES]
    return is_off(unit) or any(map(is_off, switches))
