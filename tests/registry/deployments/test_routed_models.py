"""The models that a server holds: the configuration's, and what is deployed instead or beside."""

import shutil

import msgspec
import pytest

from noria.errors import RegistryError
from noria.models.catalog import open_model
from noria.protocol.routes import Route, Routes, Target
from noria.registry.deployments.routed_models import open_target, routed_models
from noria.registry.manifest import read_manifest


@pytest.fixture
def second(tiny_folder, tmp_path):
    """Another version of a small model."""
    folder = tmp_path / "second"
    shutil.copytree(tiny_folder, folder)
    (folder / "noria.json").write_text('{"default_steps": 3}')
    return folder


def target_of(folder, **changes):
    spec = open_model(str(folder))
    target = Target(1, "shapes@2", read_manifest(folder).digest, spec.fingerprint, (folder.as_uri(),))
    return msgspec.structs.replace(target, **changes)


@pytest.fixture
def held(tiny_folder):
    """Returns the fingerprints of the models held with a route for `tiny`, and the errors."""
    configured = [msgspec.structs.replace(open_model(str(tiny_folder)), name=name) for name in ("tiny", "other")]

    def hold(control, canary=None):
        errors = []
        routes = Routes(1, (Route("tiny", control, canary, 0.1),))
        models = routed_models(configured, routes, lambda *error: errors.append(error))
        return [(spec.name, spec.fingerprint) for spec in models], errors

    return hold


def test_a_deployed_control_replaces_the_configurations_model_and_a_canary_is_loaded_later(held, tiny_folder, second):
    first, new = open_model(str(tiny_folder)).fingerprint, target_of(second)
    assert held(new) == ([("tiny", new.fingerprint), ("other", first)], [])
    assert held(None, new) == ([("tiny", first), ("other", first)], [])


def test_the_configurations_model_serves_if_a_control_cannot_be_opened(held, tiny_folder, second):
    first, gone = open_model(str(tiny_folder)).fingerprint, target_of(second, urls=("file:///nowhere",))
    models, ((endpoint, target, reason),) = held(gone)
    assert models == [("tiny", first), ("other", first)]
    assert (endpoint, target) == ("tiny", gone)
    assert "shapes@2 cannot be loaded" in reason


def test_the_place_whose_files_are_unchanged_is_opened(second, tmp_path):
    manifest, moved = read_manifest(second).text, tmp_path / "moved"
    shutil.copytree(second, moved)
    (second / "tokenizer" / "added.txt").write_text("changed")
    target = target_of(moved, urls=(second.as_uri(), "s3://bucket/second", moved.as_uri()))
    spec = open_target("t2i", target, manifest)
    assert (spec.name, spec.path) == ("t2i", moved)
    with pytest.raises(RegistryError, match=r"added\.txt changed.*not on this machine"):
        open_target("t2i", msgspec.structs.replace(target, urls=target.urls[:2]), manifest)
