"""Which files of a listing serving a model needs: configurations, vocabularies, and weights as safetensors. Pure."""

import fnmatch
from collections.abc import Collection

from noria.errors import ModelError, short_repr
from noria.models.families import FAMILIES, INDEX_FILES, Part
from noria.models.weights import PICKLES

_MAX_NAMED = 3
_SHARD = "-?????-of-?????"


def find_model_root(paths: Collection[str], source: str) -> str:
    """Return the folder of a listing that is the model: "", or for instance "pipeline/", as MLflow has it.

    Raises:
        ModelError: there is none, or there are several side by side.

    """
    for name in INDEX_FILES:
        folders = {path[: -len(name)] for path in paths if f"/{path}".endswith(f"/{name}")}
        depth = min((folder.count("/") for folder in folders), default=0)
        found = sorted(folder for folder in folders if folder.count("/") == depth)
        if len(found) > 1:
            raise ModelError(f"{source} has several models: {', '.join(found[:_MAX_NAMED])}. Name the folder of one.")
        if found:
            return found[0]
    raise ModelError(
        f"{source} has neither model_index.json nor config.json: it is no model in diffusers or transformers format."
    )


def select_needed_files(paths: Collection[str], source: str) -> list[str]:
    """Return those of `paths`, which are relative to the model's folder, that serving it can need, in order.

    Of weights those in full precision; fp16 ones only where there are no others.

    Raises:
        ModelError: a part has weights, but only as pickles.

    """
    index = next((name for name in INDEX_FILES if name in paths), None)
    needed = {path for path in paths if path in (index, "noria.json")}
    for family in FAMILIES.values():
        if family.index_file != index:
            continue
        for name, part in family.parts.items():
            inside = f"{name}/" if name else ""
            of_part = [path for path in paths if path.startswith(inside) and "/" not in path[len(inside) :]]
            needed |= {path for path in of_part if path.endswith((".json", ".txt"))}
            needed |= set(_weights(part, inside, of_part, source))
    return sorted(needed)


def _weights(part: Part, inside: str, paths: list[str], source: str) -> list[str]:
    """Return the paths of a part's weights. Raises ModelError: they are pickles."""
    if not part.weights:
        return []
    for variant in ("", ".fp16"):
        stem = f"{inside}{part.weights}{variant}"
        names = (f"{stem}.safetensors", f"{stem}{_SHARD}.safetensors")
        if found := [path for path in paths if any(fnmatch.fnmatchcase(path, name) for name in names)]:
            return found
    if pickles := sorted(path for path in paths if path.endswith(PICKLES)):
        raise ModelError(
            f"{source}: the weights {short_repr(pickles[0])} are a pickle, which can run code when loaded; only "
            "safetensors are supported. If you trust it, load it with diffusers or transformers, and add the folder "
            "that save_pretrained writes."
        )
    return []
