"""Lines become chunks in a file, however they arrive; a bad one is named."""

import io
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import EmptyInput, InvalidField
from noria.frontend.jobs import text_lines as lines_module
from noria.frontend.jobs.text_lines import LineLimits, TextLines
from noria.frontend.jobs.text_results import json_lines, npy_header
from noria.jobs.stored_request import TextJobRequest
from noria.jobs.text_parts import TextChunk

_CHARACTERS = st.characters(codec="utf-8", exclude_characters="\r\n\ufeff")


def read(body, line_format="text", *, cuts=(), max_texts=10, max_chars=20, allows_pairs=True, num_columns=8):
    """The chunks of a body that arrives in pieces."""
    file = io.BytesIO()
    reader = TextLines(line_format, LineLimits(max_texts, max_chars, allows_pairs), num_columns, file)
    ends = [0, *sorted(cuts), len(body)]
    for start, end in itertools.pairwise(ends):
        reader.feed(body[start:end])
    reader.finish()
    chunks = [msgspec.json.decode(line, type=TextChunk) for line in file]
    assert (len(chunks), sum(len(chunk.texts) for chunk in chunks)) == (reader.num_chunks, reader.num_texts)
    return chunks


def texts(*args, **kwargs):
    return [text for chunk in read(*args, **kwargs) for text in chunk.texts]


def test_lines_of_plain_text_and_of_json():
    assert texts('\ufeffa\r\n"b"\nü c \n'.encode()) == ["a", '"b"', "ü c "]
    body = b'"a"\r\n ["b", "c"] \n{"id": 7, "text": "d"}\n{"text": "e", "text_pair": "f"}\n"\\u0000\\n"'
    assert texts(body, "jsonl") == ["a", ("b", "c"), "d", ("e", "f"), "\0\n"]


@given(st.lists(st.text(_CHARACTERS, min_size=1, max_size=20), min_size=1), st.data())
def test_texts_do_not_depend_on_how_the_body_arrives(expected, data):
    body = "\n".join(expected).encode()
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=5))
    assert texts(body, cuts=cuts, max_texts=len(expected)) == expected


def test_chunks_are_bounded_in_texts_bytes_and_numbers(monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_CHUNK_TEXTS", 4)
    monkeypatch.setattr(lines_module, "MAX_CHUNK_BYTES", 10)
    chunks = read(b"a\n" * 6 + b"0123456789\nb")
    assert [(chunk.first_line, len(chunk.texts)) for chunk in chunks] == [(1, 4), (5, 3), (8, 1)]
    assert [len(chunk.texts) for chunk in read(b"a\n" * 5, num_columns=131_072)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("body", "line_format", "words"),
    [
        (b"", "text", "the body is empty"),
        (b"a\n\nb", "text", "line 2 is empty"),
        (b"a\n\r\nb", "text", "line 2 is empty"),
        (b'"a"\n \n', "jsonl", "line 2 is empty"),
        (b'"a"\n""', "jsonl", "line 2 has an empty text"),
        (b'["a", ""]', "jsonl", "line 1 has an empty text"),
        (b"a\nb\xff", "text", "line 2 is not UTF-8: invalid start byte at byte 1"),
        (b'"b\xff"', "jsonl", "line 1 is not UTF-8"),
        (b"a\n" + b"b" * 21, "text", "line 2 has a text of 21 characters; allowed are at most 20"),
        (b"b" * 70_000, "text", "line 1 is longer than 65656 bytes"),
        (b"b" * 70_000 + b"\na", "text", "line 1 is longer than 65656 bytes"),
        (b"a\n" * 11, "text", "more than 10 lines"),
        (b'"a"\nNaN', "jsonl", "line 2: JSON is malformed"),
        (b'"a"\n7', "jsonl", "line 2: Expected `str | object | array`, got `int`"),
        (b'{"txt": "a"}', "jsonl", "line 1: Object missing required field `text`"),
        (b'"\\ud800"', "jsonl", "line 1: "),
        (b"[" * 5000, "jsonl", "line 1: "),
    ],
)
def test_a_bad_line_is_named(body, line_format, words):
    with pytest.raises((InvalidField, EmptyInput)) as caught:
        read(body, line_format)
    assert words in caught.value.message


def test_a_body_may_be_as_large_as_its_limits():
    assert texts(b"a" * 20 + b"\n" + b"b" * 20, max_texts=2) == ["a" * 20, "b" * 20]
    assert texts(b'["a", "' + b"b" * 20 + b'"]', "jsonl") == [("a", "b" * 20)]
    with pytest.raises(InvalidField, match="line 1 has a text of 21 characters"):
        read(b'["a", "' + b"b" * 21 + b'"]', "jsonl")
    longest = b'{"text": "a", "x": "'.ljust(6 * 20 + 65_536 - 2, b"x") + b'"}'
    assert texts(longest, "jsonl") == texts(longest, "jsonl", cuts=(len(longest) - 1,)) == ["a"]
    for too_long in (longest + b" ", longest + b" \n"):
        with pytest.raises(InvalidField, match="line 1 is longer than 65656 bytes"):
            read(too_long, "jsonl")
    assert texts("\ufeffa\n\ufeffb".encode()) == ["a", "\ufeffb"]  # the mark is before the first line only


def test_an_embedding_is_of_one_text():
    with pytest.raises(InvalidField, match="line 1 is a pair"):
        read(b'["a", "b"]', "jsonl", allows_pairs=False)


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (100_000, 384), (123_456_789, 4096)])
def test_a_header_is_numpys(shape):
    header = npy_header(TextJobRequest(task="embedding", num_texts=shape[0], num_chunks=1, num_columns=shape[1]))
    expected = io.BytesIO()
    np.lib.format.write_array_header_1_0(expected, {"descr": "<f4", "fortran_order": False, "shape": shape})
    assert np.lib.format.read_array_header_1_0(io.BytesIO(header[8:])) == (shape, False, np.dtype("<f4"))
    assert len(header) % 64 == 0 and header[:8] == expected.getvalue()[:8]


def test_lines_of_results():
    request = TextJobRequest(task="classification", num_texts=2, num_chunks=1, num_columns=2, labels=("bad", "good"))
    part = np.array([[0.25, 0.75], [0.5, 0.5]], "<f4").tobytes()
    assert json_lines(part, 7, request) == (
        b'{"index":7,"labels":[{"score":0.75,"label":"good"},{"score":0.25,"label":"bad"}]}\n'
        b'{"index":8,"labels":[{"score":0.5,"label":"bad"},{"score":0.5,"label":"good"}]}\n'
    )


def test_the_stored_bytes_are_those_of_the_chunks_which_may_be_longer_than_the_body():
    file = io.BytesIO()
    lines = TextLines("text", LineLimits(100, 100, allows_pairs=False), 4, file)
    lines.feed(b"\x01" * 90 + b"\n" + "é".encode())
    lines.finish()
    assert lines.stored_bytes == len(file.getvalue()) > 6 * 90
