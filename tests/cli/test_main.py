"""The command line: what is parsed, what is called, what is printed, and with which status it ends."""

import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
import sys
import syslog
from typing import Any

import pytest

import noria.cli.doctor.machine_checks
import noria.cli.local_generation
import noria.supervisor.supervisor
from noria.cli.main import _MODULES, build_parser, main
from noria.config import Config
from noria.errors import GenerationFailed, InvalidField, ModelError
from noria.frontend.access.api_keys import generate_key, key_digest, read_keys
from noria.frontend.engines.results import RawImage
from noria.jobs.webhooks.signing import format_secret, secret_of_key
from noria.protocol.diffusion import DiffusionModelSpec, Lora
from noria.protocol.request import EngineRequest, TwoPassRequestBody
from noria.settings import list_settings

DOCS = pathlib.Path(__file__).parents[2] / "docs"


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


def test_a_command_imports_neither_other_commands_nor_plugins() -> None:
    code = "import sys; from noria.cli.main import main; main(['health', 'http://127.0.0.1:1']); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {
        name for name in result.stdout.split() if name.startswith(("noria.cli.", "noria_bench", "importlib.metadata"))
    }
    assert loaded == {"noria.cli.main", "noria.cli.parser", "noria.cli.health", "noria.cli.server_address"}


def test_every_command_is_in_its_module() -> None:
    _, everything = build_parser()
    for name in _MODULES:
        _, parsers = build_parser(name)
        assert any(each.partition(" ")[0] == name for each in parsers), name
        assert parsers.keys() <= everything.keys()


def test_names_are_read_as_utf8_in_the_c_locale(tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "NORIA_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "noria", "show", "dïr/ünï.png"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) or "ünï.png" in done.stderr
    assert "not UTF-8" not in done.stderr


def test_serve_takes_a_model_and_every_setting(served_configs: list[Config]) -> None:
    arguments = (
        "serve org/name --port 9000 --slots 4 --no-channels-last --compile --devices cpu,cpu --buckets 8,16 "
        "--log-level error --auto-compile-blocks"
    )
    assert main(arguments.split()) == 0
    (config,) = served_configs
    assert (config.model, config.frontend.port, config.engine.slots) == ("org/name", 9000, 4)
    assert (config.engine.channels_last, config.engine.compile, config.engine.compile_blocks) == (False, True, "auto")
    assert (config.engine.devices, config.engine.buckets) == (("cpu", "cpu"), (8, 16))


def test_every_setting_is_a_flag_of_serve_or_its_argument() -> None:
    help_text = build_parser()[1]["serve"].format_help()
    for setting in list_settings():
        assert f"{setting.flag} " in help_text.replace(",", " ") or setting.key == "model"


@pytest.mark.parametrize(
    "arguments", ["--model org/name", "--port 0 --model=org/name", "org/name --model org/name", "--port 0 org/name"]
)
def test_the_model_is_an_argument_or_a_flag(served_configs: list[Config], arguments: str) -> None:
    assert main(["serve", *arguments.split()]) == 0
    assert served_configs[0].model == "org/name"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("help", "usage: noria "), ("help serve", "usage: noria serve "), ("help key create", "usage: noria key create")],
)
def test_help_is_a_command_too(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(words)


def test_help_shows_first_what_most_people_need() -> None:
    text = build_parser()[1]["serve"].format_help()
    first, others = text.split("settings that most people need")[1].split("\nsettings:", 1)
    for flag in ("--model", "--config", "--host", "--port", "--devices", "--api-keys-file"):
        assert f"  {flag} " in first
        assert f"  {flag} " not in others
    assert [line for line in others.splitlines() if line.startswith("settings")] == [
        f"settings [{name}]:" for name in ("engine", "frontend", "jobs", "registry", "statistics", "cluster")
    ]


def test_config_example_is_a_file_for_serve(
    served_configs: list[Config], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "example"]) == 0
    file = tmp_path / "noria.toml"
    file.write_text(capsys.readouterr().out)
    assert main(["serve", "--config", str(file)]) == 0
    assert served_configs == [Config()]


@pytest.mark.parametrize("name", ["settings", "settings.md", "docs/settings.md", "docs/settings.md#registry"])
def test_documents_are_printed_by_the_names_that_messages_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", name]) == 0
    assert capsys.readouterr().out == (DOCS / "settings.md").read_text(encoding="utf-8")
    assert main(["docs"]) == 0
    assert "settings" in capsys.readouterr().out.split()
    assert main(["docs", "../README.md"]) == 2
    assert "there is no document '../README.md'" in capsys.readouterr().err


