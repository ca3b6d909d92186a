"""LoRAs and ControlNets of the hub: what is downloaded, what they are called, and what a wrong entry says."""

import fnmatch
import pathlib
import shutil

import huggingface_hub
import msgspec
import pytest

from controlnet_folders import save_controlnet
from ip_adapter_files import ENCODER, save_encoder, save_ip_adapter
from noria.config import Config, EngineConfig
from noria.errors import ConfigError, ModelError, UnavailableNow
from noria.models.adapters.hub_adapters import download_hub_adapters
from noria.models.adapters.ip_adapter_files import inspect as inspect_ip_adapter
from noria.models.adapters.lora_folders import LoraFolders
from noria.models.diffusion.folders.unet_models.controlnet_folder import inspect
from noria.models.diffusion.folders.unet_models.refiner_folder import check_refiner
from noria.models.families import FAMILIES


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache with `org/one`, which has one file, and `org/two`, with two and one in a folder."""
    for file in ("one/pytorch_lora_weights", "two/a", "two/b", "two/unet/whole"):
        path = tmp_path / "hub" / "org" / f"{file}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(8))

    def download(repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert revision in (None, "v1"), revision
        if not (folder := tmp_path / "hub" / repo).is_dir():
            raise huggingface_hub.errors.LocalEntryNotFoundError("no route\nto the hub")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path / "hub" / "org"


def names(tmp_path: pathlib.Path, *entries: str, model: str = "tiny") -> dict[str, pathlib.Path]:
    config = Config(data_dir=str(tmp_path / "data"))
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, loras=entries))
    folders = LoraFolders.of(download_hub_adapters(config, {}).engine)
    folders.check_folders()
    return {name: file.resolve() for name, file in folders.files(model).items()}


def test_a_file_is_called_like_its_repository_and_several_have_their_names_too(
    hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert names(tmp_path, "hf://org/one@v1") == {"one": hub / "one" / "pytorch_lora_weights.safetensors"}
    assert list(names(tmp_path, "hf://org/two")) == ["two-a", "two-b"]
    assert names(tmp_path, "hf://org/two/unet/whole.safetensors") == {"two": hub / "two/unet/whole.safetensors"}
    assert list(names(tmp_path, "hf://org/two", "other=hf://org/one")) == ["two-a", "two-b"]
    assert list(names(tmp_path, "other=hf://org/one", model="other")) == ["one"]
    (hub / "two" / "b.safetensors").unlink()  # a new revision, with the next start
    assert list(names(tmp_path, "hf://org/two")) == ["two"]


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ("hf://org", ConfigError, "names no LoRA of the hub. The form is hf://ORG/NAME"),
        ("tiny=hf://org/one/file.ckpt", ConfigError, "The form is"),
        ("hf://org/one/../../x.safetensors", ModelError, "has no"),
        ("hf://org/one/missing.safetensors", ModelError, "'org/one' on the hub has no missing.safetensors"),
        ("hf://org/none", UnavailableNow, "'org/none' could not be downloaded from the hub: no route. Check"),
    ],
)
def test_a_wrong_entry_is_an_error_at_the_start(
    hub: pathlib.Path, tmp_path: pathlib.Path, entry: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        names(tmp_path, entry)


@pytest.fixture
def hub_of_controlnets(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A hub with `org/edges`, whose weights are in full precision, and `org/depth`, in fp16; what was asked for."""
    asked: list[list[str]] = []
    for name, variant in (("edges", ""), ("depth", ".fp16")):
        folder = save_controlnet(tmp_path / "hub" / "org" / name)
        weights = folder / "diffusion_pytorch_model.safetensors"
        weights.rename(folder / f"diffusion_pytorch_model{variant}.safetensors")

    def download(repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        snapshot = tmp_path / "cache" / repo / str(revision) / "a0b1"
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in (tmp_path / "hub" / repo).iterdir():
            if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_a_refiner_is_called_like_its_repository_and_only_what_it_needs_is_downloaded(
    tiny_refiner_folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: list[str] = []

    def download(repo: str, *, allow_patterns: list[str]) -> str:
        assert repo == "org/xl-refiner"
        patterns.extend(allow_patterns)
        return str(tiny_refiner_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = Config(data_dir=str(tmp_path / "data"))

    def folder_of(entry: str) -> str:
        engine = msgspec.structs.replace(config.engine, refiners=(entry,))
        return download_hub_adapters(msgspec.structs.replace(config, engine=engine), {}).engine.refiners[0]

    model, _, folder = folder_of("tiny=hf://org/xl-refiner").partition("=")
    assert (model, pathlib.Path(folder).name) == ("tiny", "xl-refiner")
    check_refiner(pathlib.Path(folder), FAMILIES["stable-diffusion-xl-refiner"])
    assert not [each for each in patterns if each.startswith("vae")]
    with pytest.raises(ConfigError, match=r"names no refiner of the hub\. The form is hf://ORG/NAME"):
        folder_of("hf://org/xl-refiner@v1")


def test_a_controlnet_is_called_like_its_repository(
    hub_of_controlnets: list[list[str]], tmp_path: pathlib.Path
) -> None:
    config = Config(data_dir=str(tmp_path / "data"))
    entries = ("hf://org/edges@v1", "tiny=hf://org/depth", "/a=b/pose")
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, controlnets=entries))
    for _ in range(2):  # the second start replaces the links
        edges, depth, pose = download_hub_adapters(config, {}).engine.controlnets
    assert (pathlib.Path(edges).name, pose) == ("edges", "/a=b/pose")
    assert inspect(pathlib.Path(edges)).num_parameters
    model, _, folder = depth.partition("=")
    assert (model, pathlib.Path(folder).name) == ("tiny", "depth")
    assert inspect(pathlib.Path(folder)).num_parameters
    assert len(hub_of_controlnets) == 2 * 2 + 1  # download of fp16 once, where there was nothing else
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, controlnets=("hf://org",)))
    with pytest.raises(ConfigError, match=r"names no ControlNet of the hub\. The form is hf://ORG/NAME"):
        download_hub_adapters(config, {})


