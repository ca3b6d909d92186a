"""Safety classifiers that the operator or a model's author can name, and for which models."""

import json
import pathlib
import shutil
from collections.abc import Callable

import msgspec
import pytest

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError, NoriaError
from noria.models.adapters.safety_folders import SafetyFolders
from noria.models.catalog import open_model
from noria.protocol.diffusion import DiffusionModelSpec
from safety_classifiers import save_classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_classifier(tmp_path_factory.mktemp("classifier") / "nsfw", ("drawing", "nsfw", "gore"))


@pytest.fixture(scope="module")
def spec(tiny_folder: pathlib.Path) -> DiffusionModelSpec:
    found = open_model(str(tiny_folder))
    assert isinstance(found, DiffusionModelSpec)
    return msgspec.structs.replace(found, name="tiny")


def edit(file: pathlib.Path, **changes: object) -> None:
    tree = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def test_a_models_own_entry_comes_before_that_of_all_and_noria_json_last(
    folder: pathlib.Path, spec: DiffusionModelSpec, tmp_path: pathlib.Path
) -> None:
    other = save_classifier(tmp_path / "other")
    own = msgspec.structs.replace(spec, safety_classifier=str(other), safety_labels=("normal",), safety_threshold=0.3)

    def rule(*entries: str, of: DiffusionModelSpec = spec) -> tuple[str, tuple[str, ...], float] | None:
        folders = SafetyFolders(entries, ("gore", "nsfw"), 0.7)
        folders.check([of])
        found = folders.for_model(of)
        return found and (found.folder.path.name, found.labels, found.threshold)

    assert rule() is None
    assert rule(str(folder)) == ("nsfw", ("gore", "nsfw"), 0.7)
    assert rule(f"tiny={folder}") == rule(f"tiny={folder}", str(folder)) == rule(str(folder))
    assert SafetyFolders([str(other), f"tiny={folder}"], ["nsfw"]).for_model(spec) != SafetyFolders(
        [str(other)], ["nsfw"]
    ).for_model(spec)
    assert rule(of=own) == ("other", ("normal",), 0.3)
    assert rule(str(folder), of=own) == ("nsfw", ("gore", "nsfw"), 0.3), "labels are of its own classifier"
    lax = msgspec.structs.replace(own, safety_threshold=0.9)
    assert rule(str(folder), of=lax) == ("nsfw", ("gore", "nsfw"), 0.7), "who wrote noria.json cannot allow more"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: edit(f / "config.json", id2label=None), "id2label is null; a safety classifier names"),
        (lambda f: edit(f / "config.json", id2label={"0": "nsfw"}), "two or more, numbered from 0"),
        (lambda f: edit(f / "config.json", id2label={"1": "nsfw", "2": "b"}), "two or more, numbered from 0"),
        (lambda f: edit(f / "config.json", id2label=["nsfw", "b"]), "id2label"),
        (lambda f: edit(f / "config.json", architectures=["ViTModel"]), "ViTModel.; a safety classifier is of"),
        (lambda f: edit(f / "config.json", architectures=None), "architectures is ''"),
        (lambda f: edit(f / "config.json", architectures=["TimmWrapperForImageClassification"]), "a class of"),
        (lambda f: edit(f / "config.json", auto_map={"AutoModel": "x.Y"}), "auto_map is .* chooses code"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "preprocessor_config.json").unlink(), "preprocessor_config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: missing"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 64), "model.safetensors"),
        (lambda f: edit(f / "config.json", id2label={"0": "a", "1": "b", "2": "c"}), "'nsfw', which is no label"),
    ],
)  # fmt: skip
def test_a_bad_folder_is_one_sentence_at_the_start(
    folder: pathlib.Path,
    spec: DiffusionModelSpec,
    tmp_path: pathlib.Path,
    change: Callable[[pathlib.Path], object],
    words: str,
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    change(bad)
    with pytest.raises((ModelError, ConfigError), match=words) as caught:
        SafetyFolders([str(bad)], ["nsfw"]).check([spec])
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("entries", "labels", "error", "words"),
    [
        (("/nowhere",), ("nsfw",), ConfigError, "'/nowhere' is not a folder"),
        (("other={}",), ("nsfw",), ConfigError, "is for other, but the image models of this server are: tiny"),
        (("{}", "{}"), ("nsfw",), ConfigError, "both for all image models; a model has one classifier"),
        (("{}",), ("nsfw", "porn"), ConfigError, "'porn', which is no label of the classifiers: they have 'drawing'"),
        (("{}",), (), ModelError, "labels are .*; safety_labels names none of them .it is empty"),
        (("{}", "tiny={}/../two"), ("gore",), ModelError, "the labels are 'normal', 'nsfw'; safety_labels names none"),
    ],
)
def test_a_setting_that_would_check_nothing_is_an_error(
    folder: pathlib.Path,
    spec: DiffusionModelSpec,
    entries: tuple[str, ...],
    labels: tuple[str, ...],
    error: type[NoriaError],
    words: str,
) -> None:
    if not (folder.parent / "two").exists():
        save_classifier(folder.parent / "two")
    config = EngineConfig(safety_classifiers=tuple(each.format(folder) for each in entries), safety_labels=labels)
    with pytest.raises(error, match=words):
        SafetyFolders.of(config).check([spec])


@pytest.mark.parametrize(
    ("named", "words"),
    [("../outside", "needed is a folder inside the model's"), ("/etc", "inside the model's"), ("none", "'none'")],
)
def test_noria_json_names_only_folders_of_its_model(
    tiny_folder: pathlib.Path, tmp_path: pathlib.Path, named: str, words: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    save_classifier(tmp_path / "outside")
    (model / "noria.json").write_text(json.dumps({"safety_classifier": named}))
    with pytest.raises(ModelError, match=words):
        open_model(str(model))
    save_classifier(model / "checker")
    (model / "noria.json").write_text('{"safety_classifier": "checker", "safety_threshold": 0.25}')
    spec = open_model(str(model))
    assert isinstance(spec, DiffusionModelSpec)
    rule = SafetyFolders.of(EngineConfig()).for_model(spec)
    assert rule is not None and (rule.labels, rule.threshold) == (("nsfw",), 0.25)
