"""Classifiers that check generated images, by the setting `engine.safety_classifiers` or by noria.json. No torch.

A model has one classifier: the operator's or, if there is none for it, that of its noria.json. A folder is read once:
to use changed files, restart the server.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple, Self

from msgspec import Struct

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError, short_list, short_repr
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.diffusion.folders.pipeline_folder import check_chooses_no_code
from noria.models.files.weights import (
    REDOWNLOAD_HINT,
    num_tensor_parameters,
    read_struct,
    read_text,
    read_weights,
    weights_digest,
)
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec

STEM = "model"
"""The name of its weight files, without variant, shard and ".safetensors"."""

PREPROCESSOR_FILE = "preprocessor_config.json"

_HEAD = "ForImageClassification"


class _Config(Struct, frozen=True):
    """config.json, of transformers."""

    architectures: tuple[str, ...] | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None


class SafetyFolder(NamedTuple):
    """A checked folder of a classifier."""

    path: pathlib.Path
    digest: str  # 12 digits of a SHA-256: of its configuration, and of its weights as a model's fingerprint
    labels: tuple[str, ...]  # in the order of the logits
    is_multi_label: bool  # whether each label has a probability of its own
    num_parameters: int


class SafetyRule(NamedTuple):
    """The check of a model's images."""

    folder: SafetyFolder
    labels: tuple[str, ...]  # those that are refused
    threshold: float  # the least score that is refused


class SafetyFolders(FolderEntries):
    """The setting `engine.safety_classifiers`, and those that belong to it."""

    setting = "safety_classifiers"
    forms = "FOLDER, MODEL=FOLDER or hf://ORG/NAME"

    def __init__(self, entries: Sequence[str], labels: Sequence[str] = (), threshold: float = 1.0) -> None:
        super().__init__(entries)
        self._labels, self._threshold = tuple(dict.fromkeys(labels)), threshold

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return the classifiers of an engine."""
        return cls(config.safety_classifiers, config.safety_labels, config.safety_threshold)

    def check(self, models: Sequence[AnyModelSpec]) -> None:
        """Check all folders, that each is for a model that is served, and that no label is unknown.

        Raises:
            ConfigError: a folder does not exist, is for no model or a model's second, or no classifier has a label.
            ModelError: what is in it is no classifier, is damaged or not supported.
        """
        self.check_folders()
        specs = {spec.name: spec for spec in models if isinstance(spec, DiffusionModelSpec)}
        for k, (only_for, folder) in enumerate(self._folders):
            if only_for is not None:
                self._served(only_for, folder, models)
            if twins := [other for of_other, other in self._folders[:k] if of_other == only_for]:
                raise ConfigError(
                    f"engine.safety_classifiers: {str(twins[0])!r} and {str(folder)!r} are both for "
                    f"{only_for or 'all image models'}; a model has one classifier. Remove one, or name a model with "
                    "MODEL=FOLDER."
                )
        found = [_open(folder) for _, folder in self._folders]
        known = [label for folder in found for label in folder.labels]
        if found and (unknown := [label for label in self._labels if label not in known]):
            raise ConfigError(
                f"engine.safety_labels has {short_repr(unknown[0])}, which is no label of the classifiers: they have "
                f"{short_list(map(short_repr, dict.fromkeys(known)), 20)}."
            )
        for spec in specs.values():
            self.for_model(spec)

    def for_model(self, spec: DiffusionModelSpec) -> SafetyRule | None:
        """Return the check of a model's images, if there is one.

        Raises ModelError: its folder is no classifier, is damaged, or has none of the labels that are refused.
        """
        folders = dict(reversed(self._folders))
        path = folders.get(spec.name) or folders.get(None)
        labels = self._labels
        if path is None:
            if not spec.safety_classifier:
                return None
            path, labels = pathlib.Path(spec.safety_classifier), spec.safety_labels or self._labels
        folder = _open(path)
        refused = tuple(label for label in labels if label in folder.labels)
        if not refused:
            raise ModelError(
                f"{path / 'config.json'}: the labels are {short_list(map(short_repr, folder.labels), 20)}; "
                f"safety_labels names none of them ({short_list(map(short_repr, labels)) or 'it is empty'}). Name what "
                "is to be refused."
            )
        return SafetyRule(folder, refused, min(self._threshold, spec.safety_threshold))


@functools.lru_cache(maxsize=64)
def _open(path: pathlib.Path) -> SafetyFolder:
    """Check a folder. Raises ModelError: it is no classifier of images, or a file is missing or damaged."""
    file = path / "config.json"
    check_chooses_no_code(file)
    check_chooses_no_code(path / PREPROCESSOR_FILE)
    config = read_struct(file, _Config)
    architecture = (config.architectures or ("",))[0]
    if _HEAD not in architecture or architecture.startswith("Timm"):
        raise ModelError(
            f"{file}: architectures is {short_repr(architecture)}; a safety classifier is of a class of transformers "
            f"whose name ends with {_HEAD}, such as ViT{_HEAD}."
        )
    names = config.id2label or {}
    if len(names) < 2 or names.keys() != {str(index) for index in range(len(names))}:
        raise ModelError(
            f"{file}: id2label is {short_repr(config.id2label)}; a safety classifier names its labels there, two or "
            f"more, numbered from 0. {REDOWNLOAD_HINT}"
        )
    num_parameters = num_tensor_parameters(read_weights(path, "", STEM))
    described = read_text(file) + read_text(path / PREPROCESSOR_FILE)
    return SafetyFolder(
        path,
        weights_digest(path, STEM, described),
        tuple(names[str(index)] for index in range(len(names))),
        config.problem_type == "multi_label_classification",
        num_parameters,
    )
