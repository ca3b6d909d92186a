"""The files that serving a model needs: configurations, vocabularies, and weights as safetensors. Pure.

Of weights those in full precision; fp16 ones only where there are no others. Patterns are those of fnmatch, relative to
the model's folder.
"""

import fnmatch
from collections.abc import Collection

from noria.errors import ModelError, short_repr
from noria.models.families import INDEX_FILES
from noria.models.family import Family
from noria.models.files.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.files.sentencepiece_file import SPIECE
from noria.models.files.weights import GGUF_PART, PICKLES

_MAX_NAMED = 3
_HEADS = ("sparse_linear.safetensors", "colbert_linear.safetensors")  # bge-m3's
FP16 = ".fp16"


def find_model_root(paths: Collection[str], source: str) -> str:
    """Return the folder of a listing that is the model: "", or for instance "pipeline/", as MLflow has it.

    Raises ModelError: there is none, or there are several side by side.
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


def text_patterns(family: Family) -> list[str]:
    """Return the patterns of the files of a model that are no weights."""
    of_parts = [f"{_prefix(part)}*.{suffix}" for part in family.parts for suffix in ("json", "txt")]
    of_t5 = [f"{_prefix(name)}{SPIECE}" for name, part in family.parts.items() if "T5Tokenizer" in part.classes]
    return [family.index_file, "noria.json", "chat_template.jinja", "artifact.metadata", *_HEADS, *of_parts, *of_t5]


def weight_patterns(family: Family, part: str, variant: str = "") -> list[str]:
    """Return the patterns of the weights of a part; `variant` is empty or `FP16`."""
    stem = f"{_prefix(part)}{family.parts[part].weights}"
    patterns = [f"{stem}{variant}.safetensors", f"{stem}{variant}-?????-of-?????.safetensors"]
    return patterns if not variant else [*patterns, f"{stem}-?????-of-?????{variant}.safetensors"]  # the older form


def select_needed_files(paths: Collection[str], family: Family, source: str) -> list[str]:
    """Return those of `paths`, which are relative to the model's folder, that serving it can need, in order.

    Raises ModelError: a part has weights, but only as pickles.
    """
    needed = _matching(paths, text_patterns(family))
    for part, each in family.parts.items():
        if not each.weights or (each.is_optional and not _matching(paths, [f"{_prefix(part)}{each.config}"])):
            continue
        patterns = [weight_patterns(family, part, variant) for variant in ("", FP16)]
        if part == GGUF_PART:
            patterns.append([f"{_prefix(part)}*{GGUF_SUFFIX}"])
        if found := next(filter(None, (_matching(paths, names) for names in patterns)), None):
            needed += found
        elif pickles := _matching(paths, [f"{_prefix(part)}*{suffix}" for suffix in PICKLES]):
            raise ModelError(
                f"{source}: the weights {short_repr(pickles[0])} are a pickle, which can run code when loaded; only "
                "safetensors are supported. Convert a copy with the command that `noria doctor COPY` prints."
            )
    return sorted(set(needed))


def _prefix(part: str) -> str:
    return f"{part}/" if part else ""


def _matching(paths: Collection[str], patterns: Collection[str]) -> list[str]:
    """Return the sorted paths that match a pattern, whose `*` stands for no slash."""
    return sorted(
        path
        for path in paths
        if any(path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    )