def test_flags_override_the_environment_and_the_file(
    served_configs: list[Config], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noria.toml").write_text('model = "from-file"\n[engine]\nslots = 2\nthreads = 2\ndecode_batch = 2\n')
    monkeypatch.setenv("NORIA_ENGINE_SLOTS", "3")
    monkeypatch.setenv("NORIA_ENGINE_THREADS", "3")
    assert main(["serve", "--config", str(tmp_path / "noria.toml"), "--slots", "4"]) == 0
    engine = served_configs[0].engine
    assert (engine.slots, engine.threads, engine.decode_batch, served_configs[0].model) == (4, 3, 2, "from-file")


def test_generate_builds_a_body_from_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(noria.cli.local_generation, "generate_files", lambda **options: calls.append(options) or 0)
    options = (
        "-o out.JPG --negative-prompt dark --seed 7 --width 64 --height 96 --steps 5 --guidance 2.5 "
        "--scheduler ddim -n 2 --lora ink --lora a:b:-0.5"
    )
    assert main(["generate", "a red circle", *options.split(), "--model", "m", "--threads", "1"]) == 0
    body = TwoPassRequestBody(
        "a red circle", "dark", 7, 64, 96, inference_steps=5, guidance_scale=2.5, n=2, scheduler="ddim", format="jpeg",
        loras=(Lora("ink"), Lora("a:b", -0.5)),
    )  # fmt: skip
    assert calls[0]["body"] == body
    assert calls[0]["output"] == pathlib.Path("out.JPG")
    assert (calls[0]["config"].model, calls[0]["config"].engine.threads) == ("m", 1)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines for the machine's log."""
    lines: list[str] = []
    monkeypatch.setattr(syslog, "syslog", lambda _priority, line: lines.append(line))
    return lines


def test_key_create_prints_its_table_to_stdout_and_the_key_to_stderr(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], audited: list[str]
) -> None:
    assert main(["key", "create", "alice"]) == 0
    printed = capsys.readouterr()
    (line,) = map(json.loads, audited)
    assert [line[name] for name in ("logger", "event", "key", "scopes", "uid")] == [
        "noria.keys",
        "api_key_created",
        "alice",
        "generate, jobs, metrics",
        os.getuid(),
    ]
    (tmp_path / "keys.toml").write_text(printed.out)
    (key,) = read_keys(str(tmp_path / "keys.toml"))
    assert (key.name, key.sha256) == ("alice", key_digest(printed.err.strip().encode()))
    assert main(["key", "create", "alice and bob"]) == 2
    assert "name is 'alice and bob'; allowed is 1 to 64" in capsys.readouterr().err


def test_key_create_adds_no_second_key_of_a_name_to_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"# ours\n{generate_key('alice')[1]}")
    before = file.read_text()
    with file.open("a") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "noria", "key", "create", "alice"],
            stdout=output, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (ended.returncode, file.read_text()) == (2, before)
    assert "the file has a key 'alice' already, [[key]] 1 in line 2. Take another name, or remove" in ended.stderr


