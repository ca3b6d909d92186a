"""Settings: their sources, which source wins, and the messages of errors."""

import functools
import pathlib
import re
import tomllib

import pytest

from noria.cli.main import build_parser
from noria.config import Config, EndpointConfig
from noria.errors import ConfigError, short_repr
from noria.settings import (
    OTHER_VARIABLES,
    Setting,
    allowed,
    empty_list_warnings,
    example_file,
    list_settings,
    load,
    settings_docs,
    toml_value,
)

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
        ("NORIA_ADDITIONAL_MODELS", '["minilm", "a/b"]', ("minilm", "a/b")),  # as JSON has it
        ("NORIA_FRONTEND_REQUEST_TIMEOUT_S", "1.5", 1.5),
        ("NORIA_MODEL", "123", "123"),
        ("NORIA_CLUSTER_ENGINE_REPLICAS", "3", 3),
        ("NORIA_CLUSTER_ENGINE_REPLICAS", "3-5", "3-5"),
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
        ("NORIA_ENGINE_SLOTS", "many", "NORIA_ENGINE_SLOTS is 'many'.*Allowed: 1–512, auto"),
        ("NORIA_ENGINE_SLOTS", "0", "allowed is ≥ 1"),
        ("NORIA_FRONTEND_PORT", "65536", "allowed is ≤ 65535.*Allowed: 0–65535"),
        ("NORIA_ENGINE_DTYPE", "bf16", "Allowed: auto, float32, bfloat16, float16"),
        ("NORIA_ENGINE_COMPILE", "maybe", "Allowed: true, false"),
        ("NORIA_ENGINE_DEVICES", "gpu", "not of the allowed form.*cuda:N"),
        ("NORIA_FRONTEND_REQUEST_TIMEOUT_S", "0", "Allowed: 0.001–86400"),
        ("NORIA_FRONTEND_REQUEST_TIMEOUT_S", "inf", "allowed is ≤ 86400"),
        ("NORIA_FRONTEND_RESTART_WAIT_S", "nan", "allowed is ≥ 0"),
        ("NORIA_ENDPOINTS", "a", "NORIA_ENDPOINTS is 'a', which is not TOML"),
        ("NORIA_ENDPOINTS", '[{name = "a"}]', "the key 'code' is missing"),
        ("NORIA_PORT", "9000", "NORIA_PORT is not a setting.*'NORIA_FRONTEND_PORT'"),
        ("NORIA_WORKERS", "2", "Did you mean 'NORIA_FRONTEND_PROCESSES'"),
        ("NORIA_FROBNICATE", "2", r"is not a setting\. See"),
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
        ("slots = 3", r"unknown key 'slots'.*Did you mean 'engine\.slots'"),
        ("port = 1", r"unknown key 'port'.*Did you mean 'frontend\.port'"),
        ("[engine]\nport = 1", r"unknown key 'engine\.port'.*Did you mean 'frontend\.port'"),
        ("[frontend]\nbatch_size = 1", r"Did you mean 'engine\.slots'"),
        ("frobnicate = 1", r"unknown key 'frobnicate'\. Known keys"),
        ("[engine]\nslot = 3", r"unknown key 'engine\.slot'.*Did you mean 'slots'"),
        ("[engines]\nslots = 3", "unknown key 'engines'.*Did you mean 'engine'"),
        ("[engine]\nslots = 0", r"engine\.slots is 0.*≥ 1"),
        ('[engine]\nslots = "few"', r"engine\.slots is 'few'.*Allowed: 1–512, auto"),
        ("[engine]\nslots = -1", r"engine\.slots is -1.*≥ 1"),
        ("[engine]\nslots = 1000000000", r"engine\.slots is 1000000000.*≤ 512"),
        ("[engine]\nslots = 1e9", r"engine\.slots is 1000000000\.0.*Allowed: 1–512, auto"),
        ('[engine]\nbuckets = [8, "x"]', r"engine\.buckets\[1\] is 'x'; allowed is an integer"),
        ('[frontend]\nport = "8000"', r"frontend\.port is '8000'.*allowed is an integer"),
        (
            '[[endpoints]]\nname = "a/b"\ncode = "a.py:A"',
            r"endpoints\[0\]\.name is 'a/b'; allowed are 1 to 64 of the characters A-Za-z0-9\._-",
        ),
        ('[[endpoints]]\nname = "a"\ncode = "a.py:A"\nclass = "A"', "unknown key 'class'"),
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


@pytest.mark.parametrize("name", OTHER_VARIABLES)
def test_variables_that_others_read_are_no_unknown_settings_and_are_on_the_page(name: str) -> None:
    assert load(None, {name: "any"}, {}) == Config()
    assert f"| `{name}` |" in settings_docs()


