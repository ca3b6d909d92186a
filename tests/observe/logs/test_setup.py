"""Log lines: arbitrary text is one line, secrets are removed, and all processes write the same format."""

import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN, get_current_span

from noria.frontend.access.api_keys import generate_key
from noria.observe.logs import log_record
from noria.observe.logs.log_record import (
    EXCEPTION_INDENT,
    MAX_LINE_BYTES,
    TRUNCATION_MARK,
    Line,
    as_json,
    as_text,
    fields,
    line_from_record,
    line_of,
    unstructured_line,
)
from noria.observe.logs.setup import LineHandler, log_fields, logging_to, render_for
from noria.observe.request_scope import RequestScope
from noria.observe.traces.tracer import parse

KEY, _ = generate_key("alice")

texts = st.text(st.characters(exclude_categories=[]), max_size=200)
hostile = st.sampled_from(
    [
        "a\nb",
        "a\r\nb",
        "\x1b[2J",
        "\x9b31m",
        "\u2028x",
        "\x85x",
        '"}\n{"level": "error"}',
        "\u202egnp.exe",
        "\x00",
        "\ud800",
    ]
)


def record(
    message: str = "m", extra: dict[str, object] | None = None, error: BaseException | None = None
) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("noria.test", logging.INFO, __file__, 1, message.replace("%", "%%"), (), info)
    if extra is not None:
        made.noria_fields = extra
    return made


def raised(message: str) -> Exception:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


# ── One record is one line ────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)  # a busy machine must not fail the test
@given(texts | hostile, texts | hostile)
def test_a_record_is_one_line_of_json_that_can_be_parsed(message: str, prompt: str) -> None:
    line = as_json(line_from_record(record(message, {"prompt": prompt}), "frontend-0"))
    assert len(line.decode().splitlines()) == 1
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028-\u202e]", line.decode())
    parsed = json.loads(line)
    assert [*parsed][:5] == ["time", "level", "logger", "process", "message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", parsed["time"])
    if not any("\ud800" <= letter <= "\udfff" for letter in message + prompt) and "[redacted]" not in str(parsed):
        assert (parsed["message"], parsed["prompt"]) == (message.replace("%", "%%"), prompt)


@settings(deadline=None)  # a busy machine must not fail the test
@given(texts | hostile, texts | hostile, texts | hostile)
def test_a_record_is_one_line_of_text_and_an_exceptions_lines_are_indented(
    message: str, prompt: str, complaint: str
) -> None:
    line = as_text(line_from_record(record(message, {"prompt": prompt}, raised(complaint)), "frontend-0")).decode()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", line)
    first, *others = line.split("\n")
    assert first.startswith("20")
    assert others
    assert all(other.startswith(EXCEPTION_INDENT) for other in others)


def test_text_format_has_the_fields_that_have_a_value() -> None:
    extra = fields(
        event="request", request_id="abc", n=2, prompt="a red circle", seed=None, total_s=0.25, ids=["a", "b"]
    )
    line = as_text(line_from_record(record("generated", extra["noria_fields"]), "frontend-0")).decode()
    assert line.endswith('noria.test: generated  request_id=abc n=2 prompt="a red circle" total_s=0.25 ids=a,b')


@pytest.mark.parametrize("render", [as_json, as_text])
def test_an_integer_of_any_size_is_written(render: Callable[[Line], bytes]) -> None:
    extra = fields(event="request", seed=-(10**4400), largest=2**64, both=[1, 10**4400])
    line = render(line_from_record(record("rejected", extra["noria_fields"]), "frontend-0")).decode()
    assert line.count("an integer of 14617 bits") == 2
    assert str(2**64) in line


def test_a_field_cannot_have_a_reserved_name() -> None:
    with pytest.raises(AssertionError, match="level"):
        fields(level="error")


@pytest.mark.parametrize("value", [2**70, float("nan"), float("inf"), b"\xff", object(), {"a": 1}, [1, "a\nb", None]])
def test_any_value_can_be_logged(value: object) -> None:
    assert "value" in json.loads(as_json(line_from_record(record(extra={"value": value}), "p")))


