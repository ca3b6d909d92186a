"""Secrets are not for logs: what looks like one is taken out of any text. Pure.

Taken out are API keys of ours, webhooks' secrets, the values of the headers that carry credentials, passwords in URLs, and values that
are called key, token, secret, password or signature. What merely looks like one is lost too: that is the cheaper mistake.
"""

import re
from collections.abc import Mapping

REDACTED = "[redacted]"

_VALUE = r"""(?:'[^']*'|"[^"]*"|\\"[^"]*"|[^\s&"'#;,)\]}]+)"""  # the third is JSON that is a text in JSON
_PARAMETER = r"""[a-z0-9_-]{1,32}=(?:\\?"[^"\n]{0,512}"|[^\s"',;\\]+)(?:,\s{0,4})?"""  # of Authorization: Digest
_AFTER_NAME = r"""\\?["']?\s{0,4}[:=,]\s{0,4}(?:b(?=["']))?\\?["']?"""  # as Python, JSON and HTTP write a header

# Nothing else is looked for in a text without one of these: most texts have none.
_SUSPICIOUS = re.compile(
    r"://|authorization|api.?key|cookie|bearer|whsec_|noria_|key|token|secret|pass|pwd|sig", re.IGNORECASE
)
_SECRETS = (
    # postgresql://user:password@host. A password has no raw slash in a URL, but may have a raw @.
    (
        re.compile(r"\b([a-z][a-z0-9+.-]{0,30}://[^\s:/@'\"]{0,256}:)[^\s/'\"]{1,256}@", re.IGNORECASE),
        rf"\1{REDACTED}@",
    ),
    # Authorization: Bearer …, {"x-api-key": "…"}, (b'authorization', b'…')
    (
        re.compile(
            rf"\b((?:proxy-)?authorization|x-api-key)({_AFTER_NAME})"
            rf"(?:(?:bearer|basic|digest|token|aws4-hmac-sha256)\s+)?(?:(?:{_PARAMETER})+|[^\s\"',;\\]+)",
            re.IGNORECASE,
        ),
        rf"\1\2{REDACTED}",
    ),
    # Cookie: a=1; b=2
    (re.compile(rf"\b((?:set-)?cookie)({_AFTER_NAME})[^\"'\\\n]+", re.IGNORECASE), rf"\1\2{REDACTED}"),
    (re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{16,}", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"whsec_[A-Za-z0-9+/=_-]{8,}"), f"whsec_{REDACTED}"),
    (re.compile(r"(?<![A-Za-z0-9])noria_[A-Za-z0-9_-]{43,}"), f"noria_{REDACTED}"),  # `keys.draw_key`
    (
        re.compile(
            r"((?:password|passwd|pwd|secret|token|api_?key)\\?[\"']?\s{0,4}[:=]\s{0,4})" + _VALUE,
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    (
        re.compile(r"(?<![a-z0-9])((?:key|sig|signature)=)" + _VALUE, re.IGNORECASE),
        rf"\1{REDACTED}",
    ),
)
_SECRET_NAME = re.compile(r"authorization|api.?key|cookie|secret|token|passw", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` without what looks like a secret."""
    if _SUSPICIOUS.search(text):
        for pattern, replacement in _SECRETS:
            text = pattern.sub(replacement, text)
    return text


def redact_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """`fields` without the values of those whose names say that they are secret."""
    return {name: REDACTED if _SECRET_NAME.search(name) else value for name, value in fields.items()}
