"""The models to serve: each has a name of its own."""

import shutil

import msgspec
import pytest

from noria.config import Config, EndpointConfig, EngineConfig
from noria.errors import ConfigError
from noria.settings import load
from noria.supervisor.served_models import IMAGE_NICENESS, divide_cores, endpoint_models, open_checkpoints, open_models
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL


def test_two_models_with_one_name_are_rejected(tmp_path, bundled_folder):
    shutil.copytree(bundled_folder, tmp_path / "copy")
    config = load(None, {}, {"model": str(bundled_folder), "additional_models": (str(tmp_path / "copy"),)})
    with pytest.raises(ConfigError, match="both called 'noria-shapes'"):
        open_models(config)
    (tmp_path / "copy" / "noria.json").write_text('{"name": "other"}')
    assert [spec.name for spec in open_models(config)] == ["noria-shapes", "other"]


@pytest.mark.parametrize("setting", ["loras", "embeddings", "safety_classifiers"])
def test_what_is_for_one_model_needs_this_model(setting, tmp_path, bundled_folder):
    config = Config(model=str(bundled_folder), engine=EngineConfig(**{setting: (f"shapes={tmp_path}",)}))
    message = rf"engine\.{setting}: '{tmp_path}' is for shapes, but .* are: noria-shapes\. .*leave MODEL= out"
    with pytest.raises(ConfigError, match=message):
        open_models(config)
    checkpoints = msgspec.structs.replace(config.engine, checkpoints=str(tmp_path))  # which may have one of the name
    assert open_models(msgspec.structs.replace(config, engine=checkpoints))


def test_loras_may_be_for_a_served_model_or_for_all_and_the_bundled_ones_need_no_model(tmp_path, tiny_folder):
    loras = ("bundled", str(tmp_path), f"{tiny_folder.name}={tmp_path}")
    assert open_models(Config(model=str(tiny_folder), engine=EngineConfig(loras=loras)))


def test_a_vae_needs_a_model_in_a_single_file():
    with pytest.raises(ConfigError, match=r"engine\.vae is 'a\.safetensors', but no model is a single file"):
        open_models(Config(engine=EngineConfig(vae="a.safetensors")))


def test_checkpoints_need_an_engine_for_images_and_names_of_their_own(tmp_path, tiny_folder, caplog):
    for name in ("tiny", "other"):
        (tmp_path / name).symlink_to(tiny_folder)
    (tmp_path / "lora.safetensors").write_bytes(b"no header")
    config = Config(engine=EngineConfig(checkpoints=str(tmp_path)))
    with pytest.raises(ConfigError, match="no model is for images"):
        open_checkpoints(config, [FAKE_ENCODER])
    with pytest.raises(ConfigError, match="tiny would be called 'tiny', as a model or an endpoint is"):
        open_checkpoints(config, [FAKE_MODEL])
    (tmp_path / "tiny").unlink()
    assert open_checkpoints(config, [FAKE_MODEL]) == ("other",)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["not served"]


@pytest.mark.parametrize(
    ("endpoints", "says"),
    [
        ((("a", "x.py:X"), ("a", "y.py:Y")), "another endpoint or a model has this name"),
        ((("tiny", "x.py:X"),), "another endpoint or a model has this name"),
        ((("a", "x.py:X", "tiny"),), "model is 'tiny'; allowed are the text encoders of this server: 'fake-encoder'"),
    ],
)
def test_an_endpoint_has_a_name_of_its_own_and_a_served_encoder(endpoints, says):
    config = Config(endpoints=tuple(EndpointConfig(*each) for each in endpoints))
    with pytest.raises(ConfigError, match=says):
        endpoint_models(config, [FAKE_MODEL, FAKE_ENCODER])


def test_an_endpoint_that_names_no_model_has_the_first_encoder_if_there_is_one():
    config = Config(endpoints=(EndpointConfig("a", "x.py:X"), EndpointConfig("b", "x.py:X", "fake-encoder")))
    assert endpoint_models(config, [FAKE_MODEL, FAKE_ENCODER]) == {"a": FAKE_ENCODER, "b": FAKE_ENCODER}
    assert endpoint_models(Config(endpoints=config.endpoints[:1]), [FAKE_MODEL]) == {}


BOTH = [FAKE_MODEL, FAKE_ENCODER]


@pytest.mark.parametrize(
    ("settings", "models", "served", "threads", "niceness"),
    [
        ({}, [FAKE_MODEL], BOTH, "auto", IMAGE_NICENESS),
        ({}, [FAKE_ENCODER], BOTH, "auto", 0),
        ({}, [FAKE_MODEL], [FAKE_MODEL], "auto", 0),
        ({"encoder_cores": "shared"}, [FAKE_MODEL], BOTH, "auto", 0),
        ({"encoder_cores": 3}, [FAKE_MODEL], BOTH, 5, 0),
        ({"encoder_cores": 3}, [FAKE_ENCODER], BOTH, "auto", 0),
        ({"encoder_cores": 3}, [FAKE_MODEL], [FAKE_MODEL], "auto", 0),
        ({"encoder_cores": 3, "devices": ("cpu", "cpu")}, [FAKE_MODEL], BOTH, 2, 0),
        ({"encoder_cores": 3, "threads": 7}, [FAKE_MODEL], BOTH, 7, 0),
    ],
)
def test_image_engines_beside_encoders_let_texts_go_first_or_have_the_rest_of_the_cores(
    settings, models, served, threads, niceness
):
    config, got = divide_cores(EngineConfig(**settings), models, served, num_cores=8)
    assert (config.threads, got) == (threads, niceness)


def test_encoders_cannot_have_all_cores_of_a_server_with_images():
    message = "engine.encoder_cores is 2, and this server may use 2 cores: images would have none"
    with pytest.raises(ConfigError, match=message):
        divide_cores(EngineConfig(encoder_cores=2), [FAKE_MODEL], BOTH, num_cores=2)