CYCLIC_LIST: list[object] = []
CYCLIC_LIST.append(CYCLIC_LIST)


@pytest.mark.parametrize("render", [as_json, as_text])
@pytest.mark.parametrize(
    "value",
    [
        ["\x00" * 100_000] * 1000,
        ["\U0001f600" * 8192] * 64,
        [["x" * 8192] * 64] * 64,
        [CYCLIC_LIST] * 65,
        [2**62] * 100_000,
        ("a", ["b", ("\x1b" * 100_000,)]),
        {"key": ["x" * 100_000] * 64},
        "\x9b" * 1_000_000,
        list(range(60)),
    ],
    ids=[
        "control characters",
        "wide characters",
        "nested lists",
        "cyclic lists",
        "numbers",
        "nested tuples",
        "dictionary",
        "text",
        "short",
    ],
)
def test_no_value_makes_a_line_exceed_its_limit(render: Callable[[Line], bytes], value: object) -> None:
    written = render(line_from_record(record("m", {"one": value, "other": value, "short": "kept"}), "p"))
    assert len(written) <= MAX_LINE_BYTES
    assert b"kept" in written
    assert (TRUNCATION_MARK.encode() in written) == (value != list(range(60)))


def test_a_list_that_is_cut_is_marked_and_keeps_its_beginning() -> None:
    parsed = json.loads(
        as_json(line_from_record(record("m", {"ids": list(range(100)), "texts": ["x" * 2000] * 64}), "p"))
    )
    assert parsed["ids"] == [*range(64), TRUNCATION_MARK]
    assert parsed["texts"] == ["x" * 512 + TRUNCATION_MARK] * 64


# ── Secrets are removed ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("render", [as_json, as_text])
def test_no_secret_is_in_a_line_nor_in_its_traceback(render: Callable[[Line], bytes]) -> None:
    error = raised(f"postgresql://noria:hunter2@db and {KEY}")
    line = line_from_record(record(f"a {KEY}", {"path": "/hook?token=hunter2", "authorization": "hunter2"}, error), "p")
    written = render(line).decode()
    assert "Traceback" in written
    assert KEY not in written
    assert "hunter2" not in written


@pytest.mark.parametrize("cut_off", [1, 20, len(KEY) - 7])
def test_no_secret_is_in_a_line_that_was_too_long_to_be_scanned_completely(cut_off: int) -> None:
    first, last = "first line\n", KEY
    message = first + "x" * (65_536 - len(first) - len(last) + cut_off) + last + "x"
    assert KEY[:-cut_off] not in str(line_from_record(record(message), "p")["message"])


