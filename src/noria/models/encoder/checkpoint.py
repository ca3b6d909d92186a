"""The checkpoint of a text encoder in torch, with its pooling: what is exported to ONNX, and what runs on a GPU.

transformers computes the model, from a configuration of which every key that chooses code to import or download was
removed. Embeddings are not normalized here: each request says whether its own are.

Shapes: B texts, T tokens of the longest, D numbers of a token.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from noria.config import EngineConfig
from noria.errors import ModelError
from noria.extras import require
from noria.protocol.text import EncoderModelSpec, Pooling

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CODE_KEYS = frozenset({
    *(f"{prefix}{part}_implementation{suffix}"
      for prefix in ("", "_") for part in ("attn", "experts") for suffix in ("", "_internal")),
    "auto_map", "custom_pipelines", "dtype", "quantization_config", "compression_config", "reference_compile",
    "torch_dtype", "transformers_weights", "trust_remote_code", "use_kernels",
})  # fmt: skip
"""Keys of config.json by which a model would choose code, files or precision; the loader chooses them itself."""


class EncoderModule(torch.nn.Module):
    """A model of transformers whose result is one tensor: embeddings [B, D], logits [B, labels] or [B, T, labels]."""

    def __init__(self, model: Any, pooling: tuple[Pooling, ...]) -> None:
        """`pooling` is empty for models with labels."""
        super().__init__()
        self.model, self.pooling = model, pooling

    @property
    def pad_token_id(self) -> int:
        """The token that fills up shorter texts."""
        return self.model.config.pad_token_id or 0

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute texts [B, T] that are padded on the right, where `attention_mask` is 0."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        result: torch.Tensor = self.model(**inputs)[0]
        if self.pooling:
            mask_BT1 = attention_mask.unsqueeze(-1)
            result = torch.cat([pool(mode, result.float(), mask_BT1) for mode in self.pooling], dim=-1)
        return result.float()


def pool(mode: Pooling, hidden_BTD: torch.Tensor, mask_BT1: torch.Tensor) -> torch.Tensor:
    """Combine the tokens of each text, as sentence-transformers' Pooling does, to [B, D]."""
    weights_BT1 = mask_BT1.to(hidden_BTD.dtype)
    match mode:
        case "cls":
            return hidden_BTD[:, 0]
        case "max":
            return hidden_BTD.masked_fill(mask_BT1 == 0, float("-inf")).amax(1)
        case "mean":
            return (hidden_BTD * weights_BT1).sum(1) / weights_BT1.sum(1)
        case "mean_sqrt_len_tokens":
            return (hidden_BTD * weights_BT1).sum(1) / weights_BT1.sum(1).sqrt()
        case "weightedmean":
            weights_BT1 = weights_BT1.cumsum(1) * weights_BT1
            return (hidden_BTD * weights_BT1).sum(1) / weights_BT1.sum(1)
        case "lasttoken":
            last_B = mask_BT1.squeeze(-1).sum(1) - 1
            return hidden_BTD.gather(1, last_B[:, None, None].expand(-1, 1, hidden_BTD.shape[-1])).squeeze(1)


def load(spec: EncoderModelSpec, config: EngineConfig, device: str, attention: str = "sdpa") -> EncoderModule:
    """Read the checkpoint in `spec.folder` onto `device`, in `config.dtype`; `attention` is one of transformers' names.

    Raises:
        MissingExtra: transformers is not installed.
        ModelError: transformers cannot load it, or weights are missing.

    """
    transformers = require("transformers", "encoders-export", f"loading the checkpoint of {spec.name}")
    model_class = getattr(transformers, spec.architecture)  # `encoder_folder.py` has looked it up in a list
    tree = json.loads((spec.path / "config.json").read_bytes())
    with _quietly(transformers):
        try:
            model, info = model_class.from_pretrained(
                spec.folder,
                config=model_class.config_class.from_dict(_without_code(tree)),
                dtype=_DTYPES[config.dtype],
                attn_implementation=attention if model_class._supports_sdpa else "eager",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"the model in {spec.folder} cannot be loaded: {error}") from error
    missing = [str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]) if not _is_unused(str(key), spec)]
    if missing:
        raise ModelError(
            f"the weights in {spec.folder} do not match its configuration: {len(missing)} parameters are missing or "
            f"have another shape, the first is {min(missing)}. Save the model again with save_pretrained."
        )
    return EncoderModule(model, spec.pooling).eval().requires_grad_(requires_grad=False).to(device)


def _is_unused(key: str, spec: EncoderModelSpec) -> bool:
    """Whether a parameter is of a pooler, which embeddings do without: their pooling is `pool`."""
    return spec.task == "embedding" and "pooler." in key


def _without_code(tree: Any) -> Any:
    """Remove `_CODE_KEYS` at every depth."""
    if isinstance(tree, dict):
        return {key: _without_code(value) for key, value in tree.items() if key not in _CODE_KEYS}
    return [_without_code(value) for value in tree] if isinstance(tree, list) else tree


@contextlib.contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Disable progress bars and warnings of transformers, until the process ends; errors still raise."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
