"""Which metrics a PromQL expression asks for. Not a parser: it strikes out what cannot be a metric's name, and the rest is one.

Prometheus itself judges the expressions, in the tests.
"""

import re

_NON_METRIC_PATTERNS = (
    r'"(?:\\.|[^"\\])*"',  # strings
    r"\{[^}]*\}",  # labels asked for
    r"\[[^\]]*\]",  # ranges
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)",  # labels kept
    r"\b(?:and|or|unless|bool|offset)\b",
    r"[A-Za-z_]\w*\s*(?=\()",  # functions and aggregations
    r"\b\d[\w.]*",  # numbers and durations
)
_NAME = re.compile(r"[A-Za-z_:][\w:]*")


def metrics_in(expr: str) -> list[str]:
    """Their names, each once, in order."""
    for pattern in _NON_METRIC_PATTERNS:
        expr = re.sub(pattern, " ", expr)
    return list(dict.fromkeys(_NAME.findall(expr)))
