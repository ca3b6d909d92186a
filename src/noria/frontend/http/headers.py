"""The headers of a request, read once."""


class RequestHeaders(dict[str, str]):
    """The values of headers by their names in lower case; of several with one name, the first."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__({name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)})
        self._raw = raw

    def getlist(self, name: str) -> list[str]:
        """Return the values of all headers with this name."""
        return [value.decode("latin-1") for each, value in self._raw if each.decode("latin-1") == name]
