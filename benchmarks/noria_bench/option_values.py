"""Values of options that several benches have."""


def read_number(text: str, low: float, high: float, allowed: str) -> float:
    """Parse a number from `low` to `high`. Raises ValueError, which says what is `allowed`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ValueError(f"{text!r}; {allowed}")
    return value
