"""The command line of the benches: what each command passes on, and which arguments are rejected."""

import pathlib
import tomllib
from dataclasses import replace

import pytest

import noria
import noria_bench.benches.deadlines
import noria_bench.benches.quick
import noria_bench.benches.suite
import noria_bench.calls.bench
import noria_bench.canary.bench
import noria_bench.cluster.bench
import noria_bench.cost.bench
import noria_bench.deploys.bench
import noria_bench.encoders.bench
import noria_bench.sharing.bench
import noria_bench.soak.bench
import noria_bench.soak.neighbours
import noria_bench.targets.serve
from noria.cli.main import main
from noria_bench.benches.deadline_options import DeadlineOptions
from noria_bench.calls.options import CallsOptions
from noria_bench.canary.options import CanaryOptions
from noria_bench.cluster import options as cluster_options
from noria_bench.cluster.options import ClusterOptions
from noria_bench.cost.options import CostOptions
from noria_bench.deploys import options as deploys_options
from noria_bench.deploys.options import DeploysOptions
from noria_bench.encoders.options import QUICK, EncodersOptions
from noria_bench.sharing import options as sharing_options
from noria_bench.sharing.options import SharingOptions
from noria_bench.soak.options import NeighbourOptions, SoakOptions
from noria_bench.targets.catalog import TargetSettings


def record_calls(module, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "main", lambda *arguments, **_: calls.append(arguments) or 0)
    return calls


@pytest.fixture
def suite_calls(monkeypatch):
    """The arguments of `suite.main`."""
    return record_calls(noria_bench.benches.suite, monkeypatch)


def test_quick_takes_settings_and_an_output(monkeypatch):
    calls = record_calls(noria_bench.benches.quick, monkeypatch)
    assert main(["bench", "quick", "m", "--slots", "4", "-o", "results.json"]) == 0
    ((config, output),) = calls
    assert (config.model, config.engine.slots, output) == ("m", 4, pathlib.Path("results.json"))


def test_cost_takes_features_and_sizes(monkeypatch):
    calls = record_calls(noria_bench.cost.bench, monkeypatch)
    words = "bench cost --features live,logs --pairs 2"
    assert main(words.split()) == main(["bench", "cost", "--features", "none"]) == 0
    assert [options for _, options, *_ in calls] == [
        CostOptions(2, features=("logs", "live")),
        CostOptions(features=()),
    ]


def test_benches_of_targets_take_targets_a_duration_a_folder_and_settings(suite_calls):
    words = "bench scenario2 m --targets reference-batched,noria --duration 45 --out there --full --slots 4"
    assert main(words.split()) == 0
    config, folder, plans, _ = suite_calls[0]
    options = plans.args[-1]
    assert (config.model, config.engine.slots, folder) == ("m", 4, pathlib.Path("there"))
    assert [target.name for target in options.targets] == ["noria", "reference-batched"]
    assert (options.seconds, options.full, options.duration_s(90.0)) == (45.0, True, 45.0)


def test_mixed_takes_a_rate_and_a_sweep_its_name(suite_calls):
    assert main(["bench", "mixed", "--rows-per-s", "12.5", "--arrivals", "both"]) == 0
    assert main(["bench", "sweep", "batching", "--full"]) == 0
    assert main(["bench", "mixed", "--users", "8"]) == 0
    assert suite_calls.pop()[2].args[-1].num_users == 8
    mixed, sweep = (call[2].args[-1] for call in suite_calls)
    assert (mixed.rows_per_s, mixed.arrivals, mixed.load_percents) == (12.5, "both", (80,))
    assert (mixed.duration_s(90.0), sweep.duration_s(90.0), sweep.full) == (90.0, 900.0, True)
    assert [call[1].parent.name for call in suite_calls] == ["bench-results"] * 2
    assert suite_calls[1][1].name.endswith("-sweep-batching")


def test_a_missing_framework_is_rejected_before_any_measurement(suite_calls, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "scenario1", "--targets", "noria,ray"]) == 2
    assert "noria bench install ray" in capsys.readouterr().err
    assert suite_calls == []


