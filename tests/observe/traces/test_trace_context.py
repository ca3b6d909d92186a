"""Trace context headers are parsed as the W3C specification requires."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.observe.traces.trace_context import TraceContext, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"

ids = {
    digits: st.text("0123456789abcdef", min_size=digits, max_size=digits).filter(lambda text: set(text) != {"0"})
    for digits in (16, 32)
}
start = string.ascii_lowercase + string.digits
keys = st.one_of(
    st.from_regex(r"[a-z0-9][a-z0-9_\-*/]{0,20}", fullmatch=True),
    st.from_regex(r"[a-z0-9][a-z0-9_\-*/]{0,10}@[a-z][a-z0-9_\-*/]{0,13}", fullmatch=True),
)
values = st.text([chr(code) for code in range(0x20, 0x7F) if chr(code) not in ",="], min_size=1, max_size=20).filter(
    lambda text: text == text.strip()
)
members = st.dictionaries(keys, values, max_size=32)


@given(ids[32], ids[16], st.booleans(), members)
def test_written_headers_are_parsed_again(trace_id, span_id, is_sampled, notes):
    written = TraceContext(trace_id, span_id, is_sampled, ",".join(f"{key}={value}" for key, value in notes.items()))
    headers = written.headers
    assert parse([headers["traceparent"]], [headers["tracestate"]] if "tracestate" in headers else []) == written


def test_the_example_of_the_specification_is_parsed():
    state = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
    assert parse([HEADER], [state]) == TraceContext(TRACE, SPAN, True, state)
    assert parse([f"00-{TRACE}-{SPAN}-00"]) == TraceContext(TRACE, SPAN, False)


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("01", True), ("02", False), ("03", True), ("fe", False), ("ff", True)]
)
def test_only_the_sampled_flag_is_read_and_propagated(flags, is_sampled):
    context = parse([f"00-{TRACE}-{SPAN}-{flags}"])
    assert context.is_sampled is is_sampled
    assert context.traceparent.endswith("-01" if is_sampled else "-00")


@pytest.mark.parametrize("header", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-more", f"fe-{TRACE}-{SPAN}-01-"])
def test_a_later_version_is_read_as_far_as_known(header):
    assert parse([header]).traceparent == HEADER


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{TRACE}-{SPAN}-01 ",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{'٣' * 32}-{SPAN}-01",
    ],
)
def test_an_invalid_traceparent_is_ignored(header):
    assert parse([header]) is None


def test_two_traceparents_are_ignored():
    assert parse([HEADER, HEADER]) is None
    assert parse([]) is None


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_ignored(text):
    assert parse([text], [text]) is None or parse([text]).headers
    read = parse([HEADER], [text])
    assert read is not None
    assert parse([HEADER], [read.tracestate]) == read  # what is propagated is valid


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (["a=1", "b=2"], "a=1,b=2"),
        (["a=1 , \tb=2,,", ""], "a=1,b=2"),
        (["fw529a3039@dt=FfAAAAB,0tenant@sys=x"], "fw529a3039@dt=FfAAAAB,0tenant@sys=x"),
        (["a=1,a=2"], ""),
        (["A=1"], ""),
        (["a"], ""),
        (["a="], ""),
        (["a=b=c"], ""),
        (["a=1,b=é"], ""),
        (["tenant@0sys=x"], ""),
        ([f"{'a' * 257}=1"], ""),
        ([f"a={'b' * 257}"], ""),
        ([",".join(f"k{number}=1" for number in range(33))], ""),
    ],
)
def test_a_tracestate_is_kept_completely_or_not_at_all(lines, kept):
    context = parse([HEADER], lines)
    assert (context.traceparent, context.tracestate) == (HEADER, kept)
