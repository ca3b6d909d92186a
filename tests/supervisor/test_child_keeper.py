"""The environment in which every child runs."""

import pytest

from noria.supervisor.child_keeper import child_environment


@pytest.mark.parametrize(
    ("given", "count"), [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, None)]
)
def test_idle_threads_spin_as_the_environment_says_else_briefly(
    given: dict[str, str], count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert child_environment("folder").get("GOMP_SPINCOUNT") == count


@pytest.mark.parametrize("given", [None, "", "glibc.malloc.trim_threshold=1"])
def test_children_get_large_pages_unless_the_environment_says_something_else(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    wanted = "glibc.malloc.hugetlb=1" if given is None else given
    assert child_environment("folder")["GLIBC_TUNABLES"] == wanted
