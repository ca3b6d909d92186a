"""Dashboards as they are built, and as they are committed."""

import dataclasses
import json
import pathlib

import pytest

from noria.cli.main import main
from noria.dashboards.build import DASHBOARDS, build, check_metrics
from noria.dashboards.grafana import to_grafana
from noria.dashboards.panels import WIDTH, Dashboard, Row, timeseries
from noria.errors import ConfigError

COMMITTED = pathlib.Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"

every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)


def test_what_is_committed_is_what_is_built(tmp_path):
    build(tmp_path, report=lambda _: None)
    built = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert built == {file.name: file.read_text() for file in COMMITTED.iterdir()}, "run: noria dashboards build"


def test_a_panel_that_asks_for_an_undeclared_metric_stops_the_build():
    wrong = Dashboard("x", "X", "", (Row("r", (timeseries("Slots", "", "sum(noria_slot_used)"),)),))
    with pytest.raises(
        ConfigError, match=r"'Slots' of 'X' asks for 'noria_slot_used'.*Did you mean 'noria_slots_used'"
    ):
        check_metrics(wrong)


def test_the_command_then_fails_and_writes_nothing(tmp_path, monkeypatch, capsys):
    wrong = Dashboard("x", "X", "", (Row("r", (timeseries("Slots", "", "sum(noria_slot_used)"),)),))
    monkeypatch.setattr("noria.dashboards.build.DASHBOARDS", (*DASHBOARDS, wrong))
    assert main(["dashboards", "build", "--out", str(tmp_path / "out")]) == 2
    assert "noria_slot_used" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_histogram_is_asked_for_by_its_series_only():
    wrong = Dashboard("x", "X", "", (Row("r", (timeseries("P", "", "rate(noria_request_seconds[5m])"),)),))
    with pytest.raises(ConfigError, match="noria_request_seconds"):
        check_metrics(wrong)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        build(tmp_path / "file" / "below", report=lambda _: None)


@every_dashboard
def test_no_two_panels_overlap_and_none_leaves_the_grid(dashboard):
    taken = set()
    for panel in to_grafana(dashboard)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@every_dashboard
def test_every_panel_has_an_id_of_its_own_and_says_what_it_shows(dashboard):
    panels = to_grafana(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for row in dashboard.rows:
        for panel in row.panels:
            assert panel.text.endswith("."), panel.title
            assert panel.queries


def test_dashboards_have_addresses_of_their_own():
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS)
    json.dumps([dataclasses.asdict(dashboard) for dashboard in DASHBOARDS])
