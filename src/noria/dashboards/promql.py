"""Finds the metrics in a PromQL expression. It is no parser: it removes everything that cannot be a metric name.

The tests validate the expressions with Prometheus itself.
"""

import re

_NON_METRIC_PATTERNS = (
    r'"(?:\\.|[^"\\])*"',  # strings
    r"\{[^}]*\}",  # label matchers
    r"\[[^\]]*\]",  # ranges
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)",  # labels kept
    r"\b(?:and|or|unless|bool|offset)\b",
    r"[A-Za-z_]\w*\s*(?=\()",  # functions and aggregations
    r"\b\d[\w.]*",  # numbers and durations
)
_NAME = re.compile(r"[A-Za-z_:][\w:]*")


def metrics_in(expr: str) -> list[str]:
    """Return the names of the metrics in `expr`, each once, in order."""
    for pattern in _NON_METRIC_PATTERNS:
        expr = re.sub(pattern, " ", expr)
    return list(dict.fromkeys(_NAME.findall(expr)))
