"""The names of embeddings in prompts."""

import pytest

from noria.models.diffusion.prompts.embedding_names import EmbeddingNames

NAMES = EmbeddingNames(["cat", "cat-v2", "Bad Hands", "<moon>", "red-", "1.5"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a cat, (CAT:1.3)", ["cat", "CAT"]),
        ("cats, cat_2, concat, cat2", []),
        ("cat-v2 cat-v3 cat-v22", ["cat-v2", "cat", "cat"]),
        ("bad hands, bad  hands", ["bad hands"]),
        ("<moon>light <moon", ["<moon>"]),
        ("red-green 1.5", ["red-", "1.5"]),
        ("", []),
    ],
)
def test_names_are_whole_words_in_any_case_the_longest_first(text, found):
    assert [text[start:stop] for start, stop, _ in NAMES.find(text)] == found
