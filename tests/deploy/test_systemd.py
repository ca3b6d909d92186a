"""systemd finds nothing in the unit; its settings exist, and its times fit those of the server."""

import configparser
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
from container import DEPLOY, STOP_S

from noria.cli.main import build_parser, main
from noria.errors import ConfigError, ModelError, UnavailableNow
from noria.settings import list_settings, load

UNIT = DEPLOY / "systemd" / "noria.service"


def service():
    """Return the last value of each key in [Service]."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNIT)
    return parser["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing(tmp_path: pathlib.Path) -> None:
    text = UNIT.read_text().replace("/opt/noria/bin/noria", shutil.which("true"))
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT.name)], capture_output=True, text=True, check=False
    )
    assert UNIT.name not in done.stderr


def test_its_command_and_variables_exist() -> None:
    command = shlex.split(service()["ExecStart"])
    assert build_parser()[0].parse_args(command[1:]).config == "/etc/noria/noria.toml"
    names = re.findall(r"(NORIA_\w+)=", service()["Environment"])
    assert set(names) <= {setting.variable for setting in list_settings()}


def test_its_times_and_statuses_are_those_of_the_server() -> None:
    assert float(service()["TimeoutStopSec"]) > load(None, {}, {}).frontend.drain_s + STOP_S
    assert service()["RestartPreventExitStatus"] == f"{ConfigError.exit_status} {ModelError.exit_status}"
    assert str(UnavailableNow.exit_status) not in service()["SuccessExitStatus"].split()  # so it is started again


def test_nothing_hides_the_devices_of_gpus() -> None:
    implying = {"DeviceAllow", "DevicePolicy", "MountImages", "PrivateDevices", "ProtectClock", "RootImage"}
    assert not implying & set(service())
    assert service()["CapabilityBoundingSet"] == "" and "@clock" in service()["SystemCallFilter"]  # nor sets the clock


def test_the_command_line_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "systemd"]) == 0
    assert capsys.readouterr().out == UNIT.read_text()
