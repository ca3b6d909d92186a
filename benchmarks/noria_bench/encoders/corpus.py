"""The texts that the benches of encoders send: one sentence, and 2,048 texts of many lengths. Pure.

The mixed texts are made by a grammar whose words are one token each for BERT's uncased tokenizer, and so of nearly all
English ones. Their lengths are log-normal: median 32, σ 0.9, cut to 4–256 tokens.
"""

import random

from noria.testing.simulated_sessions import log_normal_length

FIXED_TEXT = "The water wheel turns slowly, and its buckets fill and empty all day."
NUM_TEXTS = 2048
# [CLS] and [SEP].
_SPECIAL_TOKENS = 2

_ARTICLES = ("the", "a", "this", "every")
(_NOUNS, _ADJECTIVES, _VERBS, _PREPOSITIONS, _LINKS) = (
    words.split()
    for words in (
        "river house garden engine teacher music winter market bridge letter doctor window mountain story field",
        "old quiet green heavy small bright early strange warm empty busy deep golden simple northern broken",
        "crosses follows carries holds finds leaves answers builds covers remembers paints moves watches meets",
        "behind near under over beside without through after before inside",
        "and while because until but when",
    )
)


def mixed_texts(seed: int, num_texts: int = NUM_TEXTS) -> list[str]:
    """Texts of many lengths; the same seed gives the same texts."""
    rng = random.Random(seed)
    return [_text(rng, log_normal_length(rng) - _SPECIAL_TOKENS) for _ in range(num_texts)]


def words() -> list[str]:
    """All words of the mixed texts, in lower case."""
    return [*_ARTICLES, *_NOUNS, *_ADJECTIVES, *_VERBS, *_PREPOSITIONS, *_LINKS]


def _text(rng: random.Random, num_pieces: int) -> str:
    """Sentences of `num_pieces` words and full stops in all; the last sentence is cut."""
    pieces = list[str]()
    while len(pieces) < num_pieces:
        pieces += [*_sentence(rng), "."]
    pieces[num_pieces - 1 :] = ["."]
    return " ".join(pieces).replace(" .", ".").capitalize()


def _sentence(rng: random.Random) -> list[str]:
    clause = [*_thing(rng), rng.choice(_VERBS), *_thing(rng)]
    if rng.random() < 0.5:
        clause += [rng.choice(_PREPOSITIONS), *_thing(rng)]
    return [*clause, rng.choice(_LINKS), *_sentence(rng)] if rng.random() < 0.3 else clause


def _thing(rng: random.Random) -> list[str]:
    adjectives = [rng.choice(_ADJECTIVES)] if rng.random() < 0.6 else []
    return [rng.choice(_ARTICLES), *adjectives, rng.choice(_NOUNS)]
