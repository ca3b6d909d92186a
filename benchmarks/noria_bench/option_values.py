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


def read_whole(text: str, low: int, high: int, allowed: str) -> int:
    """Parse a whole number from `low` to `high`. Raises ValueError, which says what is `allowed`."""
    if not text.isascii() or not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"{text!r}; {allowed}")
    return int(text)


def read_whole_numbers(text: str, low: int, high: int, allowed: str) -> list[int]:
    """Parse `1,2,4`, whole numbers from `low` to `high`. Raises ValueError, which says what is `allowed`."""
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and low <= int(word) <= high for word in words):
        raise ValueError(f"{text!r}; {allowed}")
    return [int(word) for word in words]
