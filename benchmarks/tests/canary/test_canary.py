"""Canaries in virtual time."""

import json

from noria_bench.canary.bench import HARMFUL, HARMLESS, drift_rates, main
from noria_bench.canary.options import CanaryOptions
from noria_bench.canary.simulation import simulate


def test_a_bad_canary_is_rolled_back_and_a_good_one_promoted():
    bad, good = simulate(HARMFUL[0], 1), simulate(HARMLESS[0], 1)
    assert (bad.end, good.end) == ("rolled_back", "promoted")
    assert bad.num_canary < 200 and bad.num_beyond <= 200
    assert good.num_canary > 3000 and good.max_e < 20
    assert simulate(HARMFUL[0], 1) == bad  # the seed reproduces a run


def test_sticky_keys_stay_with_the_canary_and_count_once():
    run = simulate(HARMLESS[3], 1)
    assert 80 <= run.num_canary <= 4000 / 2 + 200


def test_drift_alarms_on_a_shift_only():
    none, shifted = (drift_rates(500, shift, 40, 1)["alarms"] for shift in (0.0, 0.5))
    assert none["corrected_psi"] == 0 and shifted["corrected_psi"] > 30


def test_the_bench_writes_tables_figures_and_a_plot(tmp_path, capsys):
    assert main(CanaryOptions(4), tmp_path) == 0
    result = json.loads((tmp_path / "canary.json").read_text(encoding="utf-8"))
    assert [each["runs"] for each in result["scenarios"]] == [4] + [1] * 15
    assert result["command"] and result["settings"]["alpha"] == 0.05
    assert "| A/A | 4 | 0.0 %" in capsys.readouterr().out
    assert (tmp_path / "canary.svg").read_text(encoding="utf-8").startswith("<?xml")
