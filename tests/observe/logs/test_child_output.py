"""The parser of a child's output gives the same result however the bytes are split."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.observe.logs.child_output import ChildOutput, ChildOutputParser, EncodedLogLine, RawOutput
from noria.observe.logs.log_record import MAX_LINE_BYTES
from noria.observe.logs.setup import new_mark

MARK = b"\x1e0123456789abcdef "

log_lines = st.text(max_size=40).map(lambda text: EncodedLogLine(json.dumps({"message": text}).encode()))
raw_outputs = st.text(
    st.characters(exclude_characters="\n\x1e", exclude_categories=["Cs"]), min_size=1, max_size=40
).map(lambda text: RawOutput("x" + text.rstrip() + "x"))


def serialized(output: ChildOutput) -> bytes:
    return MARK + output.encoded + b"\n" if isinstance(output, EncodedLogLine) else output.text.encode() + b"\n"


@settings(deadline=None)  # a busy machine must not fail the test
@given(st.lists(log_lines | raw_outputs), st.data())
def test_outputs_are_complete_and_in_order_wherever_the_bytes_are_split(
    expected: list[ChildOutput], data: st.DataObject
) -> None:
    stream = b"".join(serialized(output) for output in expected)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    parser, outputs = ChildOutputParser(MARK), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        outputs += parser.feed(stream[begin:end])
    outputs += parser.finish()
    assert outputs == expected


@settings(deadline=None)  # a busy machine must not fail the test
@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_arbitrary_bytes_are_parsed_without_an_error(noise: bytes, cuts: list[int]) -> None:
    parser = ChildOutputParser(MARK)
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(noise)], strict=True):
        for _ in parser.feed(noise[begin:end]):
            pass
        list(parser.flush())
    assert all(isinstance(output, RawOutput) for output in parser.finish())


def test_a_traceback_is_one_output_until_a_log_line() -> None:
    parser = ChildOutputParser(MARK)
    lines = ["Traceback (most recent call last):", '  File "x", line 1', "", "ValueError: x"]
    outputs = list(parser.feed("\n".join(lines).encode() + b"\n"))
    assert outputs == []
    assert parser.has_pending
    assert list(parser.feed(MARK + b"{}\n")) == [RawOutput("\n".join(lines), is_traceback=True), EncodedLogLine(b"{}")]
    assert not parser.has_pending


def test_a_traceback_ends_when_its_process_falls_silent() -> None:
    parser = ChildOutputParser(MARK)
    list(parser.feed(b"Fatal Python error: Segmentation fault\n\nThread 0x1:\n"))
    assert list(parser.flush()) == [
        RawOutput("Fatal Python error: Segmentation fault\n\nThread 0x1:", is_traceback=True)
    ]
    assert list(parser.feed(b"after\n")) == [RawOutput("after")]


def test_text_without_a_line_end_is_flushed_when_its_process_falls_silent_or_logs() -> None:
    parser = ChildOutputParser(MARK)
    assert list(parser.feed(b"loading ")) == []
    assert list(parser.flush()) == [RawOutput("loading")]
    list(parser.feed(b"50 % "))
    assert list(parser.feed(MARK + b"{}\n")) == [RawOutput("50 %"), EncodedLogLine(b"{}")]


def test_an_incomplete_log_line_is_not_flushed() -> None:
    parser = ChildOutputParser(MARK)
    for byte in MARK + b"{}":
        assert list(parser.feed(bytes([byte]))) == []
        assert not parser.has_pending
        assert list(parser.flush()) == []
    assert list(parser.feed(b"\n")) == [EncodedLogLine(b"{}")]


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_complete() -> None:
    parser, outputs = ChildOutputParser(MARK), []
    for _ in range(50):
        outputs += parser.feed(b"x" * 10_000)
    outputs += parser.feed(b"tail\nnext\n")
    first, second = outputs
    assert MAX_LINE_BYTES <= len(first.text) <= MAX_LINE_BYTES + 2000
    assert second == RawOutput("next")


@pytest.mark.parametrize("num_printed", [1000, 66_000, 66_560, 200_000])
@pytest.mark.parametrize("num_at_once", [1000, 65_536, 10**6])
def test_a_log_line_after_long_text_without_a_line_end_is_complete(num_printed: int, num_at_once: int) -> None:
    line = b'{"message": "' + b"y" * 60_000 + b'"}'
    stream = b"\rloading" + b"." * num_printed + MARK + line + b"\nafter\n"
    parser, outputs = ChildOutputParser(MARK), []
    for begin in range(0, len(stream), num_at_once):
        outputs += parser.feed(stream[begin : begin + num_at_once])
    printed, own, after = outputs
    assert printed.text.startswith("\rloading...")
    assert (own, after) == (EncodedLogLine(line), RawOutput("after"))


def test_a_log_line_after_an_interrupted_one_is_complete() -> None:
    parser = ChildOutputParser(MARK)
    stream = MARK + b'{"message": "inter' + MARK + b"{}\n"
    assert list(parser.feed(stream)) == [EncodedLogLine(b'{"message": "inter'), EncodedLogLine(b"{}")]


def test_text_without_the_mark_is_never_taken_for_a_log_line() -> None:
    forged = b'{"level": "error", "message": "forged"}'
    parser = ChildOutputParser(new_mark())
    for line in (forged, b"\x1e" + forged, MARK + forged):  # the mark of another run is not valid
        (output,) = parser.feed(line + b"\n")
        assert isinstance(output, RawOutput)
