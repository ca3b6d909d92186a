"""Refiners that the operator can name, and for which models."""

import json
import pathlib
import shutil
from typing import Any

import pytest

import tiny_models
from noria.errors import ConfigError, InvalidField, ModelError
from noria.models.adapters.refiner_folders import RefinerFolders
from noria.models.catalog import open_model
from noria.protocol.diffusion import Refinement


@pytest.fixture(scope="module")
def refiner(tiny_refiner_folder: pathlib.Path) -> pathlib.Path:
    return tiny_refiner_folder


@pytest.fixture(scope="module")
def xl(tiny_xl_folder: pathlib.Path) -> Any:
    return open_model(str(tiny_xl_folder))


def edit(file: pathlib.Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_refiner_is_for_all_models_of_sdxl_or_for_one(refiner: pathlib.Path, xl: Any, tiny_folder: Any) -> None:
    stable_diffusion = open_model(str(tiny_folder))
    for entry in (str(refiner), f"{xl.name}={refiner}"):
        folders = RefinerFolders([entry])
        folders.check([stable_diffusion, xl])
        found = folders.for_model(xl)
        assert found is not None and (found.name, len(found.digest)) == ("tiny-refiner", 12)
        assert folders.for_model(stable_diffusion) is None


def test_the_digest_changes_with_the_weights(refiner: pathlib.Path, xl: Any, tmp_path: pathlib.Path) -> None:
    other = tiny_models.save_xl_refiner(tmp_path / "tiny-refiner", seed=7)
    digests = [RefinerFolders([str(folder)]).for_model(xl) for folder in (refiner, other)]
    assert digests[0] is not None and digests[1] is not None and digests[0].digest != digests[1].digest


def test_a_request_gets_the_name_and_the_digest_and_others_are_rejected(refiner: pathlib.Path, xl: Any) -> None:
    folders = RefinerFolders([str(refiner)])
    known = folders.for_model(xl)
    assert known is not None
    complete = Refinement(0.7, "tiny-refiner", known.digest)
    assert folders.complete(Refinement(0.7), xl) == folders.complete(complete, xl) == complete
    for wrong, words in (
        (Refinement(name="other"), "has no refiner 'other'; allowed is 'tiny-refiner'"),
        (Refinement(digest="0" * 12), f"has no refiner '0{{12}}'; allowed is '{known.digest}'"),
    ):
        with pytest.raises(InvalidField, match=words):
            folders.complete(wrong, xl)
    with pytest.raises(InvalidField, match=r"has no refiner: it has none; the operator sets .* engine\.refiners"):
        RefinerFolders([]).complete(Refinement(), xl)


def test_entries_that_no_model_can_use_are_rejected(
    refiner: pathlib.Path, xl: Any, tiny_folder: Any, tmp_path: pathlib.Path
) -> None:
    stable_diffusion = open_model(str(tiny_folder))
    second = tiny_models.save_xl_refiner(tmp_path / "second")
    for entries, models, words in (
        (["missing"], [xl], "'missing' is not a folder. Entries are FOLDER, MODEL=FOLDER or hf://ORG/NAME"),
        ([str(refiner)], [stable_diffusion], f"fits no model of this server: {stable_diffusion.name} is not of SDXL"),
        ([f"other={refiner}"], [xl], "is for other, but the image models of this server are: "),
        ([str(refiner), str(second)], [xl], f"both for {xl.name}, which can have one. Say which with MODEL=FOLDER"),
    ):
        with pytest.raises(ConfigError, match=words):
            RefinerFolders(entries).check(models)
    RefinerFolders([str(refiner), f"{xl.name}={second}"]).check([xl])


def test_distilled_models_and_those_with_other_latents_have_none(refiner: pathlib.Path, tmp_path: pathlib.Path) -> None:
    distilled = open_model(str(tiny_models.save_stable_diffusion_xl(tmp_path / "lcm", unet={"time_cond_proj_dim": 8})))
    with pytest.raises(ConfigError, match="is distilled"):
        RefinerFolders([str(refiner)]).check([distilled])
    wide = {"in_channels": 8, "out_channels": 8}
    other = open_model(
        str(tiny_models.save_stable_diffusion_xl(tmp_path / "wide", unet=wide, vae={"latent_channels": 8}))
    )
    with pytest.raises(ConfigError, match=r"it has 4 channels \(of wide 8\)"):
        RefinerFolders([str(refiner)]).check([other])


DAMAGES = {
    "a base model": ("model_index.json", {"_class_name": "StableDiffusionXLPipeline"}, "that of a refiner is"),
    "no score": ("model_index.json", {"requires_aesthetics_score": False}, "requires_aesthetics_score is False"),
    "another encoder": ("model_index.json", {"text_encoder_2": ["transformers", "T5EncoderModel"]}, "T5EncoderModel"),
    "clipping": ("scheduler/scheduler_config.json", {"clip_sample": True}, "clip_sample is true"),
    "flow": ("scheduler/scheduler_config.json", {"_class_name": "FlowMatchEulerDiscreteScheduler"}, "flow family"),
    "six numbers": ("unet/config.json", {"projection_class_embeddings_input_dim": 88}, "make 80.*this is no refiner"),
    "other text": ("unet/config.json", {"cross_attention_dim": 80}, "cross_attention_dim 80.*hidden_size is 48"),
    "class-conditional": ("unet/config.json", {"class_embed_type": "timestep"}, "class_embed_type"),
    "other weights": ("unet/config.json", {"in_channels": 5}, r"conv_in\.weight is \[16, 4"),
    "code": ("unet/config.json", {"auto_map": {"a": "b"}}, "chooses code"),
}


@pytest.mark.parametrize(("name", "changes", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_refiner_is_rejected(
    refiner: pathlib.Path, xl: Any, tmp_path: pathlib.Path, name: str, changes: dict[str, Any], words: str
) -> None:
    shutil.copytree(refiner, tmp_path / "copy")
    edit(tmp_path / "copy" / name, **changes)
    with pytest.raises(ModelError, match=words):
        RefinerFolders([str(tmp_path / "copy")]).check([xl])


def test_a_refiner_is_no_model_of_its_own(refiner: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"continues images that another model has begun.*--refiners"):
        open_model(str(refiner))