def test_every_setting_has_its_own_flag_and_variable_and_one_description() -> None:
    every = list_settings()
    assert len({setting.flag for setting in every}) == len({setting.variable for setting in every}) == len(every)
    assert all(setting.description for setting in every)


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_variable_counts_as_not_set_for_each_setting(text: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "noria.toml"
    file.write_text('model = "m"\n[frontend]\nport = 81\n')
    empty = {setting.variable: text for setting in list_settings()}
    assert load(None, empty, {}) == Config()
    assert load(file, empty, {}) == load(file, {}, {})
    assert load(None, {"NORIA_FRONTEND_TRUSTED_PROXIES": "[]"}, {}).frontend.trusted_proxies == ()


def test_an_empty_variable_of_a_list_that_is_not_empty_is_told(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "noria.toml"
    file.write_text('[registry]\nsource_roots = ["/models"]\n')
    names = [setting.variable for setting in list_settings()]
    warnings = empty_list_warnings(dict.fromkeys(names, " "), load(file, {}, {}))
    told = {name: text for name in names for text in warnings if name in text}
    assert list(told) == [
        "NORIA_ENGINE_LORAS",
        "NORIA_ENGINE_SAFETY_LABELS",
        "NORIA_FRONTEND_TRUSTED_PROXIES",
        "NORIA_REGISTRY_SOURCE_ROOTS",
    ]
    assert "frontend.trusted_proxies is ['127.0.0.1', '::1', 'unix']" in told["NORIA_FRONTEND_TRUSTED_PROXIES"]
    assert "registry.source_roots is ['/models']" in told["NORIA_REGISTRY_SOURCE_ROOTS"]
    for text in ("[]", "10.0.0.1"):
        set_list = {"NORIA_FRONTEND_TRUSTED_PROXIES": text}
        assert empty_list_warnings(set_list, load(None, set_list, {})) == []


LISTS = [setting for setting in list_settings() if isinstance(setting.default, tuple)]


@pytest.mark.parametrize("setting", LISTS, ids=lambda setting: setting.key)
def test_a_list_without_an_element_is_written_in_one_way(setting: Setting) -> None:
    for text in ('""', "''", ",", " , ", "[,]"):
        with pytest.raises(
            ConfigError, match=rf"variable {setting.variable} is .* Write \[\] for an empty list"
        ) as caught:
            load(None, {setting.variable: text}, {})
        assert short_repr(text) in caught.value.message
    if setting.key == "engine.devices":  # has one at least
        return
    for config in (
        load(None, {setting.variable: "[]"}, {}),
        load(None, {setting.variable: " [ ] "}, {}),
        load(None, {}, {setting.key: ""}),  # a flag's empty text was meant so
    ):
        assert functools.reduce(getattr, setting.path, config) == ()


def test_every_flag_of_the_settings_page_is_parsed_into_its_setting() -> None:
    parser, _ = build_parser()
    flags = re.findall(r"^\| `\w+` \| `(--\S+)` \|", settings_docs(), re.MULTILINE)
    assert sorted(flags) == sorted(each.flag for each in list_settings() if each.flag.startswith("--"))
    for flag in flags:
        (setting,) = [each for each in list_settings() if each.flag == flag]
        if "true" in allowed(setting).split(", "):
            assert getattr(parser.parse_args(["serve", flag]), setting.key) is True
            arguments = parser.parse_args(["serve", flag.replace("--", "--no-", 1)])
            assert getattr(arguments, setting.key) is False
        else:
            assert getattr(parser.parse_args(["serve", flag, "m"]), setting.key) == "m"
    assert parser.parse_args(["serve", "m"]).model == "m"


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "noria.toml"
    file.write_bytes(b"\xef\xbb\xbfmodel = 'm'\n")
    assert load(file, {}, {}).model == "m"


def test_an_ipv6_address_may_stand_in_brackets() -> None:
    assert load(None, {"NORIA_FRONTEND_HOST": "[::1]"}, {}).frontend.host == "::1"


def test_the_settings_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_docs(), (
        "docs/settings.md is not what noria.config declares: run `make docs`"
    )


def test_the_settings_page_describes_every_setting() -> None:
    page = settings_docs()
    for setting in list_settings():
        assert setting.variable == "_".join(("NORIA", *setting.path)).upper()  # as the page says
        row = next(line for line in page.splitlines() if f"| `{setting.flag}` |" in line)
        for words in (
            setting.path[-1],
            toml_value(setting.default),
            allowed(setting),
            setting.description,
        ):
            assert words in row


def test_the_example_file_has_every_setting_and_changes_none(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "noria.toml"
    file.write_text(example_file(), encoding="utf-8")
    assert load(file, {}, {}) == Config()
    every = {setting.key for setting in list_settings()}
    known = {setting.path[-1] for setting in list_settings()}
    uncommented = re.sub(rf"^# (?=({'|'.join(known)}) = )", "", example_file(), flags=re.M)
    file.write_text(uncommented, encoding="utf-8")
    assert load(file, {}, {}) == Config()
    tree = tomllib.loads(uncommented)
    found = {f"{name}.{key}" for name, table in tree.items() if isinstance(table, dict) for key in table}
    assert found | {name for name, value in tree.items() if not isinstance(value, dict)} == every
    assert max(map(len, example_file().splitlines())) <= 100


def test_defaults_on_the_page_are_toml() -> None:
    for setting in list_settings():
        parsed = tomllib.loads(f"value = {toml_value(setting.default)}")["value"]
        assert parsed == (list(setting.default) if isinstance(setting.default, tuple) else setting.default)
