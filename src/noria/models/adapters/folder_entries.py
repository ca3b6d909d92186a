"""The settings of an engine whose entries are folders beside those of models, such as `engine.loras`. No torch."""

import pathlib
from collections.abc import Sequence
from typing import ClassVar, Self

from noria.config import EngineConfig
from noria.errors import ConfigError, short_list
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec


class FolderEntries:
    """The folders of one setting: an entry is a folder for all models, or `MODEL=FOLDER` for one."""

    setting: ClassVar[str]
    forms: ClassVar[str] = "FOLDER or MODEL=FOLDER"

    def __init__(self, entries: Sequence[str]) -> None:
        self._folders = [split_entry(entry) for entry in entries]

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return the folders of an engine."""
        return cls(getattr(config, cls.setting))

    def __bool__(self) -> bool:
        """Whether there are folders, which may be empty."""
        return bool(self._folders)

    def check_folders(self) -> None:
        """Raise ConfigError if a folder does not exist."""
        for _, folder in self._folders:
            if not folder.is_dir():
                raise ConfigError(f"engine.{self.setting}: {str(folder)!r} is not a folder. Entries are {self.forms}.")

    def check(self, models: Sequence[AnyModelSpec]) -> None:
        """Raise ConfigError if a folder does not exist, or is for a model that is not among the image models."""
        self.check_folders()
        for only_for, folder in self._folders:
            if only_for is not None:
                self._served(only_for, folder, models)

    def _served(
        self, only_for: str | None, entry: pathlib.Path, models: Sequence[AnyModelSpec]
    ) -> list[DiffusionModelSpec]:
        """Return the image models that an entry is for. Raises ConfigError: none of them is served."""
        specs = [spec for spec in models if isinstance(spec, DiffusionModelSpec)]
        wanted = [spec for spec in specs if only_for in (None, spec.name)]
        if not wanted:
            raise ConfigError(
                f"engine.{self.setting}: {str(entry)!r} is for {only_for or 'image models'}, but the image models of "
                f"this server are: {short_list([spec.name for spec in specs]) or 'none'}. Name one, serve such "
                "a model (additional_models), or leave MODEL= out: then it is for all, those of the registry, too."
            )
        return wanted

    def _check_fits(self, entry: pathlib.Path, misfits: Sequence[str | None], advice: str) -> None:
        """Raise ConfigError if an entry fits no model; `misfits` say why for each, and `advice` what to serve."""
        if all(misfits):
            raise ConfigError(
                f"engine.{self.setting}: {str(entry)!r} fits no model of this server: "
                f"{'; '.join(str(reason) for reason in misfits)}. Remove it, or serve {advice}."
            )

    def _folders_of(self, model: str) -> list[pathlib.Path]:
        return [folder for only_for, folder in self._folders if only_for in (None, model) and folder.is_dir()]


def split_entry(entry: str) -> tuple[str | None, pathlib.Path]:
    """Return the model and the folder of `MODEL=FOLDER`, or None and the folder of `FOLDER`, which is for all models.

    A path that begins with / or . may have a "=".
    """
    model, separator, folder = entry.partition("=")
    if separator and not entry.startswith(("/", ".")):
        return model, pathlib.Path(folder)
    return None, pathlib.Path(entry)
