"""Configurations that Ray can serve, and on how many nodes."""

import pytest

from noria.cli.main import main
from noria.cluster.check import check_servable
from noria.config import ClusterConfig, Config, EngineConfig, FrontendConfig, JobsConfig, RegistryConfig
from noria.errors import ConfigError

NO_DEPLOYMENTS = RegistryConfig(deployments=False)
SHARED = RegistryConfig(database="postgresql://db/noria")


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (Config(engine=EngineConfig(devices=("cuda:0", "cuda:1"))), "engine.devices"),
        (Config(registry=NO_DEPLOYMENTS, engine=EngineConfig(checkpoints="models")), "engine.checkpoints"),
        (Config(), "registry.database"),
        (Config(registry=SHARED), "jobs.database"),
        (Config(registry=NO_DEPLOYMENTS, cluster=ClusterConfig(frontend_replicas=2)), "jobs.database"),
    ],
)
def test_what_replicas_on_several_nodes_cannot_share_is_rejected(config, setting):
    with pytest.raises(ConfigError, match=f"setting {setting} is"):
        check_servable(config, num_nodes=2)


def test_one_node_shares_its_files_and_each_model_is_served_once():
    config = check_servable(Config(model="a", additional_models=("b", "a", "b")), num_nodes=1)
    assert (config.model, config.additional_models) == ("a", ("b",))
    shared = Config(
        registry=SHARED, jobs=JobsConfig(database=SHARED.database), cluster=ClusterConfig(frontend_replicas=2)
    )
    assert check_servable(shared, num_nodes=2) == shared
    assert check_servable(Config(registry=NO_DEPLOYMENTS), num_nodes=2).registry == NO_DEPLOYMENTS


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "uds"])
def test_a_server_is_not_open_that_should_have_tls_or_a_socket(name):
    with pytest.raises(ConfigError, match=rf"setting frontend\.{name} is '/etc/noria/file'; Ray's proxy listens"):
        check_servable(Config(frontend=FrontendConfig(**{name: "/etc/noria/file"})), num_nodes=1)


@pytest.mark.parametrize("replicas", ["8-1", "0-4"])
def test_what_ray_cannot_serve_is_said_before_ray_is_asked(replicas, capsys):
    assert main(["serve", "--on", "ray://localhost:1", "--engine-replicas", replicas]) == 2
    assert f"cluster.engine_replicas is '{replicas}'; the first number is the fewest" in capsys.readouterr().err


def test_metrics_have_no_address_of_their_own_and_front_ends_no_grpc():
    config = Config(frontend=FrontendConfig(grpc_port=8001))
    assert check_servable(config, num_nodes=1).frontend.grpc_port == 0
    with pytest.raises(ConfigError, match=r"setting frontend\.metrics_address is '0\.0\.0\.0:9464'; on Ray"):
        check_servable(Config(frontend=FrontendConfig(metrics_address="0.0.0.0:9464")), num_nodes=1)
