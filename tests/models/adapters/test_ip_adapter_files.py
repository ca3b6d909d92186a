"""Files of IP-Adapters: which are taken, which models they fit, and what the others say, before weights are read."""

import json
import pathlib

import msgspec
import numpy as np
import pytest

from ip_adapter_files import FLUX_LAYER, save_encoder, save_ip_adapter, save_unet
from noria.config import EngineConfig
from noria.errors import ConfigError, IpAdapterNotFound, ModelError
from noria.models.adapters.ip_adapter_files import IpAdapterFiles, inspect, misfit
from noria.protocol.diffusion import DiffusionModelSpec, IpAdapter
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL

SMALL, WIDE = [(16, 32), (32, 32)], [(16, 48)] * 3


def spec_of(folder: pathlib.Path, name: str) -> DiffusionModelSpec:
    return msgspec.structs.replace(FAKE_MODEL, name=name, folder=str(folder))


@pytest.fixture
def small(tmp_path: pathlib.Path) -> DiffusionModelSpec:
    return spec_of(save_unet(tmp_path / "small", SMALL), "small")


@pytest.fixture
def wide(tmp_path: pathlib.Path) -> DiffusionModelSpec:
    return spec_of(save_unet(tmp_path / "wide", WIDE), "wide")


def test_each_model_has_those_that_it_fits(
    tmp_path: pathlib.Path, small: DiffusionModelSpec, wide: DiffusionModelSpec
) -> None:
    save_encoder(tmp_path / "models" / "image_encoder")
    save_ip_adapter(tmp_path / "models" / "plain.safetensors", SMALL)
    save_ip_adapter(tmp_path / "models" / "plus.safetensors", SMALL, kind="plus")
    other = save_ip_adapter(tmp_path / "wide.safetensors", WIDE, projected=20)
    encoder = save_encoder(tmp_path / "encoder", projection_dim=20, image_size=48)
    config = EngineConfig(ip_adapters=(str(tmp_path / "models"), f"wide={other}"), ip_adapter_encoders=(str(encoder),))
    files = IpAdapterFiles.of(config)
    files.check([FAKE_ENCODER, small, wide])
    assert list(files.for_model(small)) == ["plain", "plus"]
    assert list(files.for_model(wide)) == ["wide"]
    assert dict(files.for_model(spec_of(tmp_path / "without a UNet", "flow"))) == {}
    plain, plus = files.for_model(small).values()
    assert (plain.takes_hidden, plus.takes_hidden) == (False, True)
    assert plain.encoder == tmp_path / "models" / "image_encoder"
    assert files.for_model(wide)["wide"].encoder == encoder  # no other has its width
    assert files.complete(IpAdapter("plus", 0.5, image_digest="abc"), small) == IpAdapter(
        "plus", 0.5, plus.digest, "abc", 32
    )
    with pytest.raises(IpAdapterNotFound, match="small has no IP-Adapter 'wide'; allowed are 'plain', 'plus'"):
        files.complete(IpAdapter("wide"), small)
    with pytest.raises(IpAdapterNotFound, match=r"it has none; the operator sets their files: engine\.ip_adapters"):
        IpAdapterFiles(()).complete(IpAdapter("wide"), small)


