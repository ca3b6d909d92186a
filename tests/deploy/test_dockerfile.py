"""The Dockerfile, judged by hadolint and against what Noria is."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from container import DOCKERFILE, ROOT, configuration, image, probed_paths, stages

HADOLINT = pathlib.Path(sys.executable).parent / "hadolint"


def hadolint(text):
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing():
    done = hadolint(DOCKERFILE.read_text())
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_finds_what_is_planted():
    assert "DL3002" in hadolint(DOCKERFILE.read_text().replace("USER 10001:10001", "USER root")).stdout


def test_variables_are_settings_and_the_port_is_the_one_that_is_listened_on():
    config = configuration(image().command[1:], {})
    assert config.frontend.host == "0.0.0.0"
    assert image().one("EXPOSE") == str(config.frontend.port)
    assert config.data_dir == image().one("VOLUME") == image().one("WORKDIR")


def test_the_health_check_asks_a_route_that_is_open_to_all():
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", image().one("HEALTHCHECK")).groups()
    assert port == image().one("EXPOSE")
    assert path in probed_paths()
    assert path != "/readyz"  # loading is no sickness


def test_it_runs_as_nobody_in_particular():
    user, _, group = image().one("USER").partition(":")  # numbers: Kubernetes' runAsNonRoot cannot judge a name
    assert int(user) > 0
    assert int(group) > 0
    assert f"--uid {user}" in "".join(image().all("RUN"))


def test_what_is_copied_is_there_and_is_sent_to_the_builder():
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for stage in stages(DOCKERFILE.read_text()):
        for line in stage.all("COPY"):
            *sources, _ = [word for word in line.split() if not word.startswith("--")]
            if "--from=" not in line:
                assert [source for source in sources if not (ROOT / source).exists() or source not in sent] == []


def test_what_is_installed_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r'"\.\[([\w,]+)\]"', DOCKERFILE.read_text())[1].split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    assert re.search(
        r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )  # which the Dockerfile looks for
    minor = int(re.search(r"^ARG PYTHON=3\.(\d+)$", DOCKERFILE.read_text(), re.MULTILINE)[1])
    assert f"Programming Language :: Python :: 3.{minor}" in project["classifiers"]


@pytest.mark.parametrize("plant", ["NORIA_DATA_DIRS=/data", "NORIA_FRONTEND_PORT=http"])
def test_a_variable_that_is_no_setting_is_found(plant):
    from noria.errors import ConfigError

    with pytest.raises(ConfigError, match="NORIA_"):
        configuration(["serve"], dict([plant.split("=")]))
