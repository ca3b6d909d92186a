"""The packages that a distribution declares and no others, linked from this environment: no registry, no copies."""

import importlib.metadata
import pathlib
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Distributions = Mapping[str, importlib.metadata.Distribution]


def link_packages(folder: pathlib.Path, requirements: Iterable[str], own: Distributions | None = None) -> None:
    """Fill `folder` with links to what `requirements` need of this environment, Noria's distributions excepted.

    `own` has distributions that are not installed here, by name: their requirements are followed.

    Raises PackageNotFoundError: a requirement is not installed.
    """
    for distribution in _closure(requirements, own or {}):
        source = pathlib.Path(str(distribution.locate_file("")))
        for file in distribution.files or ():
            if ".." not in file.parts:  # a program
                _link(source, folder, file.parts)


def _closure(requirements: Iterable[str], own: Distributions) -> Iterable[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    todo, done = [*map(Requirement, requirements)], set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if (key := (name, frozenset(wanted.extras))) in done:
            continue
        done.add(key)
        distribution = own.get(name) or importlib.metadata.distribution(name)
        if not name.startswith("noria-"):
            found[name] = distribution
        extras = {"", *wanted.extras}
        declared = map(Requirement, distribution.requires or ())
        todo += [r for r in declared if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return found.values()


def _link(source: pathlib.Path, folder: pathlib.Path, parts: tuple[str, ...]) -> None:
    """Link the highest folder of a file that is of one distribution alone, unlike `google` or `opentelemetry`."""
    place = pathlib.Path(parts[0])
    for part in parts[1:]:
        if place.suffix == ".dist-info" or (source / place / "__init__.py").exists():
            break
        place /= part
    if not (folder / place).exists():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(source / place)
