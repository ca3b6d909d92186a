"""Text from elsewhere, such as a file or a server, made safe for a terminal."""

import re

# Nothing in it may move a terminal's cursor, colour it, or turn the reading direction round.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_for_terminal(text: str) -> str:
    """`text` with everything that commands a terminal written out, as Python would; a line's end stays."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
