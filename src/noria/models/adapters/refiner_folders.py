"""The refiners that the operator allows for models of Stable Diffusion XL, the setting `engine.refiners`. No torch.

A refiner's name is that of its folder; a model has one at most, which an engine loads with the model. A folder is read
once: to use changed files, restart the server.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from noria.errors import ConfigError, RefinerNotFound, short_repr
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.catalog import fingerprint_of
from noria.models.diffusion.folders.unet_models.refiner_folder import check_refiner, has_text_encoder_of, misfit
from noria.models.families import FAMILIES
from noria.models.files.weights import weight_bytes
from noria.protocol.diffusion import DiffusionModelSpec, Refinement
from noria.protocol.kinds import AnyModelSpec

FAMILY = FAMILIES["stable-diffusion-xl-refiner"]

NO_REFINER = "it has none; the operator sets its folder: engine.refiners"
"""The words of messages about a model without a refiner."""


class RefinerFolder(NamedTuple):
    """A checked folder."""

    path: pathlib.Path
    digest: str  # as a model's fingerprint

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.absolute().name

    def shares_text_encoder(self, spec: DiffusionModelSpec) -> bool:
        """Whether its text encoder is the second one of a model, and so is not loaded again; reads both files once."""
        return _has_text_encoder_of(self.path, spec)

    def weight_bytes(self, spec: DiffusionModelSpec, item_bytes: int) -> dict[str, int]:
        """Return the bytes of each part with weights that is loaded for a model, whose numbers have `item_bytes`."""
        stems = FAMILY.weight_stems.items()
        shared = {"text_encoder_2"} if self.shares_text_encoder(spec) else set()
        return {part: weight_bytes(self.path, part, stem, item_bytes) for part, stem in stems if part not in shared}


class RefinerFolders(FolderEntries):
    """The setting `engine.refiners`; a folder for all models is for those that it fits."""

    setting = "refiners"
    forms = "FOLDER, MODEL=FOLDER or hf://ORG/NAME"

    def check(self, models: Sequence[AnyModelSpec]) -> None:
        """Check all folders, that each is for a model that is served, and that no model has two.

        Raises:
            ConfigError: a folder does not exist, fits no model, or is a model's second.
            ModelError: what is in it is damaged or not supported.
        """
        self.check_folders()
        for only_for, folder in self._folders:
            _open(folder)
            misfits = [misfit(folder, spec) for spec in self._served(only_for, folder, models)]
            self._check_fits(folder, misfits, "SDXL")
        for spec in (each for each in models if isinstance(each, DiffusionModelSpec)):
            if len(found := self._folders_for(spec)) > 1:
                raise ConfigError(
                    f"engine.refiners: {' and '.join(map(str, found))} are both for {spec.name}, which can have one. "
                    "Say which with MODEL=FOLDER."
                )

    def for_model(self, spec: DiffusionModelSpec) -> RefinerFolder | None:
        """Return the refiner of a model, if it has one. Raises ModelError: its folder is damaged or not supported."""
        found = self._folders_for(spec)
        return _open(found[0]) if found else None

    def complete(self, refinement: Refinement, spec: DiffusionModelSpec) -> Refinement:
        """Return `refinement` with the name and the digest of the model's refiner.

        Raises RefinerNotFound: the model has none, or one of another name or digest.
        """
        folder = self.for_model(spec)
        if folder is None:
            raise no_refiner(spec)
        for got, known in ((refinement.name, folder.name), (refinement.digest, folder.digest)):
            if got not in (None, known):
                raise RefinerNotFound(
                    f"refiner: {spec.name} has no refiner {short_repr(got)}; allowed is {short_repr(known)}.",
                    field="refiner",
                )
        return msgspec.structs.replace(refinement, name=folder.name, digest=folder.digest)

    def _folders_for(self, spec: DiffusionModelSpec) -> list[pathlib.Path]:
        fitting = [(only_for, folder) for only_for, folder in self._folders if _fits(folder, spec)]
        own = [folder for only_for, folder in fitting if only_for == spec.name]
        return own or [folder for only_for, folder in fitting if only_for is None]


def no_refiner(spec: DiffusionModelSpec) -> RefinerNotFound:
    """Return the error for a model without a refiner."""
    return RefinerNotFound(f"refiner: {spec.name} has no refiner: {NO_REFINER}.", field="refiner")


@functools.lru_cache(maxsize=64)
def _open(folder: pathlib.Path) -> RefinerFolder:
    check_refiner(folder, FAMILY)
    return RefinerFolder(folder, fingerprint_of(folder, FAMILY))


@functools.lru_cache(maxsize=1024)
def _fits(folder: pathlib.Path, spec: DiffusionModelSpec) -> bool:
    return misfit(folder, spec) is None


@functools.lru_cache(maxsize=64)
def _has_text_encoder_of(folder: pathlib.Path, spec: DiffusionModelSpec) -> bool:
    return has_text_encoder_of(folder, spec)
