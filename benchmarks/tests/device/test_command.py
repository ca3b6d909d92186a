"""The command: its arguments, its time, and what it can do where little is installed."""

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
    ("arguments", "complaint"),
    [
        (["--device", "tpu"], "'tpu' is no device"),
        (["--budget", "soon"], "'soon' is no number of seconds"),
        (["--budget", "0"], "'0' is no number of seconds"),
        (["--budget", "nan"], "'nan' is no number of seconds"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_argument_is_told_in_words(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert complaint in capsys.readouterr().err


def test_a_device_that_is_not_there_is_told_and_measured_by_nobody(capsys):
    assert run(parse("--device", "cuda:99")) == 2
    assert "--device is cuda:99" in capsys.readouterr().err


def test_an_alarm_interrupts_what_takes_too_long_and_nothing_else():
    quiet = TimeLimit(600.0)
    with quiet:
        pass
    loud = TimeLimit(0.05)
    with pytest.raises(KeyboardInterrupt), loud:
        time.sleep(60)
    assert (quiet.expired, loud.expired) == (False, True)


def test_an_alarm_that_is_lost_in_a_destructor_rings_again(monkeypatch):
    monkeypatch.setattr(TimeLimit, "_AGAIN_S", 0.5)
    alarm = TimeLimit(0.05)
    rings = []
    ring = alarm._on_signal

    def lost_once(number, frame):
        rings.append(number)
        if len(rings) > 1:
            ring(number, frame)

    monkeypatch.setattr(alarm, "_ring", lost_once)
    with pytest.raises(KeyboardInterrupt), alarm:
        time.sleep(60)
    assert len(rings) == 2


def test_an_alarm_that_rings_while_it_is_set_rings_again_in_the_block(monkeypatch):
    monkeypatch.setattr(TimeLimit, "_AGAIN_S", 0.5)
    before, alarm, entered = signal.getsignal(signal.SIGALRM), TimeLimit(0.0), []
    start = alarm._thread.start
    monkeypatch.setattr(alarm._thread, "start", lambda: (start(), time.sleep(0.3)))  # kept from the CPU just here

    def block():
        entered.append(True)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), alarm:
        block()
    assert entered and alarm.expired
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize(("rang", "status"), [(True, 0), (False, 130)])
def test_an_interrupted_bench_prints_what_there_is(rang, status, monkeypatch, capsys, tmp_path):
    def interrupted(bench, _parts):
        bench._report.peak_flops_per_s = 1e12
        raise KeyboardInterrupt

    monkeypatch.setattr("noria_bench.device.runner.DeviceBench.run", interrupted)
    monkeypatch.setattr(TimeLimit, "__init__", lambda alarm, _seconds: setattr(alarm, "rang", rang))
    monkeypatch.setattr(TimeLimit, "__enter__", lambda _alarm: None)
    monkeypatch.setattr(TimeLimit, "__exit__", lambda *_: None)
    assert run(parse("--device", "cpu", "--output", str(tmp_path / "device.json"))) == status
    printed = capsys.readouterr().out
    assert "measured matrix peak: 1 TFLOP/s" in printed
    assert ("INTERRUPTED" in printed) != rang
    assert (tmp_path / "device.json").exists()


def test_steps_are_measured_where_only_torch_and_diffusers_are_installed(tmp_path):
    """And what the wheel lacks is said. The other libraries are hidden from the import of a fresh process."""
    hidden = ("msgspec", "transformers", "psutil", "starlette", "zmq", "prometheus_client", "sqlalchemy")
    script = f"""
import sys
from importlib.machinery import PathFinder
class Poor(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Poor
import torch
from noria_bench.device import command
from noria_bench.device.architectures import bundled
from noria_bench.device.schedule import CPU_GUESS, ServingPart, StepPart
def few(device, notes, *, quick):
    parts = StepPart("bundled", 64, 1, "eager"), ServingPart("alike", 1.0)
    return parts, {{"bundled": bundled()}}, CPU_GUESS
command._what_to_do = few
import argparse
parser = argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args(["--device", "cpu"])))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "bundled 64², 1" in done.stdout
    assert "it needs msgspec, which is not installed: pip install msgspec" in done.stdout
