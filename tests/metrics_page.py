"""Values of `/metrics`: of the families that a test looks at, since to parse all of a page takes 0.1 s."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples_of(page: str, *families: str) -> Iterator[Sample]:
    """Yield the samples of `families`, which are named as the parser names them, without `_total`."""
    lines = [line for line in page.splitlines(keepends=True) if line.removeprefix("# TYPE ").startswith(families)]
    for family in text_string_to_metric_families("".join(lines)):
        if family.name in families:
            yield from family.samples
