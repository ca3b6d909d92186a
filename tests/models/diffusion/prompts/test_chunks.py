"""The chunks of a prompt's tokens."""

import pytest

from noria.models.diffusion.prompts.chunks import MAX_CHUNKS, WeightedTokens, split

COMMA = 0


def words(*counts: int) -> list[WeightedTokens]:
    """Return so many tokens, and a comma between these counts."""
    tokens = [token for count in counts for token in [COMMA, *[1] * count]][1:]
    return [WeightedTokens([token], 1.0) for token in tokens]


def lengths(*sections: list[WeightedTokens], comma: int | None = COMMA) -> list[int]:
    chunks, num_cut = split(sections, 75, comma)
    assert num_cut == 0
    assert all(len(chunk.tokens) == len(chunk.weights) for chunk in chunks)
    return [len(chunk.tokens) for chunk in chunks]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0], [0]),
        ([75], [75]),
        ([76], [75, 1]),
        ([200], [75, 75, 50]),
        ([60, 20], [61, 20]),  # the comma stays
        ([55, 30], [56, 30]),  # 20 tokens back from the first that does not fit
        ([54, 30], [75, 10]),  # 21
        ([10, 50, 20], [62, 20]),  # the last comma counts
        ([74, 10], [75, 10]),
        ([75, 10], [75, 11]),  # a comma itself moves nothing
        ([60, 80], [61, 75, 5]),  # what has moved is not moved again
        ([60, 15, 70], [61, 75, 11]),
    ],
)
def test_a_full_chunk_ends_at_a_near_comma(counts: list[int], expected: list[int]) -> None:
    assert lengths(words(*counts)) == expected


def test_each_section_begins_a_chunk() -> None:
    assert lengths(words(3), words(80), words(2)) == [3, 75, 5, 2]
    assert lengths([], words(3), []) == [0, 3]
    assert lengths([], []) == [0]


def test_without_a_comma_a_chunk_is_full_when_it_is_full() -> None:
    assert lengths(words(60, 20), comma=None) == [75, 6]


def test_weights_move_with_their_tokens() -> None:
    section = [*words(60, 0), WeightedTokens([5, 6], 1.5), *words(20)]
    chunks, _ = split([section], 75, COMMA)
    assert chunks[1].tokens[:3] == [5, 6, 1]
    assert chunks[1].weights[:3] == [1.5, 1.5, 1.0]


def test_tokens_that_belong_together_are_divided_only_if_no_chunk_has_their_number() -> None:
    assert lengths([*words(74), WeightedTokens([1] * 3, 1.0)]) == [74, 3]
    assert lengths([*words(74), WeightedTokens([1] * 76, 1.0)]) == [75, 75]


def test_tokens_beyond_the_last_chunk_are_cut_off() -> None:
    chunks, num_cut = split([words(75 * MAX_CHUNKS + 7)], 75, COMMA)
    assert (len(chunks), num_cut) == (MAX_CHUNKS, 7)