def test_serve_takes_a_target_and_its_settings(monkeypatch):
    calls = record_calls(noria_bench.targets.serve, monkeypatch)
    assert main(["bench", "serve", "reference-batched", "m", "--batch-timeout-ms", "250", "--batch-size", "4"]) == 0
    assert main(["bench", "serve", "noria", "--port", "0", "--stream", "chunks"]) == 0
    assert [(config.model, target, port) for config, target, port, _ in calls] == [
        ("m", "reference-batched", 8001),
        ("bundled", "noria", 0),
    ]
    assert [call[3] for call in calls] == [TargetSettings(0.25, 4), TargetSettings(stream="chunks")]


@pytest.mark.parametrize(
    ("bench", "words", "expected"),
    [
        (
            noria_bench.cluster.bench,
            "--engines 4,2 --scaling 3 --seconds 2 --rounds 5",
            ClusterOptions((2, 4), (3,), seconds=2.0, num_rounds=5),
        ),
        (noria_bench.cluster.bench, "--quick --rounds 7", replace(cluster_options.QUICK, num_rounds=7)),
        (
            noria_bench.encoders.bench,
            "m --targets noria,raw --connections 8,1 --seconds 2 --corpus mixed --rounds 3 --threads 4",
            EncodersOptions(("raw", "noria"), (1, 8), 2.0, ("mixed",), num_rounds=3),
        ),
        (noria_bench.encoders.bench, "m --quick --rounds 2 --threads 4", replace(QUICK, num_rounds=2)),
        (
            noria_bench.encoders.bench,
            "m --open-loops none --no-sweeps --threads 4",
            EncodersOptions(load_percents=(), sweeps=False),
        ),
        (
            noria_bench.deploys.bench,
            "m --niceness 5,0 --image-users 3 --text-users 9 --seconds 2 --rounds 3 --threads 4",
            DeploysOptions((5, 0), 3, 9, 1.0, 2.0, 3),
        ),
        (noria_bench.deploys.bench, "m --quick --seconds 2 --threads 4", replace(deploys_options.QUICK, seconds=2.0)),
        (
            noria_bench.calls.bench,
            "m --shares 0.33,0.5 --steps 50,20 --schedulers ddim,euler --images 3 --prompts p.txt --seed 7 --threads 4",
            CallsOptions((0.5, 0.33), (50, 20), ("ddim", "euler"), 3, pathlib.Path("p.txt"), 7),
        ),
        (
            noria_bench.sharing.bench,
            "m --seconds 2 --rounds 3 --threads 4",
            SharingOptions(seconds=2.0, num_rounds=3),
        ),
        (
            noria_bench.benches.deadlines,
            "m --loads 90,50,90 --seconds 2.5 --policies reference,fcfs --mix uniform --arrivals bursty --trace-seed 3 "
            "--threads 4",
            DeadlineOptions((50, 90), 2.5, ("fcfs", "reference"), "uniform", "bursty", 3),
        ),
        (noria_bench.soak.bench, "--minutes 1.5", SoakOptions(1.5)),
        (
            noria_bench.soak.neighbours,
            "m --part heaps --heaps jobs --targets noria --seconds 2 --threads 4",
            NeighbourOptions("heaps", ("jobs",), ("noria",), 2.0),
        ),
        (noria_bench.canary.bench, "--runs 8 --trace-seed 3", CanaryOptions(8, 3)),
        (noria_bench.sharing.bench, "m --quick --seconds 2 --threads 4", replace(sharing_options.QUICK, seconds=2.0)),
    ],
)
def test_a_bench_gets_its_options_its_settings_and_a_folder(bench, words, expected, monkeypatch):
    calls = record_calls(bench, monkeypatch)
    name = bench.__name__.removesuffix(".bench").rpartition(".")[2]
    assert main(["bench", name, *words.split(), "--out", "there"]) == main(["bench", name, *words.split()]) == 0
    (*config, options, folder), (*_, unnamed) = calls
    assert [(each.model, each.engine.threads) for each in config] == [("m", 4)] * ("--threads" in words)
    assert (options, folder) == (expected, pathlib.Path("there"))
    assert unnamed.parent.name == "bench-results" and unnamed.name.endswith(f"-{name}")


def test_encoders_are_measured_with_minilm_by_default(monkeypatch):
    calls = record_calls(noria_bench.encoders.bench, monkeypatch)
    assert main(["bench", "encoders"]) == 0 and calls[0][0].model == "minilm"


