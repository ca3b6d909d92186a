"""The ControlNets that the operator allows for image models, the setting `engine.controlnets`. No torch.

A ControlNet's name is that of its folder. Each is for the models that it fits, which their configurations say; an
engine loads those of a model with the model. A folder is read once: to use changed files, restart the server.
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence

import msgspec

from noria.errors import ControlNetNotFound, short_list, short_repr
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.diffusion.folders.unet_models.controlnet_folder import ControlNetFolder, inspect, misfit
from noria.protocol.diffusion import Control, DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec

NO_CONTROLNETS = "it has none; the operator sets folders of them: engine.controlnets"
"""The words of messages about a model without ControlNets."""


class ControlNetFolders(FolderEntries):
    """The setting `engine.controlnets`; a folder for all models is for those that it fits."""

    setting = "controlnets"
    forms = "FOLDER, MODEL=FOLDER or hf://ORG/NAME[@REVISION]"

    def check(self, models: Sequence[AnyModelSpec]) -> None:
        """Check all folders, and that each is for a model that is served.

        Raises:
            ConfigError: a folder does not exist, or fits no model.
            ModelError: what is in it is damaged or not supported.
        """
        self.check_folders()
        for only_for, folder in self._folders:
            controlnet = _inspect(folder)
            misfits = [misfit(controlnet, spec) for spec in self._served(only_for, folder, models)]
            self._check_fits(folder, misfits, "the model that it was trained with")

    def for_model(self, spec: DiffusionModelSpec) -> Mapping[str, ControlNetFolder]:
        """Return the ControlNets for a model by name, in the order of names; of equal names, the first folder's.

        Raises ModelError: a folder is damaged or not supported.
        """
        found: dict[str, ControlNetFolder] = {}
        for only_for, folder in self._folders:
            if only_for in (None, spec.name) and _fits(folder, spec):
                found = {folder.absolute().name: _inspect(folder)} | found
        return dict(sorted(found.items()))

    def complete(self, controls: Sequence[Control], spec: DiffusionModelSpec) -> tuple[Control, ...]:
        """Return `controls` with the digests of their ControlNets.

        Raises ControlNetNotFound: the model has none of this name; with the names that it has.
        """
        known = self.for_model(spec)
        for k, control in enumerate(controls):
            if control.name not in known:
                allowed = f"allowed are {short_list(map(short_repr, known), 50)}" if known else NO_CONTROLNETS
                raise ControlNetNotFound(
                    f"controls[{k}]: {spec.name} has no ControlNet {short_repr(control.name)}; {allowed}.",
                    field="controls",
                )
        return tuple(msgspec.structs.replace(each, digest=known[each.name].digest) for each in controls)


@functools.lru_cache(maxsize=256)
def _inspect(folder: pathlib.Path) -> ControlNetFolder:
    return inspect(folder)


@functools.lru_cache(maxsize=4096)
def _fits(folder: pathlib.Path, spec: DiffusionModelSpec) -> bool:
    return misfit(_inspect(folder), spec) is None
