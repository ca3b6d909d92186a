"""nomic-embed-text-v2-moe: equal to the rule of its published code, written here for one text at a time."""

import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm, linear

from encoders import TEXTS, change_json, make_tokenizer, open_encoder, open_exported, sentence_transformer, write_json
from noria.config import EngineConfig
from noria.engine.encoder.sessions import load_sessions
from noria.errors import ModelError
from noria.models.encoder.checkpoint import load
from noria.models.encoder.experts import ExpertLayer
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import TokenRow
from noria.protocol.text import EncoderModelSpec

CONFIG = EngineConfig(encoder_sessions=1, threads=1)
LAYERS, HEADS, WIDTH, INNER, EXPERTS = 4, 4, 32, 48, 8
Tensors = Mapping[str, torch.Tensor]


def make_nomic(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Write the published layout with random weights, and return them."""
    size = make_tokenizer(folder, is_roberta=True)
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (size, WIDTH), "embeddings.token_type_embeddings.weight": (1, WIDTH),
        "emb_ln.weight": (WIDTH,), "emb_ln.bias": (WIDTH,),
    }  # fmt: skip
    for index in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "attn.Wqkv.weight": (3 * WIDTH, WIDTH), "attn.Wqkv.bias": (3 * WIDTH,), "attn.out_proj.bias": (WIDTH,),
            "attn.out_proj.weight": (WIDTH, WIDTH), "norm1.weight": (WIDTH,), "norm1.bias": (WIDTH,),
            "norm2.weight": (WIDTH,), "norm2.bias": (WIDTH,),
        }  # fmt: skip
        if index % 2:
            experts = (EXPERTS * INNER, WIDTH)
            own |= {"mlp.router.layer.weight": (EXPERTS, WIDTH), "mlp.experts.bias": (WIDTH,)}
            own |= {"mlp.experts.mlp.w1": experts, "mlp.experts.mlp.w2": experts}
        else:
            own |= {"mlp.fc1.weight": (INNER, WIDTH), "mlp.fc1.bias": (INNER,)}
            own |= {"mlp.fc2.weight": (WIDTH, INNER), "mlp.fc2.bias": (WIDTH,)}
        shapes |= {f"encoder.layers.{index}.{name}": shape for name, shape in own.items()}
    tensors = {name: torch.randn(shape) / 4 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "activation_function": "gelu",
        "add_pooling_layer": False, "causal": False, "expert_choice_router": False, "ffn_div": 1,
        "layer_norm_epsilon": 1e-5, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "moe_every_n_layers": 2,
        "moe_impl": "megablocks", "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0, "moe_top_k": 2,
        "n_embd": WIDTH, "n_head": HEADS, "n_inner": INNER, "n_layer": LAYERS, "n_positions": 64,
        "num_experts": EXPERTS, "num_shared_experts": 0, "pad_token_id": 1, "prenorm": False, "qkv_proj_bias": True,
        "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "router_aux_loss_coef": 0.1,
        "type_vocab_size": 1, "vocab_size": size,
    }  # fmt: skip
    files = sentence_transformer()
    write_json(folder / "config.json", config)
    write_json(folder / "modules.json", files["modules"])
    write_json(folder / "1_Pooling/config.json", files["1_Pooling__config"])
    return tensors


def reference(tensors: Tensors, ids: list[int]) -> torch.Tensor:
    """The mean of a text's states, by the published rule."""
    hidden = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    hidden = layer_norm(hidden, (WIDTH,), tensors["emb_ln.weight"], tensors["emb_ln.bias"], 1e-5)
    for index in range(LAYERS):
        stem = f"encoder.layers.{index}."
        own = {name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(stem)}
        hidden = layer_norm(hidden + attend(own, hidden), (WIDTH,), own["norm1.weight"], own["norm1.bias"], 1e-5)
        if index % 2:
            computed = torch.stack([compute_token(own, token) for token in hidden])
        else:
            inner = gelu(linear(hidden, own["mlp.fc1.weight"], own["mlp.fc1.bias"]))
            computed = linear(inner, own["mlp.fc2.weight"], own["mlp.fc2.bias"])
        hidden = layer_norm(hidden + computed, (WIDTH,), own["norm2.weight"], own["norm2.bias"], 1e-5)
    return hidden.mean(0)


def compute_token(own: Tensors, token: torch.Tensor) -> torch.Tensor:
    shares = (own["mlp.router.layer.weight"] @ token).softmax(0)
    first = own["mlp.experts.mlp.w1"].view(EXPERTS, INNER, WIDTH)
    second = own["mlp.experts.mlp.w2"].view(EXPERTS, INNER, WIDTH)
    parts = [shares[expert] * (gelu(first[expert] @ token) @ second[expert]) for expert in shares.topk(2).indices]
    return parts[0] + parts[1] + own["mlp.experts.bias"]


def attend(own: Tensors, hidden: torch.Tensor) -> torch.Tensor:
    size = WIDTH // HEADS
    states = linear(hidden, own["attn.Wqkv.weight"], own["attn.Wqkv.bias"]).view(-1, 3, HEADS, size).permute(1, 2, 0, 3)
    angles = torch.outer(torch.arange(len(hidden)), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
    turned = torch.cat([-states[..., size // 2 :], states[..., : size // 2]], dim=-1)
    query, key, _ = states * angles.cos() + turned * angles.sin()
    weights = (query @ key.transpose(1, 2) / size**0.5).softmax(-1)
    heads = (weights @ states[2]).transpose(0, 1).reshape(len(hidden), WIDTH)
    return linear(heads, own["attn.out_proj.weight"], own["attn.out_proj.bias"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Tensors]:
    folder = tmp_path_factory.mktemp("nomic")
    tensors = make_nomic(folder)
    return open_encoder(folder), tensors


@pytest.mark.parametrize("path", ["torch", "packed", pytest.param("graph", marks=pytest.mark.slow)])
def test_experts_compute_the_published_numbers(
    made: tuple[EncoderModelSpec, Tensors], path: str, tmp_path: pathlib.Path
) -> None:
    spec, tensors = made
    rows = [TokenRow.of(text) for text in HuggingFaceTokenizer(spec).encode([text for text in TEXTS if text])]
    expected = np.stack([reference(tensors, row.ids.tolist()).numpy() for row in rows])
    if path == "graph":
        open_exported(spec.folder, str(tmp_path))
    config = msgspec.structs.replace(
        CONFIG,
        encoder_backend="auto" if path == "graph" else "torch",
        encoder_packing="on" if path == "packed" else "auto",
        cache_dir=str(tmp_path),
    )
    (session,) = load_sessions(spec, config, "cpu")
    for batches in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
        got = np.stack([each for batch in batches for each in session.run(batch)])
        np.testing.assert_allclose(got, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


def test_all_experts_compute_what_the_chosen_ones_do(made: tuple[EncoderModelSpec, Tensors]) -> None:
    """In fixed shapes, as a CUDA graph needs them."""
    module: Any = load(made[0], EngineConfig(dtype="float32"), "cpu")
    layers = [each for each in module.modules() if isinstance(each, ExpertLayer)]
    assert len(layers) == LAYERS // 2
    hidden = torch.randn(20, WIDTH)
    shares = layers[0].router(hidden)
    assert ((shares > 0).sum(1) == 2).all()
    assert (shares.sum(1) < 1).all()
    torch.testing.assert_close(layers[0].compute_all(hidden, shares), layers[0].compute_chosen(hidden, shares))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is true; supported is false"),
        ({"num_shared_experts": 1}, "num_shared_experts is 1; supported is 0"),
        ({"activation_function": "swiglu"}, "activation_function is 'swiglu'; supported is 'gelu'"),
        ({"moe_top_k": 9}, "moe_top_k is 9, and there are 8 experts"),
        ({"moe_every_n_layers": 1}, "moe_every_n_layers is 1"),
    ],
)
def test_another_mixture_is_rejected(tmp_path: pathlib.Path, changes: dict[str, Any], says: str) -> None:
    make_nomic(tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=says):
        open_encoder(tmp_path)
