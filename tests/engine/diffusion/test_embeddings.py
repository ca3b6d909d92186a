"""Embeddings (textual inversion): a word of a prompt is the vectors of a file."""

import pickle

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from generating import assert_as_alone, difference, generate, load
from noria.errors import ConfigError, InvalidField
from noria.models.adapters.embedding_folders import EmbeddingFolders
from noria.models.diffusion.unet_models import text_embedding
from noria.testing.requests import make_image_request


@pytest.fixture(scope="module", params=["tiny_folder", "tiny_xl_folder"])
def served(request, tmp_path_factory):
    """An executor, its folder of embeddings, and the text encoders."""
    folder = tmp_path_factory.mktemp("embeddings")
    _, executor = load(request.getfixturevalue(request.param), embeddings=(str(folder),))
    parts = executor.model.lora_parts
    return executor, folder, [part for name, part in parts.items() if name.startswith("text_encoder")]


def save(folder, name, vectors):
    """Write vectors, a tensor for each text encoder, in the form of their number."""
    names = ["emb_params"] if len(vectors) == 1 else ["clip_l", "clip_g"]
    save_file(dict(zip(names, vectors, strict=True)), folder / f"{name}.safetensors")


def make_request(executor, number, prompt):
    request = make_image_request(
        f"r{number}", prompt=prompt, prompt_syntax="a1111", seed=number, width=32, height=32, guidance_scale=4.0
    )
    used = EmbeddingFolders.of(executor.config).used_in([prompt], request.model)
    return msgspec.structs.replace(request, payload=msgspec.structs.replace(request.payload, embeddings=used))


def test_the_vectors_of_words_give_the_image_of_these_words(served):
    executor, folder, encoders = served
    tokenizer = getattr(executor.model, "tokenizer", None) or executor.model._text_encoders[0][0]
    ids = tokenizer("red circle", add_special_tokens=False).input_ids
    save(folder, "thing", [encoder.get_input_embeddings().weight[ids].clone() for encoder in encoders])
    for words, named in [("a red circle, blue", "a thing, blue"), ("a (red circle:1.3)", "a (THING:1.3)")]:
        plain = generate(executor, [make_request(executor, 1, words)])["r1", 0]
        assert difference(generate(executor, [make_request(executor, 1, named)])["r1", 0], plain) == 0
    assert len(executor.prepare(make_request(executor, 1, "a thing")).embeddings) == 1
    save(folder, "thing (v2)", [encoder.get_input_embeddings().weight[ids].clone() for encoder in encoders])
    plain = generate(executor, [make_request(executor, 1, "a red circle, blue")])["r1", 0]
    request = make_request(executor, 1, r"a thing \(v2\), blue")
    assert [each.name for each in request.payload.embeddings] == ["thing (v2)"]
    assert difference(generate(executor, [request])["r1", 0], plain) == 0


def test_prompts_with_and_without_embeddings_share_calls_and_are_as_alone(served):
    executor, folder, encoders = served
    torch.manual_seed(0)
    save(folder, "long", [torch.randn(15, encoder.config.hidden_size) for encoder in encoders])
    texts = ["a star", "a star, long", "long, long, a star", "long BREAK (long:0.5)"]
    requests = [make_request(executor, k, text) for k, text in enumerate(texts)]
    assert_as_alone(executor, requests)
    first = executor.prepare(requests[1]).prompts
    save(folder, "long", [torch.randn(15, encoder.config.hidden_size) for encoder in encoders])
    with pytest.raises(InvalidField, match="'long' has changed"):
        executor.prepare(requests[1])
    assert executor.prepare(make_request(executor, 1, texts[1])).prompts != first


def test_a_file_that_is_replaced_while_it_is_read_is_not_kept(served, monkeypatch):
    executor, folder, encoders = served
    vectors = [torch.zeros(1, encoder.config.hidden_size) for encoder in encoders]
    save(folder, "quick", vectors)
    request, read = make_request(executor, 1, "a quick star"), text_embedding.read_tensors

    def read_another(*arguments):
        save(folder, "quick", [each + 1 for each in vectors])
        return read(*arguments)

    monkeypatch.setattr(text_embedding, "read_tensors", read_another)
    with pytest.raises(InvalidField, match="was replaced while it was read"):
        executor.prepare(request)
    monkeypatch.undo()
    assert executor.prepare(make_request(executor, 1, "a quick star")).embeddings


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"emb_params": torch.zeros(2, 7)}, "has vectors of width 7, but the text encoders of"),
        ({"clip_l": torch.zeros(2, 32), "clip_g": torch.zeros(3, 48)}, "unequally many"),
        ({"a": torch.zeros(2, 32), "b": torch.zeros(2, 32)}, "neither clip_l nor clip_g"),
        ({"emb_params": torch.zeros(76, 32)}, "has 76 vectors; allowed are 1 to 75"),
        ({"emb_params": torch.zeros(1, 1, 32)}, "has a tensor of shape"),
        ({"emb_params": torch.zeros(1, 32, dtype=torch.int32)}, "torch.int32"),
        ({"emb_params": torch.full((1, 32), torch.inf)}, "not finite"),
        ({"emb_params": torch.zeros(2**15, 64)}, "bytes; at most"),
        (b"\xff" * 100, "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_rejected(served, tensors, says):
    executor, folder, _ = served
    file = folder / "odd.safetensors"
    file.write_bytes(tensors) if isinstance(tensors, bytes) else save_file(tensors, file)
    with pytest.raises(InvalidField, match="prompt: ") as caught:
        executor.prepare(make_request(executor, 1, "an odd star"))
    assert says in caught.value.message


def test_a_pickle_is_rejected_if_a_prompt_names_it(tmp_path):
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"string_to_param": {}}))
    folders = EmbeddingFolders((str(tmp_path),))
    assert folders.files("m") == {}
    assert folders.used_in(["an older star"], "m") == ()
    with pytest.raises(InvalidField, match=r"'old' is a .pt file, a pickle"):
        folders.used_in(["an old star"], "m")
    with pytest.raises(ConfigError, match=r"engine\.embeddings: '.*nowhere' is not a folder"):
        EmbeddingFolders((str(tmp_path / "nowhere"),)).check_folders()
