"""The registry of model families."""

import json
import pathlib
import pkgutil
import re
import subprocess
import sys

import diffusers
import pytest
import transformers

from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.models.families import FAMILIES, identify_family
from noria.models.family import Family, Part
from noria.models.location import BUNDLED

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@every_family
def test_every_family_has_a_model_class_and_known_part_classes(family: Family) -> None:
    assert callable(pkgutil.resolve_name(family.load_with))
    for part in family.parts.values():
        assert all(hasattr(diffusers, name) or hasattr(transformers, name) for name in part.classes)


def test_the_bundled_model_is_of_the_stable_diffusion_family() -> None:
    family, spec = identify_family(BUNDLED), open_model("bundled")
    assert family is FAMILIES["stable-diffusion"]
    assert (spec.family, spec.kind, spec.pipeline) == (family.name, "diffusion", "StableDiffusionPipeline")


@pytest.mark.parametrize("class_name", ['"WanPipeline"', "null", '["StableDiffusionPipeline"]', '"__class__"'])
def test_an_unknown_class_is_rejected_with_the_known_ones(tmp_path: pathlib.Path, class_name: str) -> None:
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": {class_name}}}')
    with pytest.raises(ModelError, match=r"_class_name .*StableDiffusionPipeline"):
        identify_family(tmp_path)


ENCODER = Family(
    name="bert",
    description="text encoders",
    index_file="config.json",
    class_names=("BertModel", "bert"),
    parts={"": Part(("BertModel",), "model")},
    extra="",
    packages=(),
    inspect_with="",
    load_with="",
)


@pytest.mark.parametrize(
    "config", [{"architectures": ["BertModel"]}, {"model_type": "bert"}, {"architectures": None, "model_type": "bert"}]
)
def test_a_folder_without_model_index_json_is_known_by_its_config_json(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    monkeypatch.setattr("noria.models.families.FAMILIES", {ENCODER.name: ENCODER})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert identify_family(tmp_path) is ENCODER
    (tmp_path / "model_index.json").write_text('{"_class_name": "BertModel"}')  # then it is a pipeline of diffusers
    with pytest.raises(ModelError, match=r"model_index\.json: _class_name is 'BertModel'"):
        identify_family(tmp_path)


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ('{"architectures": ["LongformerModel"], "model_type": "longformer"}',
          r"\['LongformerModel'\] and .* 'longformer'"),
        ('{"architectures": 5}', "5 and model_type is null"),
    ],
)  # fmt: skip
def test_an_unknown_config_json_is_rejected_with_what_it_says(tmp_path: pathlib.Path, config: str, got: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=f"architectures is {got}.*: albert"):
        identify_family(tmp_path)


def test_a_folder_with_neither_file_is_rejected(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"model_index\.json: missing, and so is config\.json"):
        identify_family(tmp_path)


@every_family
@pytest.mark.parametrize("name", ["loaders", "DiffusionPipeline", "__loader__", None, ["AutoencoderKL"]])
def test_a_part_class_that_the_family_does_not_list_is_rejected(family: Family, name: object) -> None:
    for part_name, part in family.parts.items():
        with pytest.raises(ModelError, match=f"{re.escape(part_name)} .*{', '.join(part.classes)}"):
            family.check_class(pathlib.Path("model_index.json"), part_name, name)


def test_the_inspection_of_a_folder_imports_no_library() -> None:
    code = (
        "import sys, noria.models.catalog as catalog; catalog.open_model('bundled');"
        "sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
