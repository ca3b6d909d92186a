"""Downloads what the settings name on the hub beside models, such as LoRAs, once; gives it readable names.

A refiner in a single file is converted, too.
"""

import functools
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping

import msgspec

from noria.config import Config, EngineConfig
from noria.errors import ConfigError, ModelError, short_repr
from noria.folders import data_folder
from noria.models.adapters.safety_folders import PREPROCESSOR_FILE
from noria.models.adapters.safety_folders import STEM as WEIGHT_STEM
from noria.models.diffusion.single_file.checkpoint_header import SUFFIX
from noria.models.location import HUB_FILE, hub_error, locate

_SCHEME = "hf://"
_LORA = re.compile(r"([\w.-]+)/([\w.-]+)(?:/([\w./-]+\.safetensors))?(?:@([\w./-]+))?", re.ASCII)
_REPOSITORY = re.compile(r"([\w.-]+)/([\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_REFINER = re.compile(r"([\w.-]+)/([\w.-]+)", re.ASCII)
_IP_ADAPTER = re.compile(r"([\w.-]+)/([\w.-]+)/([\w./-]+\.safetensors)(?:@([\w./-]+))?", re.ASCII)
_ENCODER = re.compile(r"([\w.-]+)/([\w.-]+)(?:/([\w./-]+))?(?:@([\w./-]+))?", re.ASCII)
_STEM = "diffusion_pytorch_model"
_SAFETENSORS = (".safetensors", "-*.safetensors", ".safetensors.index.json")
_CONTROLNET_FILES = ["config.json", *(f"{_STEM}{end}" for end in _SAFETENSORS)]
_ENCODER_FILES = ["config.json", *(f"{WEIGHT_STEM}{end}" for end in _SAFETENSORS)]
_CLASSIFIER_FILES = [*_ENCODER_FILES, PREPROCESSOR_FILE]
_CONTROLNET_FILES_FP16 = [
    f"{_STEM}.fp16.safetensors",
    f"{_STEM}.fp16-*.safetensors",
    f"{_STEM}-?????-of-?????.fp16.safetensors",
    f"{_STEM}.safetensors.index.fp16.json",
    f"{_STEM}.safetensors.fp16.index.json",
]


def download_hub_adapters(config: Config, environment: Mapping[str, str]) -> Config:
    """Return `config` with a folder in place of each entry of the hub.

    These are `hf://ORG/NAME[/FILE][@REVISION]` of `engine.loras`; `.controlnets` and `.safety_classifiers` are without
    FILE, `.refiners` without REVISION or with FILE. The LoRA of a repository with one file, or of FILE, is called NAME;
    of several files they are NAME-FILE. Others are called NAME. `.ip_adapters` are with FILE, and called so; the image
    encoder beside it is downloaded unless there are `.ip_adapter_encoders`, `hf://ORG/NAME[/FOLDER]`. What was
    downloaded before is taken from the hub's cache if the hub does not answer.

    A refiner can also be a single file, here or on the hub, which gets a folder, too; it is called like the file.

    Raises:
        ConfigError: an entry that begins with hf:// has another form.
        ModelError: the download failed, or the repository has no such file.
    """
    data, engine = data_folder(config, environment), config.engine
    downloads: dict[str, Callable[[str, pathlib.Path], pathlib.Path]] = {
        "loras": _lora_folder,
        "controlnets": _controlnet_folder,
        "ip_adapters": functools.partial(_ip_adapter_file, engine),
        "ip_adapter_encoders": _encoder_folder,
        "safety_classifiers": _classifier_folder,
        "refiners": functools.partial(_refiner_folder, engine),
    }
    entries = {
        setting: tuple(
            _local_entry(entry, download, data / f"hub_{setting}", takes_files=setting == "refiners")
            for entry in getattr(engine, setting)
        )
        for setting, download in downloads.items()
    }
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(engine, **entries))


def _local_entry(
    entry: str, download: Callable[[str, pathlib.Path], pathlib.Path], parent: pathlib.Path, *, takes_files: bool
) -> str:
    """Return an entry that names a folder: `entry` itself unless it names the hub, or a single file."""
    model, _, source = entry.rpartition("=") if not entry.startswith(_SCHEME) else ("", "", entry)
    if not source.startswith(_SCHEME) and not (takes_files and source.endswith(SUFFIX)):
        return entry
    folder = download(source, parent)
    return f"{model}={folder}" if model else str(folder)


def _match(pattern: re.Pattern[str], source: str, setting: str, what: str, form: str) -> re.Match[str]:
    match = pattern.fullmatch(source.removeprefix(_SCHEME))
    if match is None:
        raise ConfigError(f"{setting}: {short_repr(source)} names no {what} of the hub. The form is {form}.")
    return match


def _folder_of(match: re.Match[str], parent: pathlib.Path) -> pathlib.Path:
    return parent / "--".join(part.replace("/", "-") for part in match.groups(default="") if part)


