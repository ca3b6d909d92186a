"""The workflows fit the Makefile, the Python versions and the distributions, and have no more rights than they need."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from container import DOCKERFILE, ROOT

from noria import __version__

TEXTS = {file.stem: file.read_text() for file in (ROOT / ".github/workflows").iterdir()}
WORKFLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
RELEASE = WORKFLOWS["release"]["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if ":: Python :: 3." in name}
STEPS = [step for workflow in WORKFLOWS.values() for job in workflow["jobs"].values() for step in job["steps"]]


def check_schema(text, tmp_path):
    (tmp_path / "workflow.yml").write_text(text)
    checker = pathlib.Path(sys.executable).parent / "check-jsonschema"
    command = [checker, "--builtin-schema", "vendor.github-workflows", tmp_path / "workflow.yml"]
    return subprocess.run(command, capture_output=True, text=True, check=False).returncode


@pytest.mark.parametrize("name", WORKFLOWS)
def test_it_conforms_to_the_schema_of_workflows(name, tmp_path):
    assert check_schema(TEXTS[name], tmp_path) == 0


def test_every_make_target_and_every_file_of_a_step_exists():
    makefile = (ROOT / "Makefile").read_text()
    commands = [command for step in STEPS for command in step.get("run", "").splitlines()]
    targets = {target for command in commands for target in re.findall(r"^make ([a-z-]+)", command)}
    assert {"lint", "test", "dist"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:.*##", makefile, re.MULTILINE)] == []
    files = [file for command in commands for file in re.findall(r"(?:tests|deploy)/[\w./-]+", command)]
    assert files and [file for file in files if not (ROOT / file).exists()] == []


def test_python_versions_are_those_of_the_classifiers():
    matrix = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert set(matrix) == PYTHONS and min(PYTHONS) == PROJECT["requires-python"].removeprefix(">=")
    chosen = {step["with"]["python-version"] for step in STEPS if "setup-python" in step.get("uses", "")}
    assert chosen <= PYTHONS | {"${{ matrix.python }}"}


def test_the_versions_of_torch_are_those_of_the_constraints_and_the_dockerfile():
    (pinned,) = re.findall(r"^torch==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {workflow["env"]["TORCH"].split()[0] for workflow in WORKFLOWS.values()} == {pinned}
    indexes = {row["index"] for row in RELEASE["image"]["strategy"]["matrix"]["include"]}
    assert indexes == set(re.findall(r"TORCH_INDEX=(\S+)", DOCKERFILE.read_text()))


def test_every_action_has_a_major_version():
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@(release/)?v\d+", action)] == []


def test_a_job_may_write_only_what_it_publishes():
    rights = {
        (name, job): {right for right, level in body.get("permissions", {}).items() if level == "write"}
        for name, workflow in WORKFLOWS.items()
        for job, body in workflow["jobs"].items()
    }
    attest = {"id-token", "attestations"}
    assert {job: held for job, held in rights.items() if held} == {
        ("release", "image"): attest | {"packages"},
        ("release", "publish"): attest,
    }
    assert [workflow["permissions"] for workflow in WORKFLOWS.values() if workflow["permissions"]] == [
        {"contents": "read"}
    ]


def test_the_job_that_publishes_to_pypi_runs_nothing_of_the_repository_and_comes_last():
    assert [step for step in RELEASE["publish"]["steps"] if "run" in step or "checkout" in step["uses"]] == []
    assert set(RELEASE["publish"]["needs"]) == RELEASE.keys() - {"publish"}


def test_what_is_published_is_what_was_built():
    uploaded = {step["with"]["name"] for step in RELEASE["build"]["steps"] if "upload-artifact" in step.get("uses", "")}
    bench = tomllib.loads((ROOT / "benchmarks/pyproject.toml").read_text())["project"]
    assert uploaded == set(RELEASE["publish"]["strategy"]["matrix"]["distribution"]) == {PROJECT["name"], bench["name"]}


def run_step(name, folder, **variables):
    """Run a step of the build as GitHub does, and return its exit status."""
    (step,) = [step for step in RELEASE["build"]["steps"] if step.get("name") == name]
    environment = {"PATH": os.environ["PATH"], **variables}
    command = ["bash", "-e", "-c", step["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize(("tag", "status"), [(f"v{__version__}", 0), ("v0.0.9", 1)])
def test_a_tag_needs_a_heading_of_the_changelog(tag, status):
    assert run_step("the changelog has this version", ROOT, GITHUB_REF_NAME=tag) == status


def test_pages_on_pypi_have_no_relative_links(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    for page in ("README.md", "benchmarks/README.md"):
        (tmp_path / page).write_text((ROOT / page).read_text())
    variables = {"GITHUB_SERVER_URL": "https://git", "GITHUB_REPOSITORY": "o/r", "GITHUB_REF_NAME": "v1"}
    assert run_step("links of the pages on PyPI lead to this tag", tmp_path, **variables) == 0
    for page in ("README.md", "benchmarks/README.md"):
        before, after = (
            re.findall(r"\]\(([^)]+)\)", (folder / page).read_text().replace("\n", " ")) for folder in (ROOT, tmp_path)
        )
        assert len(before) == len(after) > 1
        for old, new in zip(before, after, strict=True):
            kind = "raw" if old.endswith(".png") else "blob"
            assert new == (old if "://" in old else f"https://git/o/r/{kind}/v1/{old.removeprefix('../')}")
