"""Downloads the LoRA files of hub repositories that `engine.loras` names, once, and gives them readable names."""

import pathlib
import re
import tempfile
from collections.abc import Mapping

import msgspec

from noria.config import Config
from noria.errors import ConfigError, ModelError, short_repr
from noria.folders import data_folder

_SCHEME = "hf://"
_SOURCE = re.compile(r"([\w.-]+)/([\w.-]+)(?:/([\w./-]+\.safetensors))?(?:@([\w./-]+))?", re.ASCII)


def download_hub_loras(config: Config, environment: Mapping[str, str]) -> Config:
    """Return `config` with a folder in place of each `hf://ORG/NAME[/FILE][@REVISION]` in `engine.loras`.

    The LoRA of a repository with one file, or of FILE, is called NAME; of several files they are NAME-FILE. What was
    downloaded before is taken from the hub's cache if the hub does not answer.

    Raises:
        ConfigError: an entry that begins with hf:// has another form.
        ModelError: the download failed, or the repository has no such file.

    """
    parent = data_folder(config, environment) / "hub_loras"
    entries = tuple(_local_entry(entry, parent) for entry in config.engine.loras)
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, loras=entries))


def _local_entry(entry: str, parent: pathlib.Path) -> str:
    """Return an entry that `LoraFolders` reads: `entry` itself unless it names the hub."""
    model, _, source = entry.rpartition("=") if not entry.startswith(_SCHEME) else ("", "", entry)
    if not source.startswith(_SCHEME):
        return entry
    match = _SOURCE.fullmatch(source.removeprefix(_SCHEME))
    if match is None:
        raise ConfigError(
            f"engine.loras: {short_repr(source)} names no LoRA of the hub. The form is "
            "hf://ORG/NAME[/FILE.safetensors][@REVISION]."
        )
    org, name, file, revision = match.groups()
    files = _download(f"{org}/{name}", file, revision)
    folder = parent / "--".join(part.replace("/", "-") for part in match.groups(default="") if part)
    _link({name if len(files) == 1 else f"{name}-{each.stem}": each for each in files}, folder)
    return f"{model}={folder}" if model else str(folder)


def _download(repo: str, file: str | None, revision: str | None) -> list[pathlib.Path]:
    """Return the repository's files of weights that are in no folder, or the one in `file`."""
    import huggingface_hub  # takes half a second, which other settings need not spend

    ignored = [] if file else ["*/*"]  # folders of a repository with a whole model
    try:
        snapshot = pathlib.Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=[file or "*.safetensors"], ignore_patterns=ignored
            )
        )
    except Exception as error:  # hub, network and cache raise many kinds; the operator reads one sentence
        error_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"the LoRAs of {repo!r} could not be downloaded from the hub: {error_line} Check the id, the network and "
            "HF_TOKEN, or give a folder."
        ) from error
    found = [snapshot / file] if file else sorted(snapshot.glob("*.safetensors"))
    if not found or not found[0].is_file():
        raise ModelError(f"engine.loras: {repo!r} on the hub has no {file or 'file of safetensors outside folders'}.")
    return found


def _link(files: dict[str, pathlib.Path], folder: pathlib.Path) -> None:
    """Make `folder` one of links to `files`, by their names without suffix; a server that runs sees no gap."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as directory:
        for name, file in files.items():
            link = pathlib.Path(directory) / f"{name}.safetensors"
            link.symlink_to(file.resolve())
            link.rename(folder / link.name)
    for stale in folder.iterdir():
        if stale.stem not in files:
            stale.unlink()
