"""`noria bench device`: its arguments, its time limit, and what it measures where little is installed."""

import argparse
import signal
import subprocess
import sys
import time

import pytest

from noria_bench.device.command import TimeLimit, add_arguments, run


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_defaults_fit_eight_minutes():
    found = parse()
    assert (found.device, found.dtype, found.budget, found.quick, found.output) == ("auto", "auto", 480.0, False, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--budget", "soon"], "'soon' is not a number of seconds"),
        (["--budget", "0"], "'0' is not a number of seconds"),
        (["--budget", "nan"], "'nan' is not a number of seconds"),
        (["--models", "sd15,sd3"], "'sd3' is not a model: sd15, sdxl, z-image, flux"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_argument_has_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert message in capsys.readouterr().err


def test_a_missing_device_is_an_error(capsys):
    assert run(parse("--device", "cuda:99")) == 2
    assert "--device is cuda:99" in capsys.readouterr().err


def test_a_time_limit_interrupts_a_block_that_takes_too_long_and_nothing_else():
    quiet = TimeLimit(600.0)
    with quiet:
        pass
    loud = TimeLimit(0.05)
    with pytest.raises(KeyboardInterrupt), loud:
        time.sleep(60)
    assert (quiet.expired, loud.expired) == (False, True)


def test_a_signal_that_is_lost_in_a_destructor_is_repeated(monkeypatch):
    monkeypatch.setattr(TimeLimit, "_REPEAT_S", 0.5)
    limit = TimeLimit(0.05)
    signals = []
    on_signal = limit._on_signal

    def lost_once(number, frame):
        signals.append(number)
        if len(signals) > 1:
            on_signal(number, frame)

    monkeypatch.setattr(limit, "_on_signal", lost_once)
    with pytest.raises(KeyboardInterrupt), limit:
        time.sleep(60)
    assert len(signals) == 2


def test_a_signal_before_the_block_is_repeated_in_it(monkeypatch):
    monkeypatch.setattr(TimeLimit, "_REPEAT_S", 0.5)
    before, limit, entered = signal.getsignal(signal.SIGALRM), TimeLimit(0.0), []
    start = limit._thread.start
    monkeypatch.setattr(limit._thread, "start", lambda: (start(), time.sleep(0.3)))  # as if not scheduled here

    def block():
        entered.append(True)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), limit:
        block()
    assert entered and limit.expired
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize(("expired", "status"), [(True, 0), (False, 130)])
def test_an_interrupted_bench_prints_what_there_is(expired, status, monkeypatch, capsys, tmp_path):
    def interrupted(bench, _measurements):
        bench._report.peak_flops_per_s = 1e12
        raise KeyboardInterrupt

    monkeypatch.setattr("noria_bench.device.runner.DeviceBench.run", interrupted)
    monkeypatch.setattr(TimeLimit, "__init__", lambda limit, _seconds: setattr(limit, "expired", expired))
    monkeypatch.setattr(TimeLimit, "__enter__", lambda _limit: None)
    monkeypatch.setattr(TimeLimit, "__exit__", lambda *_: None)
    assert run(parse("--device", "cpu", "--output", str(tmp_path / "device.json"))) == status
    printed = capsys.readouterr().out
    assert "measured matrix peak: 1 TFLOP/s" in printed
    assert ("INTERRUPTED" in printed) != expired
    assert (tmp_path / "device.json").exists()


def test_steps_are_measured_where_only_torch_and_diffusers_are_installed(tmp_path):
    """And missing packages are named. A fresh process hides the other libraries from imports."""
    hidden = ("msgspec", "transformers", "peft", "psutil", "starlette", "zmq", "prometheus_client", "sqlalchemy")
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
def few(device, models, notes, *, quick):
    measurements = StepMeasurement("bundled", 64, 1, "eager"), ServingMeasurement("uniform", 1.0)
    return measurements, {{"bundled": bundled_architecture()}}, CPU_ESTIMATE
command._select_measurements = few
import argparse
parser = argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args(["--device", "cpu"])))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "bundled 64², 1" in done.stdout
    assert "it needs msgspec, which is not installed: pip install msgspec" in done.stdout
