"""The registry of model families."""

import importlib
import pathlib
import subprocess
import sys

import diffusers
import pytest
import transformers

from noria.errors import ModelError
from noria.models.families import FAMILIES, Family, identify_family
from noria.models.location import BUNDLED

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@every_family
def test_every_family_has_a_model_class_and_known_part_classes(family: Family) -> None:
    assert callable(getattr(importlib.import_module(family.module), family.model_class).load)
    for classes in family.part_classes.values():
        assert all(hasattr(diffusers, name) or hasattr(transformers, name) for name in classes)


def test_the_bundled_model_is_of_the_stable_diffusion_family() -> None:
    assert identify_family(BUNDLED) is FAMILIES["StableDiffusionPipeline"]


@pytest.mark.parametrize("class_name", ['"FluxPipeline"', "null", '["StableDiffusionPipeline"]', '"__class__"'])
def test_an_unknown_class_is_rejected_with_the_known_ones(tmp_path: pathlib.Path, class_name: str) -> None:
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": {class_name}}}')
    with pytest.raises(ModelError, match=r"_class_name .*StableDiffusionPipeline"):
        identify_family(tmp_path)


@every_family
@pytest.mark.parametrize("name", ["loaders", "DiffusionPipeline", "__loader__", None, ["AutoencoderKL"]])
def test_a_part_class_that_the_family_does_not_list_is_rejected(family: Family, name: object) -> None:
    with pytest.raises(ModelError, match=r"vae .*AutoencoderKL, AutoencoderTiny"):
        family.check_class(pathlib.Path("model_index.json"), "vae", name)


def test_the_registry_imports_no_library() -> None:
    code = (
        "import sys, noria.models.families; sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
