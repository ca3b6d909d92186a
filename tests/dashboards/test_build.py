"""The dashboards are built from code, and the committed files are up to date."""

import dataclasses
import json
import pathlib
import re

import pytest

from noria.cli.main import main
from noria.dashboards.build import DASHBOARDS, build, check_metrics
from noria.dashboards.grafana import to_grafana
from noria.dashboards.panels import WIDTH, Dashboard, query, row, timeseries
from noria.errors import ConfigError

COMMITTED = pathlib.Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
RULES_FOLDER = COMMITTED.parents[1] / "prometheus"

every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)


def test_the_committed_dashboards_are_up_to_date(tmp_path):
    build(tmp_path, report=lambda _: None)
    built = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert built == {file.name: file.read_text() for file in COMMITTED.iterdir()}, "run: noria dashboards build"


def test_the_rules_are_written_too_where_asked(tmp_path, capsys):
    assert main(["dashboards", "build", "--out", str(tmp_path / "out"), "--rules", str(tmp_path / "rules")]) == 0
    assert "recording.yml" in capsys.readouterr().out
    for name in ("alerts.yml", "recording.yml"):
        assert (tmp_path / "rules" / name).read_bytes() == (RULES_FOLDER / name).read_bytes()


def test_runbooks_are_links_to_a_server_where_asked(tmp_path):
    address = "http://noria.example:8000"
    main(["dashboards", "build", "--out", str(tmp_path), "--rules", str(tmp_path), "--docs", f"{address}/"])
    links = re.findall(r"runbook_url: (.*)", (tmp_path / "alerts.yml").read_text())
    paths = re.findall(r"runbook_url: (.*)", (RULES_FOLDER / "alerts.yml").read_text())
    assert links == [f"{address}/{path}" for path in paths] != []


def test_a_panel_with_an_undeclared_metric_fails_the_build():
    wrong = Dashboard("x", "X", "", (row("r", timeseries("Slots", "", query("sum(noria_slot_used)"))),))
    with pytest.raises(ConfigError, match=r"'Slots' of 'X' queries 'noria_slot_used'.*Did you mean 'noria_slots_used'"):
        check_metrics(wrong)


def test_a_failed_build_exits_with_2_and_writes_nothing(tmp_path, monkeypatch, capsys):
    wrong = Dashboard("x", "X", "", (row("r", timeseries("Slots", "", query("sum(noria_slot_used)"))),))
    monkeypatch.setattr("noria.dashboards.build.DASHBOARDS", (*DASHBOARDS, wrong))
    assert main(["dashboards", "build", "--out", str(tmp_path / "out")]) == 2
    assert "noria_slot_used" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_histogram_can_be_queried_by_its_series_only():
    wrong = Dashboard("x", "X", "", (row("r", timeseries("P", "", query("rate(noria_request_seconds[5m])"))),))
    with pytest.raises(ConfigError, match="noria_request_seconds"):
        check_metrics(wrong)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("sum(noria_slots) / 2", 'sum(noria_slots{instance=~"$instance"}) / 2'),
        ('rate(noria_x_total{outcome="ok"}[5m])', 'rate(noria_x_total{instance=~"$instance",outcome="ok"}[5m])'),
        ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL"),
    ],
)
def test_a_query_is_of_the_servers_that_the_reader_has_chosen(written, sent):
    assert query(written).expr == sent


def test_a_folder_that_cannot_be_written_is_named_in_the_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        build(tmp_path / "file" / "below", report=lambda _: None)


@every_dashboard
def test_panels_do_not_overlap_and_are_within_the_grid(dashboard):
    taken = set()
    for panel in to_grafana(dashboard)["panels"]:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= WIDTH
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@every_dashboard
def test_every_panel_has_a_unique_id_and_a_description(dashboard):
    panels = to_grafana(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for each in dashboard.rows:
        for panel in each.panels:
            assert panel.description.endswith("."), panel.title
            assert panel.queries


def test_dashboards_have_unique_ids():
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len(DASHBOARDS)
    json.dumps([dataclasses.asdict(dashboard) for dashboard in DASHBOARDS])
