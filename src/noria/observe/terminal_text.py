"""Makes text from elsewhere (a prompt, a file, a server) safe to print on a terminal. Pure."""

import re

UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Matches characters that end a line, move the cursor, set colours, change the reading direction or are surrogates."""


def escape_unprintable(text: str) -> str:
    """Return `text` with each unprintable character, including line ends, written as a Python escape."""
    return UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def escape_for_terminal(text: str) -> str:
    r"""Escape as `escape_unprintable` does, but keep `\n`."""
    return "\n".join(map(escape_unprintable, text.split("\n")))


def escape_in_json(text: str) -> str:
    """Return JSON with each unprintable character in its strings as JSON's escape: the same values."""
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
