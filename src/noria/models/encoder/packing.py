"""Packed batches: the texts of a call follow each other in one sequence, and nothing is padded.

Attention, which alone would mix them, is registered with transformers under a name. On a GPU it is torch's
`varlen_attn` (FlashAttention, in bfloat16 and float16); on a CPU it computes one text after the other.

Shapes: B texts, N tokens of all, H heads, D numbers of a token or head.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from noria.models.encoder.architectures import OFFSET_POSITIONS, PACKED
from noria.models.encoder.checkpoint import EncoderModule, TaskModule
from noria.models.encoder.pooling import PackedTexts, pool
from noria.protocol.text import Pooling

_ATTENTION = "noria_packed"


def packing_obstacle(module: torch.nn.Module) -> str | None:
    """Return the reason why texts of a model cannot be packed, or None."""
    if not isinstance(module, EncoderModule):
        return "images are not packed"
    kind = getattr(module.model.config, "model_type", "static")
    if isinstance(module, TaskModule):
        return "texts with adapters are not packed"
    if kind not in PACKED:
        return f"models of the type {kind} are not packed"
    return "a head with the classifier_pooling late is not packed" if _pooling_of_head(module.model) == "late" else None


def _pooling_of_head(model: Any) -> str:
    """Return a classifier's way to combine the tokens of a text; empty: the model is no classifier of texts."""
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return ""
    return str(getattr(model.config, "classifier_pooling", "cls"))


class PackedModule(torch.nn.Module):
    """An encoder that computes packed batches, beside the one whose weights it shares."""

    def __init__(self, padded: EncoderModule) -> None:
        """`padded` has no `packing_obstacle`."""
        super().__init__()
        shared = {id(tensor): tensor for tensor in itertools.chain(padded.parameters(), padded.buffers())}
        self.encoder: EncoderModule = copy.deepcopy(padded, shared)
        model = self.encoder.model
        model.set_attn_implementation(_ATTENTION)
        config = model.config
        self.pad_id: int | None = config.pad_token_id if config.model_type in OFFSET_POSITIONS else None
        """The token after whose id positions are numbered; None: from 0."""
        if pooling := _pooling_of_head(model):
            hook = _PooledStates("mean" if pooling == "mean" else "cls")
            _states(model.base_model).register_forward_hook(hook, with_kwargs=True)

    def forward(
        self,
        input_ids_1N: torch.Tensor,
        position_ids_1N: torch.Tensor,
        texts_1N: torch.Tensor,
        offsets_1B: torch.Tensor,
        token_type_ids_1N: torch.Tensor | None = None,
        *,
        max_length: int,
    ) -> torch.Tensor:
        """Compute what `token_rows.pack` returns; no text has more than `max_length` tokens.

        Returns a row for each text, or [1, N, …] if results are of tokens.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids_1N, "position_ids": position_ids_1N}
        if token_type_ids_1N is not None:
            inputs["token_type_ids"] = token_type_ids_1N
        texts = PackedTexts(offsets_1B[0], texts_1N[0])
        result = self.encoder.model(**inputs, packed_texts=texts, cu_seq_lens_q=offsets_1B[0], max_length_q=max_length)
        return self.encoder.finish(result[self.encoder.output], texts)


class _PooledStates:
    """A hook that leaves one state of each text to the head of a classifier, which would take those of padded texts."""

    def __init__(self, mode: Pooling) -> None:
        self._mode: Pooling = mode

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ARG002
        hidden = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        pooled_B1D = pool(self._mode, hidden.float(), kwargs["packed_texts"]).to(hidden.dtype)[:, None]
        if isinstance(output, torch.Tensor):
            return pooled_B1D
        output.last_hidden_state = pooled_B1D
        return output


def _states(base: Any) -> torch.nn.Module:
    """The part of a model that returns the states of tokens to its pooler, or else to the head."""
    if hasattr(base, "encoder"):
        return base.encoder  # type: ignore[no-any-return]
    return base if getattr(base, "pooler", None) is None else base.layers[-1]  # type: ignore[no-any-return]


def _attend(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, within each text; returns [1, N, H, D].

    A token sees those nearer than `sliding_window`, as in transformers' FlashAttention.
    """
    if softcap is not None:
        raise ValueError(f"attention has a softcap of {softcap}, which packed batches do not compute")
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not query_1HND.is_cuda:
        lengths = cu_seq_lens_q.diff().tolist()
        states = query_1HND, key_1HND, value_1HND
        return _attend_in_turn(*states, lengths, scaling, sliding_window, is_causal), None
    from torch.nn.attention.varlen import varlen_attn

    query_NHD, key_NHD, value_NHD = (each[0].transpose(0, 1) for each in (query_1HND, key_1HND, value_1HND))
    left = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0 if is_causal else left)}
    if query_NHD.shape[1] != key_NHD.shape[1]:
        options["enable_gqa"] = True
    layout = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    heads_NHD: Any = varlen_attn(query_NHD, key_NHD, value_NHD, *layout, **options)
    return heads_NHD[None], None


def _attend_in_turn(
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    sliding_window: int | None,
    is_causal: bool,
) -> torch.Tensor:
    heads, start = [], 0
    for length in lengths:
        end, mask = start + length, None
        if sliding_window is not None or is_causal:
            places = torch.arange(length)
            distances = places[:, None] - places
            mask = (distances >= 0) if is_causal else torch.ones_like(distances, dtype=torch.bool)
            if sliding_window is not None:
                mask &= distances.abs() < sliding_window
        heads.append(
            torch.nn.functional.scaled_dot_product_attention(
                query_1HND[:, :, start:end],
                key_1HND[:, :, start:end],
                value_1HND[:, :, start:end],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=query_1HND.shape[1] != key_1HND.shape[1],
            )
        )
        start = end
    return torch.cat(heads, dim=2).transpose(1, 2)


transformers.AttentionInterface.register(_ATTENTION, _attend)
