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
_NAME, _REVISION = r"(?P<org>[\w.-]+)/(?P<name>[\w.-]+)", r"(?:@(?P<revision>[\w./-]+))?"
_FILE, _FOLDER = r"/(?P<file>[\w./-]+\.safetensors)", r"(?:/(?P<folder>[\w./-]+))?"
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


class _Source:
    """An entry of the hub: a repository, perhaps a file or a folder in it, and a revision."""

    def __init__(self, source: str, setting: str, what: str, pattern: str, form: str) -> None:
        match = re.fullmatch(pattern, source.removeprefix(_SCHEME), re.ASCII)
        if match is None:
            raise ConfigError(
                f"engine.{setting}: {short_repr(source)} names no {what} of the hub. The form is {_SCHEME}{form}."
            )
        found = match.groupdict(default="")
        self.repo, self.name = f"{found['org']}/{found['name']}", found["name"]
        self.file, self.folder = found.get("file", ""), found.get("folder", "")
        self._revision, self._what = found.get("revision") or None, what
        self._link_name = "--".join(part.replace("/", "-") for part in match.groups(default="") if part)

    def download(self, allowed: list[str], ignored: list[str] | None = None) -> pathlib.Path:
        """Return the folder with those of the repository's files that `allowed` and not `ignored` name."""
        import huggingface_hub  # takes half a second, which other settings need not spend

        patterns = {"allow_patterns": allowed, "ignore_patterns": ignored or []}
        try:
            return pathlib.Path(huggingface_hub.snapshot_download(self.repo, revision=self._revision, **patterns))
        except Exception as error:  # hub, network and cache raise many kinds; the operator reads one sentence
            raise hub_error(f"the {self._what} of {self.repo!r}", error) from error

    def link(self, parent: pathlib.Path, targets: Mapping[str, pathlib.Path]) -> pathlib.Path:
        """Return the folder of this entry below `parent`, with links to `targets`, by their names, alone."""
        folder = parent / self._link_name
        _link(targets, folder)
        return folder


def _lora_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    form = "ORG/NAME[/FILE.safetensors][@REVISION]"
    found = _Source(source, "loras", "LoRA", f"{_NAME}(?:{_FILE})?{_REVISION}", form)
    ignored = [] if found.file else ["*/*"]  # folders of a repository with a whole model
    snapshot = found.download([found.file or "*.safetensors"], ignored)
    files = [snapshot / found.file] if found.file else sorted(snapshot.glob("*.safetensors"))
    if not files or not files[0].is_file():
        missing = found.file or "file of safetensors outside folders"
        raise ModelError(f"engine.loras: {found.repo!r} on the hub has no {missing}.")
    names = {found.name if len(files) == 1 else f"{found.name}-{each.stem}": each for each in files}
    return found.link(parent, {f"{name}.safetensors": each for name, each in names.items()})


def _controlnet_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    found = _Source(source, "controlnets", "ControlNet", f"{_NAME}{_REVISION}", "ORG/NAME[@REVISION]")
    snapshot = found.download(_CONTROLNET_FILES)
    if not any(snapshot.glob(f"{_STEM}*.safetensors")):
        snapshot = found.download(_CONTROLNET_FILES_FP16)
    return found.link(parent, {found.name: snapshot}) / found.name


def _ip_adapter_file(engine: EngineConfig, source: str, parent: pathlib.Path) -> pathlib.Path:
    form = "ORG/NAME/FILE.safetensors[@REVISION]"
    found = _Source(source, "ip_adapters", "IP-Adapter", f"{_NAME}{_FILE}{_REVISION}", form)
    file = pathlib.PurePosixPath(found.file)
    encoder = file.parent / "image_encoder"
    wanted = [] if engine.ip_adapter_encoders else [f"{encoder}/{each}" for each in _ENCODER_FILES]
    snapshot = found.download([str(file), *wanted])
    if not (snapshot / file).is_file():
        raise ModelError(f"engine.ip_adapters: {found.repo!r} on the hub has no {file}.")
    targets = {file.name: snapshot / file}
    if wanted and (snapshot / encoder).is_dir():
        targets["image_encoder"] = snapshot / encoder
    return found.link(parent, targets) / file.name


def _encoder_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    form = "ORG/NAME[/FOLDER][@REVISION]"
    found = _Source(source, "ip_adapter_encoders", "image encoder", f"{_NAME}{_FOLDER}{_REVISION}", form)
    inside = pathlib.PurePosixPath(found.folder)
    snapshot = found.download([str(inside / each) for each in _ENCODER_FILES])
    return found.link(parent, {"image_encoder": snapshot / inside}) / "image_encoder"


def _classifier_folder(source: str, parent: pathlib.Path) -> pathlib.Path:
    found = _Source(source, "safety_classifiers", "safety classifier", f"{_NAME}{_REVISION}", "ORG/NAME[@REVISION]")
    return found.link(parent, {found.name: found.download(_CLASSIFIER_FILES)}) / found.name


def _refiner_folder(engine: EngineConfig, source: str, parent: pathlib.Path) -> pathlib.Path:
    if source.endswith(SUFFIX) or HUB_FILE.fullmatch(source):
        converted, name = locate(source, engine)
        _link({name: converted}, parent / converted.name)
        return parent / converted.name / name
    found = _Source(source, "refiners", "refiner", _NAME, "ORG/NAME")
    snapshot, _ = locate(found.repo)
    return found.link(parent, {found.name: snapshot}) / found.name


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
