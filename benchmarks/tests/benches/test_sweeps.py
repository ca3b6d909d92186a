"""The variants of each sweep are valid settings of the engine and the targets."""

import msgspec
import pytest

from noria.config import Config, EngineConfig
from noria.engine.diffusion.sizing.auto_settings import Machine, resolve_auto
from noria.models.catalog import open_model
from noria_bench.benches import run_plans, sweeps
from noria_bench.benches.suite_options import FRAMEWORKS_SWEEP, SWEEPS, SuiteOptions
from noria_bench.targets.catalog import TARGETS


@pytest.mark.parametrize("name", [*SWEEPS, FRAMEWORKS_SWEEP])
@pytest.mark.parametrize("full", [False, True])
def test_every_variant_is_valid_and_has_a_unique_name(name, full):
    spec = open_model("bundled")
    found = sweeps.variants(name, full=full)
    assert len({(variant.target, variant.name) for variant in found}) == len(found) >= 2
    for variant in found:
        assert variant.target in TARGETS
        config = msgspec.convert(msgspec.to_builtins(EngineConfig()) | variant.engine, EngineConfig)
        resolve_auto(config, spec, "cpu", Machine(2, has_cuda=False))


def test_batching_starts_with_the_article_s_rows_and_is_a_complete_grid_with_full():
    short, full = sweeps.variants("batching", full=False), sweeps.variants("batching", full=True)
    assert [variant.name for variant in short] == ["500 ms, 8", "250 ms, 8", "1000 ms, 8", "500 ms, 4", "500 ms, 16"]
    assert full[:5] == short
    assert len({(each.settings.timeout_s, each.settings.max_images) for each in full}) == 9


def test_a_sweep_is_scenario_2_scaled_and_keeps_other_settings():
    config = Config(engine=EngineConfig(threads=1))
    found = list(run_plans.sweep_runs("channels-last", SuiteOptions(), config, open_model("bundled")))
    assert {plan.bench for plan in found} == {"sweep-channels-last"}
    assert [(plan.target.name, plan.variant) for plan in found] == [
        ("reference-batched", "off"),
        ("reference-batched", "on"),
        ("noria", "off"),
        ("noria", "on"),
    ]
    assert [plan.reported_settings["channels_last"] for plan in found] == [False, True, False, True]
    traffic = found[0].load_generator.traffic
    assert (traffic.num_users, traffic.seconds, traffic.spawn_interval_s) == (8, 45.0, 2.5)
    assert all(plan.config.engine.threads == 1 for plan in found)


def test_a_run_of_a_framework_reports_its_version_and_the_varied_settings():
    (first, *_) = run_plans.sweep_runs("frameworks", SuiteOptions(), Config(), open_model("bundled"))
    assert first.reported_settings["framework"].startswith("litserve==")
    assert (first.reported_settings["timeout_s"], first.reported_settings["max_images"]) == (0.005, 8)


def test_all_runs_every_sweep_but_the_frameworks():
    found = run_plans.sweep_runs("all", SuiteOptions(full=True), Config(), open_model("bundled"))
    benches = [plan.bench for plan in found]
    assert list(dict.fromkeys(benches)) == [f"sweep-{name}" for name in SWEEPS]
