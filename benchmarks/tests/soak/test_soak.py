"""A soak of twenty seconds: all clients, one attack, one kill."""

import json

import pytest

from noria_bench.soak import bench
from noria_bench.soak.options import SoakOptions


@pytest.mark.slow  # starts a server, kills one of its processes, and waits for the last clients
@pytest.mark.timeout(600)
def test_a_short_soak_samples_everything_and_finds_no_fault(tmp_path, capsys):
    assert bench.main(SoakOptions(20 / 60), tmp_path) == 0, (
        capsys.readouterr().out + (tmp_path / "server.log").read_text()[-5000:]
    )
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["complete"] and result["faults"] == []
    assert sum(result["kills"].values()) == len(result["killed_at_s"]) == 1
    roles = ("supervisor", "frontend", "engine")
    expected = {f"{role} {what}" for role in roles for what in ("PSS", "RSS", "files", "threads")}
    expected |= {"frontend connections", "data bytes", "database bytes"}
    assert result["series"].keys() == expected == {each["quantity"] for each in result["flatness"]}
    assert all(len(values) == len(result["at_s"]) for values in result["series"].values())
    assert all(outcomes for outcomes in result["visits"].values())
    assert (tmp_path / "soak.svg").read_text().count('<g id="axes_') == 5
    assert "| engine PSS, MiB |" in capsys.readouterr().out