def test_a_digest_is_that_of_the_file_and_of_its_encoder(tmp_path: pathlib.Path) -> None:
    files = [save_ip_adapter(tmp_path / str(k) / "a.safetensors", SMALL, seed=k // 2) for k in range(3)]
    for k, file in enumerate(files):
        save_encoder(file.parent / "image_encoder", image_size=[32, 48, 32][k])
    digests = [inspect(file, ()).digest for file in files]
    assert len({*digests}) == 3
    assert inspect(save_ip_adapter(tmp_path / "0" / "b.safetensors", SMALL), ()).digest == digests[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "face-id"}, "a face-id IP-Adapter, which takes the embeddings of a face recognizer"),
        ({"image_proj.proj.weight": None}, r"no IP-Adapter: it lacks image_proj\.proj\.weight"),
        ({"ip_adapter.3.to_v_ip.weight": None}, r"ip_adapter\.N\.to_k_ip, .* with N of 1, 3, 5 … are not complete"),
        ({"ip_adapter.1.to_k_ip.weight": None}, "are not complete: it has keys of 3"),
        ({"image_proj.norm.weight": np.ones(31, np.float32)}, "makes tokens of width 31, but its first layer takes 32"),
        ({"projected": 20}, r"needs an image encoder whose projection_dim is 20; .*image_encoder has 24"),
        ({"kind": "plus", "hidden": 40}, "needs an image encoder whose hidden_size is 40"),
        ({"kind": "flux", f"{FLUX_LAYER.format(1, 'v')}.bias": None}, "with N of 0, 1, 2 … are not complete"),
        ({"kind": "flux", f"{FLUX_LAYER.format(0, 'k')}.weight": None}, "are not complete: it has keys of 1"),
    ],
)
def test_a_file_that_is_not_supported_says_why(
    tmp_path: pathlib.Path, options: dict[str, object], message: str
) -> None:
    save_encoder(tmp_path / "image_encoder")
    file = save_ip_adapter(tmp_path / "a.safetensors", SMALL, **options)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=message) as raised:
        inspect(file, ())
    assert str(file) in raised.value.message


def test_an_encoder_of_another_class_is_rejected(tmp_path: pathlib.Path) -> None:
    save_encoder(tmp_path / "image_encoder", architectures=["CLIPTextModel"])
    with pytest.raises(ModelError, match=r"\['CLIPTextModel'\]; an image encoder of IP-Adapters is a CLIPVision"):
        inspect(save_ip_adapter(tmp_path / "a.safetensors", SMALL), ())


def test_one_for_flux_1_is_told_by_its_names_and_fits_the_blocks(tmp_path: pathlib.Path) -> None:
    save_encoder(tmp_path / "image_encoder")
    file = inspect(save_ip_adapter(tmp_path / "a.safetensors", [(32, 40)] * 2, kind="flux"), ())
    flux = msgspec.structs.replace(spec_of(tmp_path / "flux", "flux"), family="flux")
    config = {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 40, "num_layers": 2}
    for folder, changes in (("flux", {}), ("larger", {"num_layers": 3})):
        (tmp_path / folder / "transformer").mkdir(parents=True)
        (tmp_path / folder / "transformer" / "config.json").write_text(json.dumps(config | changes))
    assert misfit(file, flux) is None
    for changes, reason in [
        ({"folder": str(tmp_path / "larger")}, "for 2 attentions (32 × 40), and flux has 3 attentions (32 × 40)"),
        ({"needs_mask": True}, "it is for FLUX.1, and flux is for inpainting"),
        ({"family": "chroma"}, "it is for FLUX.1, and flux is not"),
    ]:
        assert reason in (misfit(file, msgspec.structs.replace(flux, **changes)) or "")
    unets = inspect(save_ip_adapter(tmp_path / "b.safetensors", SMALL), ())
    assert misfit(unets, flux) == "it is for a UNet, and flux has none"


def test_entries_that_are_no_adapter_of_a_served_model_are_rejected(
    tmp_path: pathlib.Path, small: DiffusionModelSpec
) -> None:
    save_encoder(tmp_path / "image_encoder")
    of_xl = save_ip_adapter(tmp_path / "xl.safetensors", WIDE)
    shapes = r"it is for 3 attentions \(16 × 48\), and small has 2 attentions \(16 × 32, 32 × 32\)"
    for entry, message in [
        (str(of_xl), shapes),
        (str(tmp_path / "no.safetensors"), r"no\.safetensors' is no file \.safetensors, and no folder with one"),
        (str(tmp_path / "image_encoder"), r"makes no|no IP-Adapter: it lacks"),
        (f"other={of_xl}", "is for other, but the image models of this server are: small"),
    ]:
        with pytest.raises((ConfigError, ModelError), match=message):
            IpAdapterFiles((entry,)).check([small])
    with pytest.raises(ConfigError, match=r"engine\.ip_adapter_encoders: .* is not a folder"):
        IpAdapterFiles((), (str(of_xl),)).check([small])
