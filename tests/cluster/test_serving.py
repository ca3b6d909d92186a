"""Messages of `noria serve --on` about a Ray that is not there. A Ray that is there is in test_ray_cluster.py."""

import importlib.metadata
import importlib.util
import socket
import subprocess
import sys

import pytest

from noria.cluster.serving import end_haproxy, running_on
from noria.config import Config
from noria.errors import ConfigError, MissingExtra


@pytest.mark.parametrize("target", ["", "nonsense", "ray://host", "ray://:10001", "http://host:10001", "ray://h:1:2"])
def test_a_target_that_is_none_is_rejected(target):
    with pytest.raises(ConfigError, match="allowed are `local`"), running_on(target, Config()):
        pass


def test_a_cluster_that_does_not_answer_is_reported_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        target = f"ray://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match="nothing answers there"), running_on(target, Config()):
            pass


@pytest.mark.parametrize("found", [(), ("ray",)])  # a folder `ray` in the working directory is found, too
def test_without_ray_the_error_names_the_extra(found, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    with pytest.raises(MissingExtra, match=r"noria-serve\[ray\]"), running_on("local", Config()):
        pass


@pytest.mark.parametrize("version", ["2.59.1", "1.13.0"])
def test_a_ray_that_is_too_old_is_rejected_with_both_versions(version, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"needs Ray 2\.60 or newer, and {version}"), running_on("local", Config()):
        pass


def test_the_haproxy_that_ray_leaves_behind_ends_and_that_of_another_node_does_not():
    command = [sys.executable, "-c", "import time; time.sleep(60)", "-f"]
    with (
        subprocess.Popen([*command, "/tmp/haproxy-serve/aa11/haproxy.cfg"]) as left,
        subprocess.Popen([*command, "/tmp/haproxy-serve/bb22/haproxy.cfg"]) as other,
    ):
        end_haproxy("aa11")
        has_ended = left.poll() is not None, other.poll() is not None
        other.kill()
    assert has_ended == (True, False)