def _lora_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    form = "hf://ORG/NAME[/FILE.safetensors][@REVISION]"
    match = _match(_LORA, source, "engine.loras", "LoRA", form)
    org, name, file, revision = match.groups()
    repo, ignored = f"{org}/{name}", [] if file else ["*/*"]  # folders of a repository with a whole model
    snapshot = _download(repo, revision, [file or "*.safetensors"], ignored, "LoRAs")
    files = [snapshot / file] if file else sorted(snapshot.glob("*.safetensors"))
    if not files or not files[0].is_file():
        raise ModelError(f"engine.loras: {repo!r} on the hub has no {file or 'file of safetensors outside folders'}.")
    folder = _folder_of(match, parent)
    names = {name if len(files) == 1 else f"{name}-{each.stem}": each for each in files}
    _link({f"{name}.safetensors": each for name, each in names.items()}, folder)
    return folder


def _controlnet_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    match = _match(_REPOSITORY, source, "engine.controlnets", "ControlNet", "hf://ORG/NAME[@REVISION]")
    repo, name, revision = f"{match[1]}/{match[2]}", match[2], match[3]
    snapshot = _download(repo, revision, _CONTROLNET_FILES, [], "ControlNet")
    if not any(snapshot.glob(f"{_STEM}*.safetensors")):
        snapshot = _download(repo, revision, _CONTROLNET_FILES_FP16, [], "ControlNet")
    folder = _folder_of(match, parent)
    _link({name: snapshot}, folder)
    return folder / name


def _ip_adapter_file(engine: EngineConfig, source: str, parent: pathlib.Path) -> pathlib.Path:
    form = "hf://ORG/NAME/FILE.safetensors[@REVISION]"
    match = _match(_IP_ADAPTER, source, "engine.ip_adapters", "IP-Adapter", form)
    repo, file = f"{match[1]}/{match[2]}", pathlib.PurePosixPath(match[3])
    encoder = file.parent / "image_encoder"
    wanted = [] if engine.ip_adapter_encoders else [f"{encoder}/{each}" for each in _ENCODER_FILES]
    snapshot = _download(repo, match[4], [str(file), *wanted], [], "IP-Adapter")
    if not (snapshot / file).is_file():
        raise ModelError(f"engine.ip_adapters: {repo!r} on the hub has no {file}.")
    folder, targets = _folder_of(match, parent), {file.name: snapshot / file}
    if wanted and (snapshot / encoder).is_dir():
        targets["image_encoder"] = snapshot / encoder
    _link(targets, folder)
    return folder / file.name


def _encoder_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    setting = "engine.ip_adapter_encoders"
    match = _match(_ENCODER, source, setting, "image encoder", "hf://ORG/NAME[/FOLDER][@REVISION]")
    inside = pathlib.PurePosixPath(match[3] or "")
    wanted = [str(inside / each) for each in _ENCODER_FILES]
    snapshot = _download(f"{match[1]}/{match[2]}", match[4], wanted, [], "image encoder")
    folder = _folder_of(match, parent)
    _link({"image_encoder": snapshot / inside}, folder)
    return folder / "image_encoder"


def _classifier_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    match = _match(_REPOSITORY, source, "engine.safety_classifiers", "classifier", "hf://ORG/NAME[@REVISION]")
    snapshot = _download(f"{match[1]}/{match[2]}", match[3], _CLASSIFIER_FILES, [], "safety classifier")
    folder = _folder_of(match, parent)
    _link({match[2]: snapshot}, folder)
    return folder / match[2]


def _refiner_folder(engine: EngineConfig, source: str, parent: pathlib.Path) -> pathlib.Path:
    if source.endswith(SUFFIX) or HUB_FILE.fullmatch(source):
        converted, name = locate(source, engine)
        _link({name: converted}, parent / converted.name)
        return parent / converted.name / name
    match = _match(_REFINER, source, "engine.refiners", "refiner", "hf://ORG/NAME")
    snapshot, _ = locate("/".join(match.groups()))
    folder = _folder_of(match, parent)
    _link({match[2]: snapshot}, folder)
    return folder / match[2]


def _download(repo: str, revision: str | None, allowed: list[str], ignored: list[str], what: str) -> pathlib.Path:
    """Return the folder with those of the repository's files that `allowed` and not `ignored` name."""
    import huggingface_hub  # takes half a second, which other settings need not spend

    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=allowed, ignore_patterns=ignored)
        )
    except Exception as error:  # hub, network and cache raise many kinds; the operator reads one sentence
        raise hub_error(f"the {what} of {repo!r}", error) from error


def _link(targets: Mapping[str, pathlib.Path], folder: pathlib.Path) -> None:
    """Make `folder` one of links to `targets`, by their names; a server that runs sees no gap."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as directory:
        for name, target in targets.items():
            link = pathlib.Path(directory) / name
            link.symlink_to(target.resolve())
            link.rename(folder / name)
    for stale in folder.iterdir():
        if stale.name not in targets:
            stale.unlink()
