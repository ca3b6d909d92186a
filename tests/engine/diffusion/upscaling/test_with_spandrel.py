"""The tests of upscalers run where spandrel is installed: in an environment of its own, since it brings torchvision."""

import os
import pathlib
import subprocess
import sys

import pytest

from python_environment import environment_python

HERE = pathlib.Path(__file__).parent


@pytest.mark.slow  # minutes: pip makes an environment
@pytest.mark.timeout(900)
def test_upscalers_pass_their_tests_with_spandrel():
    packages = "spandrel==0.4.2", "torchvision==0.28.0", "einops==0.8.2"
    python = environment_python("upscalers", "--no-deps", *packages)
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), *sys.path]))}
    options = ["-p", "torchvision_operators", "-q", "-n", "0", "-rs", "-m", ""]
    result = subprocess.run(
        [python, "-m", "pytest", *options, HERE / "test_upscaling.py"],
        env=os.environ | paths,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode == 0 and " passed" in result.stdout and " skipped" not in result.stdout, result.stdout
