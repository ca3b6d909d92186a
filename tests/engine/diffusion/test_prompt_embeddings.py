"""Prompts are encoded together, once, and cached one by one."""

import torch

from noria.engine.diffusion.prompt_embeddings import PromptEmbeddingCache


def test_prompts_are_encoded_together_once_and_the_oldest_is_evicted():
    batches = []

    def encode(prompts):
        batches.append(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        return {"lengths": lengths, "squares": lengths**2}

    cache = PromptEmbeddingCache(encode, capacity=2, padded_batch=None)
    assert cache.get(["a", "bb", "a"]) == {"a": {"lengths": 1, "squares": 1}, "bb": {"lengths": 2, "squares": 4}}
    cache.get(["bb", "ccc"])
    cache.get(["a"])
    assert batches == [["a", "bb"], ["ccc"], ["a"]]


def test_at_a_padded_bucket_prompts_are_encoded_in_batches_of_one_size():
    sizes = []

    def encode(prompts):
        sizes.append(len(prompts))
        return {"text": torch.zeros(len(prompts), 1)}

    PromptEmbeddingCache(encode, capacity=99, padded_batch=4).get([str(k) for k in range(6)])
    assert sizes == [4, 4]


def test_an_embedding_does_not_keep_its_batch_in_memory():
    cache = PromptEmbeddingCache(lambda prompts: {"text": torch.zeros(len(prompts), 7, 5)}, capacity=9, padded_batch=8)
    assert cache.get(["a"])["a"]["text"].untyped_storage().nbytes() == 7 * 5 * 4
