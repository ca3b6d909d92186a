"""`noria bench device`: its arguments, its time limit, and what it measures where little is installed."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from noria.cli.main import main
from noria_bench.device import command
from noria_bench.device.command import TimeLimitError, time_limit


def test_a_missing_device_is_an_error(capsys):
    assert main(["bench", "device", "--device", "cuda:99"]) == 2
    assert "--device is cuda:99" in capsys.readouterr().err


def test_a_time_limit_interrupts_a_block_that_takes_too_long_and_nothing_else():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(0.2):
        pass
    time.sleep(0.3)
    with pytest.raises(TimeLimitError), time_limit(0.0):
        time.sleep(60)
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_signal_that_is_lost_in_a_destructor_is_repeated(monkeypatch):
    monkeypatch.setattr(command, "_REPEAT_S", 0.2)

    def lose_one():
        with contextlib.suppress(TimeLimitError):
            time.sleep(60)
        time.sleep(60)

    with pytest.raises(TimeLimitError), time_limit(0.1):
        lose_one()


@pytest.mark.parametrize(("raised", "status"), [(TimeLimitError, 0), (KeyboardInterrupt, 130)])
def test_an_interrupted_bench_prints_what_there_is(raised, status, monkeypatch, capsys, tmp_path):
    def interrupted(bench, _measurements):
        bench._report.peak_flops_per_s = 1e12
        raise raised

    monkeypatch.setattr("noria_bench.device.runner.DeviceBench.run", interrupted)
    assert main(["bench", "device", "--device", "cpu", "-o", str(tmp_path / "device.json")]) == status
    printed = capsys.readouterr().out
    assert "measured matrix peak: 1 TFLOP/s" in printed
    assert ("INTERRUPTED" in printed) == (raised is KeyboardInterrupt)
    assert (tmp_path / "device.json").exists()


def test_steps_are_measured_where_the_server_s_packages_are_not_installed(tmp_path):
    """And missing packages are named. A fresh process hides the other libraries from imports."""
    hidden = ("transformers", "peft", "psutil", "starlette", "zmq", "prometheus_client", "sqlalchemy")
    script = f"""
import sys
from importlib.machinery import PathFinder
class HidingFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = HidingFinder
import torch
from noria_bench.device import command
from noria_bench.device.architectures import bundled_architecture
from noria_bench.device.schedule import CPU_ESTIMATE, ServingMeasurement, StepMeasurement
def few(device, options, notes):
    measurements = StepMeasurement("bundled", 64, 1, "eager"), ServingMeasurement("uniform", 1.0)
    return measurements, {{"bundled": bundled_architecture()}}, CPU_ESTIMATE
command._select_measurements = few
from noria_bench.__main__ import main
sys.argv[1:] = ["device", "--device", "cpu"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "bundled 64², 1" in done.stdout
    assert "it needs psutil, which is not installed: pip install psutil" in done.stdout