def test_a_report_of_a_folder_without_runs_is_rejected(tmp_path, capsys):
    assert main(["bench", "report", str(tmp_path)]) == 2
    assert "holds no runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("scenario1 --targets noria,triton", "'triton'; targets are all, noria, reference-stream-async"),
        ("scenario1 --duration soon", "'soon'; a run lasts 1 to 86400 whole seconds"),
        ("scenario1 --duration 1.5", "'1.5'; a run lasts 1 to 86400 whole seconds"),
        ("scenario1 --duration 90000", "'90000'; a run lasts 1 to 86400 whole seconds"),
        ("mixed --rows-per-s nan", "'nan'; a rate is 0.1 to 1000000 rows per second"),
        ("mixed --rows-per-s 0", "'0'; a rate is 0.1 to 1000000 rows per second"),
        ("mixed --load-percent much", "'much'; loads are whole per cents"),
        ("mixed --load-percent 50 --rows-per-s 10", "not allowed with argument"),
        ("mixed --users 8 --mixes colours", "'colours'; mixes are all, settings, uniform, sizes, start-images, loras"),
        ("scenario2 --quick --full", "not allowed with argument"),
        ("deadlines --loads fifty", "'fifty'; loads are whole per cents"),
        ("deadlines --loads 50,", "'50,'; loads are whole per cents"),
        ("deadlines --loads 5000", "'5000'; loads are whole per cents of capacity from 1 to 1000"),
        (
            "deadlines --policies reference,lifo",
            "'lifo'; policies are all, fair, least-slack, shortest-first, fcfs, reference",
        ),
        ("deadlines --seconds inf", "'inf'; a run lasts 1 to 3600 seconds"),
        ("cost --features none,logs", "'none'; features besides none are all, metrics, logs, live"),
        ("cost --pairs 0", "'0'; it is a whole number of pairs from 1 to 1000"),
        ("deploys --image-users 1000", "'1000'; it is a whole number of users from 1 to 256"),
        ("sweep colour", "'attention', 'channels-last'"),
        ("soak --minutes 0", "'0'; a soak takes more than 0"),
        ("encoders --targets noria,tei", "'tei'; targets are all, raw, raw-bfloat16, noria"),
        ("canary --runs 3", "'3'; runs are a whole number from 4 to 100000"),
        ("device --device tpu", "'tpu' is not a device: auto, cpu, cuda or cuda:N"),
        ("device --budget 0", "'0'; a budget is 1 to 86400 seconds"),
        ("device --models sd15,sd3", "'sd3'; models are all, sd15, sdxl, z-image, flux"),
        ("device --dtype int8", "'int8'; dtypes are float32, bfloat16, float16, auto"),
        ("cluster --engines 0,1", "'0,1'; numbers of engines are whole numbers from 1 to 64"),
        ("encoders --connections 0", "'0'; connections are whole numbers from 1 to 128"),
        ("encoders --corpus short", "'short'; corpora are all, fixed, mixed"),
        ("deploys --niceness 19,20", "'19,20'; a niceness is a whole number from 0 to 19"),
        ("calls --shares 0.2", "'0.2'; shares are numbers from 0.33 to 0.99"),
        ("neighbours --heaps longer", "'longer'; heaps are all, long, short, jobs, texts"),
        ("calls --images 0", "'0'; it is a whole number of images from 1 to 10000"),
        ("install torchserve", "'litserve', 'bentoml', 'ray', 'triton'"),
        ("serve triton", "'noria', 'reference-stream-async'"),
    ],
)
def test_the_error_for_a_wrong_option_says_what_is_allowed(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words.split()])
    assert caught.value.code == 2
    assert message.replace("'", "") in capsys.readouterr().err.replace("'", "")


def test_the_benches_and_the_server_require_one_another_s_version():
    bench, server = (
        tomllib.loads((pathlib.Path(__file__).parents[up] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for up in (1, 2)
    )
    assert bench["version"] == noria.__version__
    assert f"noria-serve[diffusion,minilm]=={noria.__version__}" in bench["dependencies"]
    assert server["optional-dependencies"]["bench"] == [f"noria-bench=={noria.__version__}"]
