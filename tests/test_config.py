"""Settings: their sources, which source wins, and the messages of errors."""

import pathlib
import tomllib

import pytest

from noria.config import Config, EndpointConfig
from noria.errors import ConfigError
from noria.settings import allowed, list_settings, load, settings_docs, toml_value

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "settings.md"


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "noria.toml"
    file.write_text(
        'model = "from-file"\n[engine]\nslots = 2\ndevices = ["cpu"]\n[frontend]\nport = 9000\nrequest_timeout_s = 5\n',
        encoding="utf-8",
    )
    return file


def test_without_sources_all_settings_have_their_defaults() -> None:
    assert load(None, {}, {}) == Config()


def test_later_sources_override_earlier_ones_key_by_key(file: pathlib.Path) -> None:
    config = load(
        file, {"NORIA_ENGINE_SLOTS": "3", "NORIA_FRONTEND_PORT": "9001", "PATH": "/bin"}, {"frontend.port": "9002"}
    )
    assert (config.model, config.engine.slots, config.frontend.port) == ("from-file", 3, 9002)
    assert (config.engine.devices, config.frontend.request_timeout_s) == (("cpu",), 5.0)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("NORIA_ENGINE_SLOTS", "auto", "auto"),
        ("NORIA_ENGINE_THREADS", "4", 4),
        ("NORIA_ENGINE_COMPILE", "true", True),
        ("NORIA_ENGINE_CHANNELS_LAST", "0", False),
        ("NORIA_ENGINE_DEVICES", "cuda:0, cuda:1", ("cuda:0", "cuda:1")),
        ("NORIA_ENGINE_BUCKETS", "[8, 16]", (8, 16)),
        ("NORIA_ENGINE_BUCKETS", "", ()),
        ("NORIA_FRONTEND_REQUEST_TIMEOUT_S", "1.5", 1.5),
        ("NORIA_MODEL", "123", "123"),
        ("NORIA_ENDPOINTS", '[{name = "a", code = "a.py:A"}]', (EndpointConfig("a", "a.py:A"),)),
    ],
)
def test_variables_are_parsed_as_the_type_of_the_setting(name: str, text: str, value: object) -> None:
    config = load(None, {name: text}, {})
    setting = next(setting for setting in list_settings() if setting.variable == name)
    actual: object = config
    for part in setting.path:
        actual = getattr(actual, part)
    assert actual == value
    assert type(actual) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("NORIA_ENGINE_SLOTS", "many", "NORIA_ENGINE_SLOTS is 'many'.*Allowed: 1–256, auto"),
        ("NORIA_ENGINE_SLOTS", "0", ">= 1"),
        ("NORIA_FRONTEND_PORT", "65536", "<= 65535.*Allowed: 0–65535"),
        ("NORIA_ENGINE_DTYPE", "bf16", "Allowed: auto, float32, bfloat16, float16"),
        ("NORIA_ENGINE_COMPILE", "maybe", "Allowed: true, false"),
        ("NORIA_ENGINE_DEVICES", "gpu", "regex.*cuda:N"),
        ("NORIA_ENGINE_DEVICES", "", "length"),
        ("NORIA_FRONTEND_REQUEST_TIMEOUT_S", "0", "Allowed: 0.001–86400"),
        ("NORIA_FRONTEND_REQUEST_TIMEOUT_S", "inf", "<= 86400"),
        ("NORIA_FRONTEND_RESTART_WAIT_S", "nan", ">= 0"),
        ("NORIA_ENDPOINTS", "a", "NORIA_ENDPOINTS is 'a', which is not TOML"),
        ("NORIA_ENDPOINTS", '[{name = "a"}]', "missing required field `code`"),
        ("NORIA_PORT", "9000", "NORIA_PORT is not a setting.*'NORIA_FRONTEND_PORT'"),
        ("NORIA_ENGIN_SLOTS", "2", "NORIA_ENGIN_SLOTS is not a setting.*'NORIA_ENGINE_SLOTS'"),
    ],
)
def test_an_invalid_variable_is_named_with_the_allowed_values(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(None, {name: text}, {})


def test_an_invalid_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"flag --port is 'x'.*Allowed: 0–65535"):
        load(None, {}, {"frontend.port": "x"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slots = 3", "unknown key 'slots'"),
        ("[engine]\nslot = 3", r"unknown key 'engine\.slot'.*Did you mean 'slots'"),
        ("[engines]\nslots = 3", "unknown key 'engines'.*Did you mean 'engine'"),
        ("[engine]\nslots = 0", r"engine\.slots is 0.*>= 1"),
        ('[engine]\nslots = "few"', r"engine\.slots is 'few'.*Allowed: 1–256, auto"),
        ('[engine]\nbuckets = [8, "x"]', r"engine\.buckets is \[8, 'x'\]"),
        ('[frontend]\nport = "8000"', r"frontend\.port is '8000'.*expected `int`"),
        ('[[endpoints]]\nname = "a/b"\ncode = "a.py:A"', "endpoints is .*matching regex"),
        ('[[endpoints]]\nname = "a"\ncode = "a.py:A"\nclass = "A"', "unknown field `class`"),
        ("engine = 3", r"engine is 3; it must be a table: write \[engine\]"),
        ("[engine", "is not TOML"),
    ],
)
def test_an_invalid_file_is_reported_with_key_and_reason(tmp_path: pathlib.Path, text: str, words: str) -> None:
    (tmp_path / "noria.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / "noria.toml", {"NORIA_ENGINE_DTYPE": "auto"}, {})


def test_an_unreadable_file_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name in ("missing.toml", "binary.toml", "."):
        with pytest.raises(ConfigError, match=f"{name if name != '.' else tmp_path.name}.* cannot be read"):
            load(tmp_path / name, {}, {})


@pytest.mark.parametrize("service", ["NORIA", "NORIA_FRONTEND", "NORIA_BLUE_2"])
def test_variables_that_kubernetes_sets_for_services_are_ignored(service: str) -> None:
    variables = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT": "tcp://10.0.0.1:80",
        "PORT_80_TCP": "tcp://10.0.0.1:80",
        "PORT_80_TCP_PROTO": "tcp",
        "PORT_80_TCP_PORT": "80",
        "PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load(None, {f"{service}_{name}": text for name, text in variables.items()}, {}) == Config()


def test_every_setting_has_its_own_flag_and_variable_and_one_description() -> None:
    every = list_settings()
    assert len({setting.flag for setting in every}) == len({setting.variable for setting in every}) == len(every)
    assert all(setting.description for setting in every)


def test_the_settings_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_docs(), (
        "docs/settings.md is not what noria.config declares: run `make docs`"
    )


def test_the_settings_page_describes_every_setting() -> None:
    page = settings_docs()
    for setting in list_settings():
        row = next(line for line in page.splitlines() if f"`{setting.variable}`" in line)
        for words in (
            setting.path[-1],
            setting.flag,
            toml_value(setting.default),
            allowed(setting),
            setting.description,
        ):
            assert words in row


def test_defaults_on_the_page_are_toml() -> None:
    for setting in list_settings():
        parsed = tomllib.loads(f"value = {toml_value(setting.default)}")["value"]
        assert parsed == (list(setting.default) if isinstance(setting.default, tuple) else setting.default)