@pytest.mark.usefixtures("audited")
def test_key_list_says_what_each_key_may_do(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert main(["key", "create", "alice"]) == 0
    assert main(["key", "create", "prometheus", "--scopes", "metrics,jobs"]) == 0
    file.write_text(capsys.readouterr().out + 'images_per_minute = 60\npriority = "low"\nweight = 0.5\n')
    assert main(["key", "list", "--api-keys-file", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "alice       generate, jobs, metrics",
        "prometheus  jobs, metrics; 60 images a minute; weight 0.5; priority low",
    ]
    assert main(["key", "list"]) == 2
    assert "no file of API keys is named" in capsys.readouterr().err
    assert main(["key", "create", "bob", "--scopes", "generate,draw"]) == 2
    assert "scopes is ['generate', 'draw']; allowed is a list of some of generate, jobs" in capsys.readouterr().err


def test_key_webhook_secret_prints_what_signs_the_webhooks_of_the_key(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["key", "webhook-secret", "alice", "--data-dir", str(tmp_path)]
    assert main(command) == 2  # the server makes the file
    assert "No such file" in capsys.readouterr().err
    secrets = [bytes(32), bytes(range(32))]
    (tmp_path / "webhook-secret").write_text("\n".join(map(format_secret, secrets)))
    assert main(command) == 0
    own = [format_secret(secret_of_key(secret, "alice")) for secret in secrets]
    assert capsys.readouterr().out.splitlines() == own
    keys = tmp_path / "keys.toml"
    keys.write_text(generate_key("alice")[1])
    command += ["--api-keys-file", str(keys)]
    assert main(command) == 0
    command[2] = "alcie"
    assert main(command) == 2
    assert f"there is no key 'alcie' in {keys}. Did you mean 'alice'? Keys: alice." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["serv"], "'serv' is no command. Did you mean 'serve'? Commands: serve, "),
        (["run"], "Did you mean 'serve'?"),
        (["version"], "Did you mean '--version'?"),
        (["frobnicate"], "'frobnicate' is no command. Commands: serve, "),
        (["key", "creat"], "'creat' is no command. Did you mean 'create'? Commands: create, list"),
        (["models", "ls"], "Did you mean 'list'?"),
        (["help", "serv"], "Did you mean 'serve'?"),
        (["serve", "--prot", "1"], "unknown argument '--prot'. Did you mean '--port'?"),
        (["serve", "--modle", "x"], "Did you mean '--model'?"),
        (["serve", "--gpu", "0"], "Did you mean '--devices'?"),
        (["serve", "--workers", "2"], "Did you mean '--processes'?"),
        (["serve", "--frontend-drain-s", "2"], "unknown argument '--frontend-drain-s'. Did you mean '--drain-s'?"),
        (["serve", "--engine.slots=2"], "Did you mean '--slots'?"),
        (["serve", "--frobnicate"], "unknown argument '--frobnicate'. (try"),
        (["serve", "a", "--model", "b"], "two models are given, 'a' and 'b'"),
        (["doctor", "--model=a", "b"], "two models are given, 'a' and 'b'"),
        (["serve", "--por", "1"], "Did you mean '--port'?"),
        (["serve", "a", "b"], "unknown argument 'b'. Further models: --additional-models A,B."),
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


def test_an_unknown_image_format_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "-o", "image.gif"]) == 2
    assert ".png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "words"), [("folder.png", "is a folder"), ("missing/image.png", "there is no folder 'missing'")]
)
def test_an_output_that_cannot_be_written_is_rejected_before_the_model_is_read(
    output: str, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert main(["generate", "x", "-o", output, "--model", "./no-such-model"]) == 2
    assert words in capsys.readouterr().err


def test_generate_has_no_timeout_and_numbers_the_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[EngineRequest] = []

    def run_engine(config: Config, spec: DiffusionModelSpec, request: EngineRequest, _: None) -> list[RawImage]:
        requests.append(request)
        return [
            RawImage(request.payload.seed + index, 8, 8, memoryview(bytes(192))) for index in range(request.payload.n)
        ]

    monkeypatch.setattr(noria.cli.local_generation, "_run_engine", run_engine)
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
def test_the_error_determines_the_exit_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**options: Any) -> int:
        raise error

    monkeypatch.setattr(noria.cli.local_generation, "generate_files", run)
    assert main(["generate", "x"]) == status


def test_bench_without_its_distribution_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints())
    for arguments in (["bench"], ["bench", "quick", "--slots", "4"], ["simulate", "--devices", "3"]):
        assert main(arguments) == 2
        assert "pip install 'noria-serve[bench]'" in capsys.readouterr().err


def test_entry_points_add_commands(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_plugin.py").write_text(
        "from noria.cli.parser import add_plain_command\n"
        "def add_to(commands):\n"
        "    return [add_plain_command(commands, 'hello', lambda _: 42, 'answer')]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    point = importlib.metadata.EntryPoint("hello", "some_plugin:add_to", "noria.cli")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints([point]))
    assert "hello" in build_parser()[1]
    assert main(["hello"]) == 42


def test_a_plugin_that_cannot_be_imported_fails_only_its_own_command(
    monkeypatch: pytest.MonkeyPatch, served_configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    point = importlib.metadata.EntryPoint("bench", "no_such_module:add_to", "noria.cli")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints([point]))
    assert main(["serve"]) == 0
    assert len(served_configs) == 1
    assert main(["bench", "quick"]) == 2
    assert "noria bench is not available: no_such_module:add_to cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_fails_when_a_finding_does(
    verdict: Any, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        noria.cli.doctor.machine_checks,
        "examine",
        lambda config, listen: [noria.cli.doctor.machine_checks.Finding(verdict, "cpu", "words")],
    )
    assert main(["doctor"]) == status
    assert "words" in capsys.readouterr().out


def test_the_page_on_the_command_line_names_every_command_and_option() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    from_settings = {setting.flag for setting in list_settings()} | {
        f"--{word}-{setting.path[-1].replace('_', '-')}" for setting in list_settings() for word in ("no", "auto")
    }
    benches = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for name, parser in build_parser()[1].items():
        if name.startswith("bench ") or name == "simulate":  # their options are in their `--help`
            assert f"`noria {name}" in benches or f", `{name.removeprefix('bench ')}`" in benches, name
            continue
        assert f"## `noria {name}" in page
        for flag in set(parser.flags) - from_settings - {"--help"}:
            assert f"`{flag}" in page, f"{flag} of noria {name}"
