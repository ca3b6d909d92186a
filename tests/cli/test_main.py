"""The command line: what is parsed, what is called, what is printed, and with which status it ends."""

import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import noria.cli.doctor
import noria.cli.generate
import noria.supervisor.supervisor
import noria_bench.benches.deadlines
import noria_bench.benches.quick
import noria_bench.benches.suite
import noria_bench.targets.serve
from noria import __version__
from noria.cli.main import build_parser, main
from noria.config import Config
from noria.errors import GenerationFailed, InvalidField, ModelError
from noria.frontend.engines.pool import RawImage
from noria.frontend.http.api_keys import key_digest, read_keys
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest, ImageRequestBody
from noria.settings import list_settings
from noria_bench.benches.deadline_options import DeadlineOptions
from noria_bench.targets.catalog import TargetSettings

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.fixture
def served_configs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that `serve` was called with."""
    configs: list[Config] = []
    monkeypatch.setattr(noria.supervisor.supervisor, "serve", lambda config: configs.append(config) or 0)
    return configs


def test_building_the_parser_imports_nothing_heavy() -> None:
    code = "import sys, noria.cli.main; noria.cli.main.build_parser(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert not loaded & {
        "torch",
        "diffusers",
        "transformers",
        "starlette",
        "uvicorn",
        "zmq",
        "numpy",
        "asyncio",
        "huggingface_hub",
    }


def test_python_m_noria_prints_its_version() -> None:
    result = subprocess.run([sys.executable, "-m", "noria", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"noria {__version__}\n"


def test_serve_takes_a_model_and_every_setting(served_configs: list[Config]) -> None:
    arguments = "serve org/name --port 9000 --slots 4 --no-channels-last --compile --devices cpu,cpu --buckets 8,16 --log-level error"
    assert main(arguments.split()) == 0
    (config,) = served_configs
    assert (config.model, config.frontend.port, config.engine.slots) == ("org/name", 9000, 4)
    assert (config.engine.channels_last, config.engine.compile) == (False, True)
    assert (config.engine.devices, config.engine.buckets) == (("cpu", "cpu"), (8, 16))


def test_every_setting_is_a_flag_of_serve_or_its_argument() -> None:
    help_text = build_parser()[1]["serve"].format_help()
    for setting in list_settings():
        assert f"{setting.flag} " in help_text.replace(",", " ") or setting.key == "model"


def test_flags_win_over_the_environment_and_the_file(
    served_configs: list[Config], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noria.toml").write_text('model = "from-file"\n[engine]\nslots = 2\nthreads = 2\ndecode_batch = 2\n')
    monkeypatch.setenv("NORIA_ENGINE_SLOTS", "3")
    monkeypatch.setenv("NORIA_ENGINE_THREADS", "3")
    assert main(["serve", "--config", str(tmp_path / "noria.toml"), "--slots", "4"]) == 0
    engine = served_configs[0].engine
    assert (engine.slots, engine.threads, engine.decode_batch, served_configs[0].model) == (4, 3, 2, "from-file")


def test_generate_makes_a_body_of_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(noria.cli.generate, "run", lambda **options: calls.append(options) or 0)
    options = "-o out.JPG --negative-prompt dark --seed 7 --width 64 --height 96 --steps 5 --guidance 2.5 --scheduler ddim -n 2"
    assert main(["generate", "a red circle", *options.split(), "--model", "m", "--threads", "1"]) == 0
    body = ImageRequestBody(
        "a red circle", "dark", None, 7, 64, 96, inference_steps=5, guidance_scale=2.5, n=2, scheduler="ddim", format="jpeg"
    )  # fmt: skip
    assert calls[0]["body"] == body
    assert calls[0]["output"] == pathlib.Path("out.JPG")
    assert (calls[0]["config"].model, calls[0]["config"].engine.threads) == ("m", 1)


def test_key_prints_a_table_and_beside_it_the_key_once(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "alice"]) == 0
    printed = capsys.readouterr()
    (tmp_path / "keys.toml").write_text(printed.out)
    (key,) = read_keys(str(tmp_path / "keys.toml"))
    assert (key.name, key.sha256) == ("alice", key_digest(printed.err.strip().encode()))
    assert main(["key", "alice and bob"]) == 2
    assert "name is 'alice and bob'; allowed is 1 to 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["serv"], "serve"),
        (["serve", "--prot", "1"], "unknown argument '--prot'. Did you mean '--port'?"),
        (["serve", "--por", "1"], "Did you mean '--port'?"),
        (["serve", "a", "b"], "unknown argument 'b'"),
        (["generate", "x", "-n", "two"], "-n"),
        (["show"], "FILE"),
        (["generate", "caf\udce9"], "the argument 'caf\\udce9' is not UTF-8"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("noria: error: ")
    assert error.count("\n") == 1
    assert words in error


def test_a_wrong_setting_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "x"]) == 2
    assert capsys.readouterr().err.startswith("noria: error: flag --port is 'x'")


def test_an_unknown_image_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "-o", "image.gif"]) == 2
    assert ".png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "words"), [("folder.png", "is a folder"), ("missing/image.png", "there is no folder 'missing'")]
)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_read(
    output: str, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert main(["generate", "x", "-o", output, "--model", "./no-such-model"]) == 2
    assert words in capsys.readouterr().err


def test_generate_draws_without_a_deadline_and_numbers_the_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[ImageRequest] = []

    def generate(config: Config, spec: ModelSpec, request: ImageRequest) -> list[RawImage]:
        requests.append(request)
        return [RawImage(request.seed + index, 8, 8, memoryview(bytes(192))) for index in range(request.num_images)]

    monkeypatch.setattr(noria.cli.generate, "_generate", generate)
    assert main(["generate", "x", "-n", "2", "-o", str(tmp_path / "image.webp")]) == 0
    assert requests[0].timeout_s == math.inf
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["image-0.webp", "image-1.webp"]
    assert all(file.read_bytes()[8:12] == b"WEBP" for file in files)


def test_a_missing_model_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "./no-such-folder", "--port", "0"]) == 3
    assert capsys.readouterr().err.startswith("noria: error: no such folder: no-such-folder")


@pytest.mark.parametrize(
    ("error", "status"),
    [(ModelError("m"), 3), (InvalidField("f"), 2), (GenerationFailed("g"), 1), (KeyboardInterrupt(), 130)],
)
def test_what_goes_wrong_decides_the_status(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**options: Any) -> int:
        raise error

    monkeypatch.setattr(noria.cli.generate, "run", run)
    assert main(["generate", "x"]) == status


def test_bench_quick_measures_under_the_given_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Config, pathlib.Path | None]] = []
    monkeypatch.setattr(noria_bench.benches.quick, "main", lambda config, output: calls.append((config, output)) or 0)
    assert main(["bench", "quick", "m", "--slots", "4", "-o", "results.json"]) == 0
    ((config, output),) = calls
    assert (config.model, config.engine.slots, output) == ("m", 4, pathlib.Path("results.json"))


def test_bench_contract_takes_loads_policies_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(noria_bench.benches.deadlines, "main", lambda *arguments: calls.append(arguments) or 0)
    options = "--loads 90,50 --seconds 5 --policies seed,fcfs --mix alike --arrivals bursty --trace-seed 3 --plots p --slots 4"
    assert main(["bench", "contract", "m", *options.split(), "-o", "results.json"]) == 0
    assert main(["bench", "contract"]) == 0
    config, bench_options, output, plots = calls[0]
    assert (config.model, config.engine.slots) == ("m", 4)
    assert bench_options == DeadlineOptions((50, 90), 5.0, ("fcfs", "seed"), "alike", "bursty", 3)
    assert (output, plots) == (pathlib.Path("results.json"), pathlib.Path("p"))
    assert calls[1][1:] == (DeadlineOptions(), None, None)


def test_a_wrong_load_is_answered_with_what_loads_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "contract", "--loads", "fifty"])
    assert caught.value.code == 2
    assert "'fifty'; loads are whole per cents" in capsys.readouterr().err


@pytest.fixture
def suite_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the suite was called with."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(noria_bench.benches.suite, "main", lambda *arguments: calls.append(arguments) or 0)
    return calls


def test_benches_of_targets_take_targets_a_duration_a_folder_and_settings(suite_calls: list[tuple[Any, ...]]) -> None:
    assert (
        main(
            [
                "bench",
                "scenario2",
                "m",
                "--targets",
                "seed-batched,noria",
                "--duration",
                "45",
                "--out",
                "there",
                "--full",
                "--slots",
                "4",
            ]
        )
        == 0
    )
    config, folder, planned, _ = suite_calls[0]
    options = planned.args[-1]
    assert (config.model, config.engine.slots, folder) == ("m", 4, pathlib.Path("there"))
    assert [target.name for target in options.targets] == ["noria", "seed-batched"]
    assert (options.seconds, options.full) == (45.0, True)


def test_mixed_takes_a_rate_and_a_sweep_its_name(suite_calls: list[tuple[Any, ...]]) -> None:
    assert main(["bench", "mixed", "--rate", "12.5", "--arrivals", "both"]) == 0
    assert main(["bench", "sweep", "batching", "--full"]) == 0
    mixed, sweep = (call[2].args[-1] for call in suite_calls)
    assert (mixed.rate, mixed.arrivals, mixed.load) == (12.5, "both", 80)
    assert sweep.full
    assert [call[1].parent.name for call in suite_calls] == ["bench-results"] * 2
    assert suite_calls[1][1].name.endswith("-sweep-batching")


def test_a_peer_that_is_not_installed_is_refused_before_anything_is_measured(
    suite_calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "scenario1", "--targets", "noria,ray"]) == 2
    assert "noria bench install ray" in capsys.readouterr().err
    assert suite_calls == []


def test_a_target_is_served_by_hand_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(noria_bench.targets.serve, "main", lambda *arguments: calls.append(arguments) or 0)
    assert main(["bench", "serve", "seed-batched", "m", "--batch-timeout-ms", "250", "--batch-size", "4"]) == 0
    assert main(["bench", "serve", "noria", "--port", "0", "--stream", "chunks"]) == 0
    assert [(config.model, target, port) for config, target, port, _ in calls] == [
        ("m", "seed-batched", 8001),
        ("bundled", "noria", 0),
    ]
    assert [call[3] for call in calls] == [TargetSettings(0.25, 4), TargetSettings(stream="chunks")]


def test_a_report_is_made_of_a_folder_and_a_folder_without_runs_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "report", str(tmp_path)]) == 2
    assert "holds no runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("scenario1 --targets noria,triton", "'triton'; targets are all, noria, seed-stream-async"),
        ("scenario1 --duration soon", "'soon'; a run lasts 1 to 86400 whole seconds"),
        ("mixed --load much", "'much'; a load is a whole per cent"),
        ("mixed --load 50 --rate 10", "not allowed with argument"),
        ("sweep colour", "'attention', 'channels-last'"),
        ("install torchserve", "'litserve', 'bentoml', 'ray'"),
        ("serve triton", "'noria', 'seed-stream-async'"),
    ],
)
def test_a_wrong_option_of_a_bench_is_answered_with_what_is_allowed(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words.split()])
    assert caught.value.code == 2
    assert message.replace("'", "") in capsys.readouterr().err.replace("'", "")


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_fails_when_a_finding_does(
    verdict: Any, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        noria.cli.doctor, "examine", lambda config, listen: [noria.cli.doctor.Finding(verdict, "cpu", "words")]
    )
    assert main(["doctor"]) == status
    assert "words" in capsys.readouterr().out


def test_the_page_on_the_command_line_names_every_command_and_option() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    from_settings = {setting.flag for setting in list_settings()} | {
        f"--no-{setting.path[-1].replace('_', '-')}" for setting in list_settings()
    }
    for name, parser in build_parser()[1].items():
        assert f"## `noria {name}" in page
        for flag in set(parser.flags) - from_settings - {"--help"}:
            assert f"`{flag}" in page, f"{flag} of noria {name}"
