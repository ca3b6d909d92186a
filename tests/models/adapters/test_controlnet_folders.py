"""Folders of ControlNets: which are taken, which models they fit, and what the others say."""

import pathlib

import msgspec
import pytest

from controlnet_folders import save_controlnet, save_model
from noria.config import EngineConfig
from noria.errors import ConfigError, ControlNetNotFound, ModelError
from noria.models.adapters.controlnet_folders import ControlNetFolders
from noria.models.diffusion.folders.unet_models.controlnet_folder import inspect
from noria.protocol.diffusion import Control, DiffusionModelSpec
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL


def spec_of(folder: pathlib.Path, name: str) -> DiffusionModelSpec:
    return msgspec.structs.replace(FAKE_MODEL, name=name, folder=str(folder))


@pytest.fixture
def small(tmp_path: pathlib.Path) -> DiffusionModelSpec:
    return spec_of(save_model(tmp_path / "small"), "small")


@pytest.fixture
def wide(tmp_path: pathlib.Path) -> DiffusionModelSpec:
    return spec_of(save_model(tmp_path / "wide", cross_attention_dim=48, layers_per_block=1), "wide")


def test_each_model_has_those_that_it_fits(
    tmp_path: pathlib.Path, small: DiffusionModelSpec, wide: DiffusionModelSpec
) -> None:
    entries = [
        str(save_controlnet(tmp_path / "nets" / "edges")),
        str(save_controlnet(tmp_path / "nets" / "depth", cross_attention_dim=48, layers_per_block=[1, 1])),
        f"small={save_controlnet(tmp_path / 'only' / 'pose')}",
        str(save_controlnet(tmp_path / "later" / "edges", conditioning_channels=3)),
    ]
    folders = ControlNetFolders.of(EngineConfig(controlnets=tuple(entries)))
    folders.check([FAKE_ENCODER, small, wide])
    assert list(folders.for_model(small)) == ["edges", "pose"]
    assert folders.for_model(small)["edges"].path == tmp_path / "nets" / "edges"  # the first of equal names
    assert list(folders.for_model(wide)) == ["depth"]
    assert dict(folders.for_model(spec_of(tmp_path / "without a UNet", "flow"))) == {}
    (control,) = folders.complete([Control("pose", 0.5)], small)
    assert control == Control("pose", 0.5, digest=folders.for_model(small)["pose"].digest)
    with pytest.raises(ControlNetNotFound, match="small has no ControlNet 'depth'; allowed are 'edges', 'pose'"):
        folders.complete([Control("depth")], small)
    with pytest.raises(ControlNetNotFound, match=r"it has none; the operator sets .* engine\.controlnets"):
        ControlNetFolders(()).complete([Control("depth")], small)


def test_digests_depend_on_settings_and_weights(tmp_path: pathlib.Path) -> None:
    folders = [
        save_controlnet(tmp_path / "a"),
        save_controlnet(tmp_path / "b"),
        save_controlnet(tmp_path / "c", controlnet_conditioning_channel_order="bgr"),
        save_controlnet(tmp_path / "d"),
    ]
    weights = folders[3] / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    first, same, *others = [inspect(folder).digest for folder in folders]
    assert first == same
    assert len({first, *others}) == 3
    assert inspect(folders[0]).num_parameters == 16 * 4 * 9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cross_attention_dim": 768}, r"cross_attention_dim 768 where small has 32"),
        (
            {"block_out_channels": [16, 32, 64]},
            r"block_out_channels \(16, 32, 64\) where small has \(16, 32\), layers_per",
        ),
        ({"addition_embed_type": "text_time"}, r"addition_embed_type text_time where small has None"),
        ({"conditioning_embedding_out_channels": [16, 32, 96, 256]}, r"pixels per latent 8 where small has 4"),
        ({"in_channels": 9}, r"in_channels 9 where small has 4"),
    ],
)
def test_one_that_fits_no_model_is_an_error_at_the_start(
    tmp_path: pathlib.Path, small: DiffusionModelSpec, settings: dict[str, object], words: str
) -> None:
    folder = save_controlnet(tmp_path / "edges", **settings)
    with pytest.raises(ConfigError, match=f"edges' fits no model of this server: it has .*{words}"):
        ControlNetFolders([str(folder)]).check([small])


def test_an_entry_for_a_model_that_is_not_served_and_a_missing_folder_are_errors(
    tmp_path: pathlib.Path, small: DiffusionModelSpec
) -> None:
    entry = f"large={save_controlnet(tmp_path / 'edges')}"
    with pytest.raises(ConfigError, match="edges' is for large, but the image models of this server are: small"):
        ControlNetFolders([entry]).check([small])
    with pytest.raises(ConfigError, match="is for image models, but the image models of this server are: none"):
        ControlNetFolders([str(tmp_path / "edges")]).check([FAKE_ENCODER])
    with pytest.raises(ConfigError, match=r"missing' is not a folder\. Entries are FOLDER, MODEL=FOLDER or hf://"):
        ControlNetFolders([str(tmp_path / "missing")]).check([small])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"_class_name": "FluxControlNetModel"}, "'FluxControlNetModel'; supported is ControlNetModel"),
        ({"conditioning_channels": 4}, "conditioning_channels is 4; images have 3"),
        ({"global_pool_conditions": True}, "global_pool_conditions is true, which is not supported"),
        ({"class_embed_type": "timestep"}, "class_embed_type is 'timestep'"),
        ({"num_class_embeds": 3}, "num_class_embeds is 3"),
        ({"encoder_hid_dim": 3}, "encoder_hid_dim is 3"),
        ({"encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim_type is 'text_proj'"),
        ({"addition_embed_type": "image"}, "addition_embed_type is 'image'; supported are none and"),
        ({"controlnet_conditioning_channel_order": "rbg"}, "controlnet_conditioning_channel_order"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map is .* chooses code"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantization_config"),
        ({"block_out_channels": []}, "block_out_channels"),
        ({"in_channels": "4"}, "in_channels"),
    ],
)
def test_what_is_not_supported_is_rejected_by_name(
    tmp_path: pathlib.Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        inspect(save_controlnet(tmp_path / "edges", **settings))


def test_pickles_and_damaged_weights_are_rejected(tmp_path: pathlib.Path) -> None:
    folder = save_controlnet(tmp_path / "edges")
    weights = folder / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(ModelError, match="truncated"):
        inspect(folder)
    weights.rename(folder / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match=r"a pickle, .* Convert it once"):
        inspect(folder)
    (folder / "diffusion_pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="missing, so the model has no weights"):
        inspect(folder)
    weights.with_stem("diffusion_pytorch_model.fp16").write_bytes(whole)
    assert inspect(folder).num_parameters == 16 * 4 * 9
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapters are not supported"):
        inspect(folder)