def test_the_part_of_a_long_text_that_is_not_shown_is_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may have 64 kB, needs no API key, and is sanitised in the event loop."""
    lengths: list[int] = []
    monkeypatch.setattr(log_record, "redact", lambda text: lengths.append(len(text)) or text)
    line = line_from_record(record("x" * 65_536, {"path": "y" * 65_536}), "p")
    assert str(line["path"]).endswith("… [cut]")
    assert max(lengths) <= 16_384


def test_output_that_a_process_prints_is_sanitised_too() -> None:
    text = f"Traceback (most recent call last):\n  File x\nValueError: {KEY}\n"
    line = unstructured_line(0.0, "engine-0", text, is_traceback=True)
    assert (line["level"], line["process"], line["logger"]) == ("error", "engine-0", "stderr")
    assert line["message"] == "ValueError: noria_[redacted]"
    assert KEY not in as_json(line).decode()


# ── Request ids ───────────────────────────────────────────────────────────────────────────────────────────────────────


def logged_lines(do: Callable[[logging.Logger], object]) -> list[Line]:
    log_record: list[Line] = []
    with logging_to(LineHandler("frontend-0", log_record.append), "info"):
        do(logging.getLogger("noria.test.logs"))
    return log_record


def test_every_line_of_a_request_has_its_ids() -> None:
    span = get_current_span(parse([f"00-{'1' * 32}-{'2' * 16}-01"]))
    with RequestScope("abc", span):
        (line,) = logged_lines(lambda log: log.info("x", extra=fields(n=1)))
    assert (line["request_id"], line["trace_id"], line["span_id"], line["n"]) == ("abc", "1" * 32, "2" * 16, 1)


def test_a_lines_own_ids_take_precedence_and_an_untraced_request_has_no_trace_id() -> None:
    with RequestScope("abc", INVALID_SPAN):
        (line,) = logged_lines(lambda log: log.info("x", extra=fields(request_id="def")))
    assert line["request_id"] == "def"
    assert "trace_id" not in line


def test_a_thread_inherits_no_request_context() -> None:
    def log_in_thread(log: logging.Logger) -> None:
        thread = threading.Thread(target=log.info, args=("x",))
        thread.start()
        thread.join()

    with RequestScope("abc", INVALID_SPAN):
        (line,) = logged_lines(log_in_thread)
    assert "request_id" not in line


def test_records_below_the_level_are_not_logged_and_the_root_logger_is_restored() -> None:
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    assert logged_lines(lambda log: log.debug("x")) == []
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before


# ── Destinations ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Terminal:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("log_format", "terminal", "environment", "begins"),
    [
        ("auto", True, {}, b"\x1b[31m19"),
        ("auto", True, {"NO_COLOR": "1"}, b"19"),
        ("auto", False, {}, b"{"),
        ("json", True, {}, b"{"),
        ("text", False, {}, b"19"),
    ],
)
def test_auto_is_text_on_a_terminal_and_json_elsewhere(
    log_format: str, terminal: bool, environment: dict[str, str], begins: bytes, tmp_path: pathlib.Path
) -> None:
    with (tmp_path / "log").open("w") as file:
        render = render_for(log_format, Terminal() if terminal else file, environment)  # type: ignore[arg-type]
    assert render(line_of(0.0, "error", "l", "p", "m")).startswith(begins)


STANDALONE_SCRIPT = """
import logging, warnings
from noria.observe.logs.setup import fields, logging_here
with logging_here("generate", "info"):
    logging.getLogger("noria.test").info("\\u00fcn\\u00ef\\n%s", "code", extra=fields(request_id="abc"))
    warnings.warn("beware")
"""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_standalone_process_writes_json_to_its_stderr(locale: str) -> None:
    environment = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0"}
    environment.pop("_NORIA_LOG_MARK", None)
    done = subprocess.run([sys.executable, "-c", STANDALONE_SCRIPT], capture_output=True, env=environment, check=True)
    info_line, warning_line = (msgspec.json.decode(line) for line in done.stderr.splitlines())
    assert (info_line["message"], info_line["process"], info_line["request_id"]) == ("ünï\ncode", "generate", "abc")
    assert (warning_line["logger"], warning_line["level"]) == ("py.warnings", "warning")
    assert "beware" in warning_line["message"]


def test_a_line_of_fields_alone_is_as_that_of_a_record_with_them(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's want a record
    lines, named = [], {"path": "/é\n", "seconds": 0.12345678, "n": 2, "key": None, "password": "1234", "tags": ["a"]}
    logger = logging.getLogger("noria.requests")
    with logging_to(LineHandler("frontend", lines.append), "info"), RequestScope("an-id", INVALID_SPAN):
        log_fields(logger, logging.INFO, "100 %s", named, event="access")
        logger.info("%s", "100 %s", extra=fields(event="access", **named))
        log_fields(logger, logging.DEBUG, "below the level", {}, event="access")
    direct, by_record = ({**line, "time": ""} for line in lines)
    assert direct == by_record
    assert direct["password"] == "[redacted]" and "key" not in direct


def test_a_handler_that_somebody_adds_sees_lines_of_fields_too(caplog):
    logger = logging.getLogger("noria.requests")
    with logging_to(LineHandler("frontend", [].append), "info"), caplog.at_level("INFO"):
        log_fields(logger, logging.INFO, "seen", {"status": 200}, event="access")
    seen = {"event": "access", "status": 200}
    assert [(each.message, each.noria_fields) for each in caplog.records] == [("seen", seen)]