def test_of_a_safety_classifier_only_what_it_needs_is_downloaded(
    hub_of_controlnets: list[list[str]], tmp_path: pathlib.Path
) -> None:
    needed = {"config.json", "preprocessor_config.json", "model.safetensors"}
    repository = tmp_path / "hub" / "org" / "nsfw"
    repository.mkdir()
    for name in (*needed, "pytorch_model.bin", "README.md", "optimizer.pt"):
        (repository / name).touch()
    config = Config(data_dir=str(tmp_path / "data"))
    engine = msgspec.structs.replace(config.engine, safety_classifiers=("tiny=hf://org/nsfw@v2",))
    (entry,) = download_hub_adapters(msgspec.structs.replace(config, engine=engine), {}).engine.safety_classifiers
    model, _, folder = entry.partition("=")
    assert (model, pathlib.Path(folder).name) == ("tiny", "nsfw")
    assert {file.name for file in pathlib.Path(folder).iterdir()} == needed
    assert len(hub_of_controlnets) == 1


def test_an_ip_adapter_comes_with_the_image_encoder_beside_it_unless_others_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, asked = tmp_path / "hub", list[str]()
    save_ip_adapter(repository / "sdxl_models" / "a.safetensors", [(16, 32)])
    for folder in ("sdxl_models", "models"):
        save_encoder(repository / folder / "image_encoder")

    def download(repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(repository)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    def engine_of(**settings: tuple[str, ...]) -> EngineConfig:
        config = Config(data_dir=str(tmp_path / "data"))
        engine = msgspec.structs.replace(config.engine, loras=(), **settings)
        return download_hub_adapters(msgspec.structs.replace(config, engine=engine), {}).engine

    (entry,) = engine_of(ip_adapters=("tiny=hf://org/ip/sdxl_models/a.safetensors@v1",)).ip_adapters
    model, _, file = entry.partition("=")
    assert (model, pathlib.Path(file).name) == ("tiny", "a.safetensors")
    assert inspect_ip_adapter(pathlib.Path(file), ()).encoder == pathlib.Path(file).parent / "image_encoder"
    assert "sdxl_models/image_encoder/config.json" in asked
    asked.clear()
    engine = engine_of(
        ip_adapters=("hf://org/ip/sdxl_models/a.safetensors",),
        ip_adapter_encoders=("hf://org/ip/models/image_encoder",),
    )
    encoders = tuple(map(pathlib.Path, engine.ip_adapter_encoders))
    assert inspect_ip_adapter(pathlib.Path(engine.ip_adapters[0]), encoders).encoder == encoders[0]
    assert not any(pattern.startswith("sdxl_models/image_encoder") for pattern in asked)
    save_encoder(repository, architectures=["CLIPModel"], vision_config=ENCODER)
    (encoder,) = engine_of(ip_adapter_encoders=("hf://org/clip@v1",)).ip_adapter_encoders
    assert inspect_ip_adapter(pathlib.Path(engine.ip_adapters[0]), (pathlib.Path(encoder),)).image_px == 32
    for wrong, message in (
        ("hf://org/ip", r"names no IP-Adapter of the hub\. The form is hf://ORG/NAME/FILE"),
        ("hf://org/ip/models/no.safetensors", "'org/ip' on the hub has no models/no.safetensors"),
    ):
        with pytest.raises((ConfigError, ModelError), match=message):
            engine_of(ip_adapters=(wrong,))
