"""The models that a server's children get, from its configuration and the last routes."""

import msgspec

from noria.config import Config
from noria.models.catalog import open_model
from noria.protocol.routes import Route, Routes, Target
from noria.registry.deployments.routes_file import routes_file, write_routes
from noria.registry.manifest import read_manifest
from noria.supervisor.child_tasks import ServerChildren


def test_endpoints_of_kinds_that_are_not_configured_are_left_out_and_all_are_logged(tmp_path, caplog):
    caplog.set_level("INFO", "noria.supervisor")
    config = Config(data_dir=str(tmp_path))
    images, texts = open_model("bundled"), open_model("minilm")
    targets = [
        Target(number, f"v@{number}", read_manifest(spec.path).digest, spec.fingerprint, (spec.path.as_uri(),))
        for number, spec in enumerate((images, texts), 1)
    ]
    write_routes(routes_file(config), Routes(1, (Route("images", targets[0]), Route("texts", targets[1]))))
    children = ServerChildren(config, [texts], [], "/tmp/n")
    assert [record.message for record in caplog.records] == [
        "the endpoint images is deployed, not configured: it is not loaded; that needs a configured model of kind "
        "diffusion",
        "the endpoint texts is deployed, not configured: it is loaded, too",
    ]
    assert children.models() == [texts, msgspec.structs.replace(texts, name="texts")]
    assert [list(engine.task.models) for engine in children.engines()] == [children.models()]
