"""The sources that may be read where others than the operator name them: `POST /v1/registry/versions`.

The hub, MLflow's server and the models in packages are the operator's choice already. Folders of this machine and URLs
of stores are not: with any of them allowed, a client could have the server read each file and each host that it
reaches. So they must be below a folder or URL of `registry.source_roots`.
"""

import pathlib
import re
from collections.abc import Sequence

from msgspec import Struct

from noria.errors import ModelError, short_repr
from noria.registry.model_folder import PACKAGED
from noria.registry.sources.source import FileSource, FilesystemSource, LocalSource, Source

_GIB = 2**30
_BELOW = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9_.+@=-]+)*/?")  # no "..", patterns, escapes or empty names


class SourceLimits(Struct, frozen=True):
    """The limits of a server."""

    roots: tuple[str, ...]
    max_gib: float

    def check(self, source: Source) -> Source:
        """Return the source, of a folder where it really is. Raises ModelError: it is not below a root."""
        match source:
            case LocalSource(name) if name not in PACKAGED:
                folder = _real_folder(name)
                roots = [_real_folder(root) for root in self.roots]
                if folder is None or not any(root is not None and folder.is_relative_to(root) for root in roots):
                    raise self._not_allowed(name)
                return LocalSource(str(folder))
            case FileSource(name):  # its conversion takes minutes and the memory of a model
                raise self._not_allowed(name)
            case FilesystemSource(url) if not any(_is_below(url, root) for root in self.roots):
                raise self._not_allowed(url)
        return source

    def check_size(self, url: str, size_bytes: int) -> None:
        """Raise ModelError if a model is too large."""
        if size_bytes > self.max_gib * _GIB:
            raise ModelError(
                f"{url} has {size_bytes} bytes of what serving needs; registry.max_source_gib allows {self.max_gib:g} "
                "GiB over HTTP. The operator can add it: noria models add."
            )

    def _not_allowed(self, text: str) -> ModelError:
        """The same whether there is such a folder or not."""
        return ModelError(
            f"{short_repr(text)} may not be read over HTTP; allowed are bundled, minilm, hf://OWNER/NAME, "
            f"mlflow:models:/NAME@ALIAS, and folders below those of registry.source_roots ({_listed(self.roots)}). The "
            "operator can add it: noria models add."
        )


def _real_folder(name: str) -> pathlib.Path | None:
    """Return the folder that an absolute path names, without links; None: it is none, or has too many links."""
    if not name.startswith("/"):
        return None
    try:
        return pathlib.Path(name).resolve()
    except (OSError, RuntimeError, ValueError):
        return None


def _is_below(url: str, root: str) -> bool:
    root = root.rstrip("/")
    return "://" in root and url.startswith(root) and _BELOW.fullmatch(url[len(root) :]) is not None


def _listed(roots: Sequence[str]) -> str:
    return ", ".join(roots) or "none is set"
