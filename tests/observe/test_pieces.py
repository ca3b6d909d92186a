"""What comes out of a child's pipe, however it is cut on its way."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.observe.lines import LONGEST_LINE_BYTES
from noria.observe.logs import new_mark
from noria.observe.pieces import OwnLine, Piece, Pieces, Printed

MARK = b"\x1e0123456789abcdef "

own = st.text(max_size=40).map(lambda text: OwnLine(json.dumps({"message": text}).encode()))
printed = st.text(st.characters(exclude_characters="\n\x1e", exclude_categories=["Cs"]), min_size=1, max_size=40).map(
    lambda text: Printed("x" + text.rstrip() + "x")
)


def written(piece: Piece) -> bytes:
    return MARK + piece.encoded + b"\n" if isinstance(piece, OwnLine) else piece.text.encode() + b"\n"


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(own | printed), st.data())
def test_pieces_come_out_whole_and_in_order_wherever_the_bytes_are_cut(said: list[Piece], data: st.DataObject) -> None:
    stream = b"".join(written(piece) for piece in said)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    pieces, heard = Pieces(MARK), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += pieces.feed(stream[begin:end])
    heard += pieces.end()
    assert heard == said


@settings(deadline=None)  # a busy machine is no failure
@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_no_bytes_whatever_are_too_strange(noise: bytes, cuts: list[int]) -> None:
    pieces = Pieces(MARK)
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(noise)], strict=True):
        for _ in pieces.feed(noise[begin:end]):
            pass
        list(pieces.flush())
    assert all(isinstance(piece, Printed) for piece in pieces.end())


def test_a_traceback_is_one_piece_until_a_line_of_ours() -> None:
    pieces = Pieces(MARK)
    lines = ["Traceback (most recent call last):", '  File "x", line 1', "", "ValueError: x"]
    heard = list(pieces.feed("\n".join(lines).encode() + b"\n"))
    assert heard == []
    assert pieces.holds
    assert list(pieces.feed(MARK + b"{}\n")) == [Printed("\n".join(lines), is_fault=True), OwnLine(b"{}")]
    assert not pieces.holds


def test_a_traceback_ends_where_its_process_falls_silent() -> None:
    pieces = Pieces(MARK)
    list(pieces.feed(b"Fatal Python error: Segmentation fault\n\nThread 0x1:\n"))
    assert list(pieces.flush()) == [Printed("Fatal Python error: Segmentation fault\n\nThread 0x1:", is_fault=True)]
    assert list(pieces.feed(b"after\n")) == [Printed("after")]


def test_what_is_printed_without_an_end_comes_out_when_its_process_falls_silent_or_speaks() -> None:
    pieces = Pieces(MARK)
    assert list(pieces.feed(b"loading ")) == []
    assert list(pieces.flush()) == [Printed("loading")]
    list(pieces.feed(b"50 % "))
    assert list(pieces.feed(MARK + b"{}\n")) == [Printed("50 %"), OwnLine(b"{}")]


def test_a_line_of_ours_that_has_begun_is_waited_for() -> None:
    pieces = Pieces(MARK)
    for byte in MARK + b"{}":
        assert list(pieces.feed(bytes([byte]))) == []
        assert not pieces.holds
        assert list(pieces.flush()) == []
    assert list(pieces.feed(b"\n")) == [OwnLine(b"{}")]


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole() -> None:
    pieces, heard = Pieces(MARK), []
    for _ in range(50):
        heard += pieces.feed(b"x" * 10_000)
    heard += pieces.feed(b"tail\nnext\n")
    first, second = heard
    assert LONGEST_LINE_BYTES <= len(first.text) <= LONGEST_LINE_BYTES + 2000
    assert second == Printed("next")


@pytest.mark.parametrize("num_printed", [1000, 66_000, 66_560, 200_000])
@pytest.mark.parametrize("num_at_once", [1000, 65_536, 10**6])
def test_a_line_of_ours_behind_an_endless_print_is_whole(num_printed: int, num_at_once: int) -> None:
    line = b'{"message": "' + b"y" * 60_000 + b'"}'
    stream = b"\rloading" + b"." * num_printed + MARK + line + b"\nafter\n"
    pieces, heard = Pieces(MARK), []
    for begin in range(0, len(stream), num_at_once):
        heard += pieces.feed(stream[begin : begin + num_at_once])
    printed, own, after = heard
    assert printed.text.startswith("\rloading...")
    assert (own, after) == (OwnLine(line), Printed("after"))


def test_a_line_of_ours_behind_the_half_of_another_is_whole() -> None:
    pieces = Pieces(MARK)
    stream = MARK + b'{"message": "inter' + MARK + b"{}\n"
    assert list(pieces.feed(stream)) == [OwnLine(b'{"message": "inter'), OwnLine(b"{}")]


def test_what_has_no_mark_is_never_taken_for_a_line_of_ours() -> None:
    forged = b'{"level": "error", "message": "forged"}'
    pieces = Pieces(new_mark())
    for line in (forged, b"\x1e" + forged, MARK + forged):  # another run's mark is none
        (piece,) = pieces.feed(line + b"\n")
        assert isinstance(piece, Printed)
