"""The listening sockets: who can reach them, those of the metrics, and how many files connections may take."""

import logging
import resource

import pytest

from noria.config import FrontendConfig
from noria.errors import ConfigError
from noria.supervisor.listener import open_listeners, raise_file_limit


@pytest.mark.parametrize(
    ("host", "api_keys_file", "warns"),
    [("0.0.0.0", "", True), ("0.0.0.0", "keys.toml", False), ("127.0.0.1", "", False), ("localhost", "", False)],
)
def test_a_server_that_others_reach_without_keys_says_so(host, api_keys_file, warns, caplog):
    with (
        caplog.at_level(logging.WARNING, "noria.supervisor"),
        open_listeners(FrontendConfig(host=host, port=0, api_keys_file=api_keys_file)) as (listener,),
    ):
        assert listener.getsockname()[1]
    assert [record.noria_fields["event"] for record in caplog.records] == ["open_without_keys"] * warns


def test_metrics_may_have_an_address_of_their_own():
    with open_listeners(FrontendConfig(port=0, metrics_address="127.0.0.2:0")) as listeners:
        assert [each.getsockname()[0] for each in listeners] == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x"])
def test_an_address_of_metrics_has_a_host_and_a_port(address):
    with (
        pytest.raises(ConfigError, match=r"metrics_address is .*allowed is ADDRESS:PORT"),
        open_listeners(FrontendConfig(port=0, metrics_address=address)),
    ):
        pass


def test_the_soft_limit_of_open_files_becomes_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
