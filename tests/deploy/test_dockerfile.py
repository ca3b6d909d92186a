"""hadolint finds nothing in the Dockerfile, and the settings, routes and files in it exist."""

import json
import pathlib
import re
import subprocess
import sys
import tomllib

from container import DOCKERFILE, ROOT, configuration, image, stages

HADOLINT = pathlib.Path(sys.executable).parent / "hadolint"


def hadolint(text):
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing():
    done = hadolint(DOCKERFILE.read_text())
    assert (done.returncode, done.stdout) == (0, "")


def test_variables_are_settings_and_the_exposed_port_is_the_servers():
    config = configuration(image().command[1:], {})
    assert config.frontend.host == "0.0.0.0"
    assert image().one("EXPOSE") == str(config.frontend.port)
    assert config.data_dir == image().one("VOLUME") == image().one("WORKDIR")


def test_the_health_check_is_a_command_that_knows_the_settings():
    command = json.loads(image().one("HEALTHCHECK").partition("CMD ")[2])
    assert command == ["noria", "health"]  # without --ready: a server that loads a model is healthy


def test_one_argument_pins_the_base_image_of_all_stages():
    assert {stage.one("FROM").split()[0] for stage in stages(DOCKERFILE.read_text())} == {"${BASE}"}
    assert re.search(r"^ARG BASE=python:\$\{PYTHON\}-slim-\w+$", DOCKERFILE.read_text(), re.MULTILINE)


def test_every_installation_takes_its_versions_from_the_constraints():
    """Also that of what builds Noria, which pip would else fetch in any version."""
    (build, _) = stages(DOCKERFILE.read_text())
    commands = [command for line in build.all("RUN") for command in line.split("&&") if "pip install" in command]
    assert len(commands) == 3 and all("constraints.txt" in command for command in commands)
    assert all("--no-build-isolation" in command for command in commands if '".[${EXTRAS}]"' in command)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for tool in project["build-system"]["requires"]:
        name = re.split(r"\W", tool)[0]
        assert re.search(rf"^{name}==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_it_runs_as_a_user_without_privileges():
    user, _, group = image().one("USER").partition(":")  # numbers: Kubernetes' runAsNonRoot cannot check a name
    assert int(user) > 0
    assert int(group) > 0
    assert f"--uid {user}" in "".join(image().all("RUN"))


def test_copied_files_exist_and_are_sent_to_the_builder():
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for stage in stages(DOCKERFILE.read_text()):
        for line in stage.all("COPY"):
            *sources, _ = [word for word in line.split() if not word.startswith("--")]
            if "--from=" not in line:
                assert [source for source in sources if not list(ROOT.glob(source)) or source not in sent] == []


def test_installed_extras_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"^ARG EXTRAS=([\w,-]+)$", DOCKERFILE.read_text(), re.MULTILINE)[1].split(",")
    assert {"diffusion", "minilm"} <= set(extras) <= set(project["optional-dependencies"])  # all models that have names
    assert {*extras, "ray"} == set(re.search(r"EXTRAS=([\w,]+,ray) ", DOCKERFILE.read_text())[1].split(","))
    # The Dockerfile greps for this line.
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    minor = int(re.search(r"^ARG PYTHON=3\.(\d+)$", DOCKERFILE.read_text(), re.MULTILINE)[1])
    assert f"Programming Language :: Python :: 3.{minor}" in project["classifiers"]
