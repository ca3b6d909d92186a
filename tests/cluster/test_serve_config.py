"""Ray accepts the Serve config in KubeRay's manifest, and Noria its settings."""

import json
import pathlib
import subprocess
import sysconfig

import pytest
import yaml

from python_environment import environment_python

ROOT = pathlib.Path(__file__).parents[2]
READ = """
import json, sys
sys.path += sys.argv[1:]
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema
from noria.cluster.application import config_of

def read(text):
    tree = yaml.safe_load(text)
    (application,) = ServeDeploySchema.model_validate(tree).applications
    unknown = set(tree) - set(ServeDeploySchema.model_fields)  # Ray ignores them
    unknown |= set(tree["http_options"]) - set(HTTPOptionsSchema.model_fields)
    unknown |= set(tree["applications"][0]) - set(ServeApplicationSchema.model_fields)
    return [*unknown, config_of(application.args).cluster.engine_replicas]

for text in json.load(sys.stdin):
    try:
        print(json.dumps(read(text)))
    except Exception as error:
        print(json.dumps(str(error)))
"""


def read(*serve_configs):
    """Return what READ says of each, in the environment with Ray, which pip makes in minutes, the first time."""
    python = environment_python("ray", "ray[serve]==2.60.0")
    command = [python, "-c", READ, str(ROOT / "src"), sysconfig.get_paths()["purelib"]]
    done = subprocess.run(command, input=json.dumps(serve_configs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_ray_accepts_the_serve_config_and_noria_its_settings():
    manifest = yaml.safe_load((ROOT / "deploy" / "kuberay" / "rayservice.yaml").read_text())
    text = manifest["spec"]["serveConfigV2"]
    accepted, unknown, missing, setting = read(
        text,
        text.replace("proxy_location", "proxy_locations"),
        text.replace("import_path", "import"),
        text.replace("engine_replicas", "engine_replica"),
    )
    assert accepted == ["2-8"]
    assert unknown == ["proxy_locations", "2-8"]
    assert "import_path" in missing
    assert "'cluster.engine_replica' is not a setting" in setting
