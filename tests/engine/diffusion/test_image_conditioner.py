"""Prompts are encoded together, once, and cached one by one; the rows of a call are made once for the same prompts."""

import torch
from transformers import CLIPTokenizer

from noria.engine.diffusion.guided_calls import CollatedRows
from noria.engine.diffusion.image_conditioner import PromptEmbeddingCache
from noria.models.diffusion.conditioning import Conditioning, num_cut_of
from noria.models.location import BUNDLED

LETTER_BYTES = 4


def encode(prompts):
    """Return one float32 for each letter."""
    longest = torch.ones(len(prompts), max(map(len, prompts)), 1)
    return [Conditioning({"text": row[: len(prompt)]}) for row, prompt in zip(longest, prompts, strict=True)]


def make_cache(max_bytes=10**6, padded_batch=None):
    batches = []

    def record(prompts):
        batches.append(prompts)
        return encode(prompts)

    return PromptEmbeddingCache(record, max_bytes, padded_batch), batches


def test_prompts_are_encoded_together_once_and_the_oldest_are_evicted_by_bytes():
    cache, batches = make_cache(max_bytes=5 * LETTER_BYTES)
    found = cache.get(["a", "bb", "a"])
    assert {prompt: len(each.tokens["text"]) for prompt, each in found.items()} == {"a": 1, "bb": 2}
    cache.get(["bb", "ccc"])
    cache.get(["bb"])
    cache.get(["a"])
    assert batches == [["a", "bb"], ["ccc"], ["a"]]
    assert list(cache._entries) == ["bb", "a"]  # "ccc" had to go: together they have six letters


def test_a_prompt_larger_than_the_cache_is_encoded_and_not_kept():
    cache, batches = make_cache(max_bytes=2 * LETTER_BYTES)
    for _ in range(2):
        assert len(cache.get(["long"])["long"].tokens["text"]) == 4
    assert batches == [["long"], ["long"]]
    assert cache._num_bytes == 0


def test_at_a_padded_bucket_prompts_are_encoded_in_batches_of_one_size():
    cache, batches = make_cache(padded_batch=4)
    cache.get([str(k) for k in range(6)])
    assert [len(batch) for batch in batches] == [4, 4]


def test_an_embedding_does_not_keep_its_batch_in_memory():
    cache, _ = make_cache(padded_batch=8)
    assert cache.get(["abc"])["abc"].tokens["text"].untyped_storage().nbytes() == 3 * LETTER_BYTES


def test_the_rows_of_a_call_are_kept_until_a_prompt_changes():
    rows, (a, b) = CollatedRows(), encode(["aa", "bb"])
    first = rows.get([a, b, a])
    assert rows.get([a, b, a]) is first
    assert rows.get([a, a, b]) is not first
    assert rows.get([a]).tokens["text"].shape == (1, 2, 1)


def test_the_tokens_that_a_model_is_not_shown_are_counted_and_kept_with_the_prompt():
    tokenizer = CLIPTokenizer.from_pretrained(str(BUNDLED / "tokenizer"))
    num_tokens = tokenizer.model_max_length - 2  # beside the first and the last one
    texts = ["red " * num_tokens, "red " * (3 * num_tokens + 1), ""]
    tokens = tokenizer(texts, padding="max_length", max_length=num_tokens + 2, truncation=True)
    assert num_cut_of(tokens) == [0, 2 * num_tokens + 1, 0]
    cache = PromptEmbeddingCache(
        lambda prompts: [Conditioning({"text": torch.ones(1)}, num_cut=len(prompt)) for prompt in prompts], 10**6, None
    )
    for _ in range(2):
        assert cache.get(["aaa"])["aaa"].num_cut == 3
