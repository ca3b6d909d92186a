"""The frameworks' environments: real ones, with fake wheels so that no package registry is used."""

import importlib.metadata
import importlib.util
import subprocess
import zipfile

import pytest

from noria.errors import ConfigError
from noria_bench.targets import environments
from noria_bench.targets.catalog import INSTALLABLE

FRAMEWORK = "litserve"
VERSION = environments.REQUIREMENTS[FRAMEWORK].partition("==")[2]


def write_fake_wheel(folder, name, version, requires=()):
    """A wheel with one module."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "PLANTED = True\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    write_fake_wheel(folder, FRAMEWORK, VERSION, ["torch"])
    write_fake_wheel(folder, "torch", "999.0")  # newer than Noria's: pip must not install it
    return folder


@pytest.fixture(scope="module", autouse=True)
def _own_registry(wheels, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        yield


@pytest.fixture(scope="module")
def install_log(_own_registry):
    """The status messages while the environment was created."""
    lines = []
    environments.install(FRAMEWORK, lines.append)
    return lines


def run(code):
    return subprocess.run(
        [environments.python_of(FRAMEWORK), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_every_framework_has_one_exact_requirement():
    assert set(environments.REQUIREMENTS) == set(INSTALLABLE)
    assert all(requirement.count("==") == 1 for requirement in environments.REQUIREMENTS.values())


def test_the_framework_comes_before_noria_s_environment(install_log):
    assert install_log[-1] == f"litserve=={VERSION} is installed in {environments.folder_of(FRAMEWORK)}"
    assert run("import litserve; print(litserve.PLANTED)") == "True"
    assert run("import importlib.metadata as m; print(m.version('torch'))") == importlib.metadata.version("torch")
    assert run("import sys; print(sys.prefix)") == str(environments.folder_of(FRAMEWORK))
    there = run("import importlib.util as u; print(u.find_spec('diffusers').origin)")
    assert there == importlib.util.find_spec("diffusers").origin


def test_versions_are_of_the_framework_s_packages_without_shared_ones(install_log):
    assert environments.versions_of(FRAMEWORK)[FRAMEWORK] == VERSION
    assert "torch" not in environments.versions_of(FRAMEWORK)
    assert environments.versions_of("ray") == {}


def test_an_installed_environment_is_kept_and_an_incomplete_one_is_created_again(install_log):
    witness = environments.folder_of(FRAMEWORK) / "witness"
    witness.touch()
    environments.install(FRAMEWORK, install_log.append)
    assert witness.exists()
    (environments.folder_of(FRAMEWORK) / "noria-framework.json").unlink()
    with pytest.raises(ConfigError, match="noria bench install litserve"):
        environments.python_of(FRAMEWORK)
    environments.install(FRAMEWORK, install_log.append)
    assert not witness.exists()
    assert environments.python_of(FRAMEWORK).is_file()


def test_an_environment_for_another_version_is_not_used(install_log, monkeypatch):
    monkeypatch.setitem(environments.REQUIREMENTS, FRAMEWORK, "litserve==0.0.1")
    with pytest.raises(ConfigError, match="not installed for this Noria"):
        environments.python_of(FRAMEWORK)


def test_infinity_is_installed_without_its_requirements_and_with_what_it_imports(wheels):
    write_fake_wheel(wheels, "infinity_emb", environments.REQUIREMENTS["infinity"].partition("==")[2], ["numpy<2"])
    for name, _, version in (each.partition("==") for each in environments._IMPORTED["infinity"]):
        write_fake_wheel(wheels, name.replace("-", "_"), version, ["nothing"])
    environments.install("infinity", lambda line: None)
    found = environments.versions_of("infinity")
    assert {"infinity_emb", "posthog", "orjson"} <= found.keys() and "numpy" not in found


def test_the_error_has_pip_s_last_lines_and_an_incomplete_environment_is_not_used():
    with pytest.raises(
        ConfigError, match=r"(?s)could not install bentoml==.*No matching distribution found for bentoml"
    ):
        environments.install("bentoml", lambda line: None)
    with pytest.raises(ConfigError, match="not installed"):
        environments.python_of("bentoml")
