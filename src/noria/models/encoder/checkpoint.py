"""The checkpoint of a text encoder in torch, with its pooling: what is exported to ONNX, and what runs on a GPU.

transformers computes the model, from a configuration of which every key that chooses code to import or download was
removed. Embeddings are not normalized here: each request says whether its own are.

Shapes: B texts, T tokens of the longest, D numbers of a token.
"""

import pathlib
import re
import types
from collections.abc import Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.errors import ModelError
from noria.extras import require
from noria.models.encoder.architectures import CAUSAL
from noria.models.encoder.folders.config_files import read_config
from noria.models.encoder.folders.dense_folder import BIAS, WEIGHT
from noria.models.encoder.folders.static_folder import ARCHITECTURE, MAPPING, TABLE, WEIGHTS, read_weights_of_tokens
from noria.models.encoder.folders.tower_config import OTHER_TOWER, TEXT_TOWER, TOWERS, image_tower
from noria.models.encoder.image_modules import ImageModule, PatchModule
from noria.models.encoder.pooling import PaddedTexts, Texts, pool, pool_sparsely
from noria.models.encoder.task_adapters import Chosen, add_adapters, read_original
from noria.models.encoder.tokenizers.token_rows import has_images
from noria.models.families import FAMILIES
from noria.models.files.weights import REDOWNLOAD_HINT, read_object, weight_files
from noria.protocol.text import DenseLayer, EncoderModelSpec, Pooling, Splade, TokenHead

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CODE_KEYS = frozenset({
    *(f"{prefix}{part}_implementation{suffix}"
      for prefix in ("", "_") for part in ("attn", "experts") for suffix in ("", "_internal")),
    "auto_map", "custom_pipelines", "compression_config", "dtype", "output_attentions", "output_hidden_states",
    "quantization_config", "reference_compile", "return_dict", "torch_dtype", "torchscript", "transformers_weights",
    "trust_remote_code", "use_kernels",
})  # fmt: skip
"""Keys of config.json by which a model would choose code, files, precision or outputs; the loader does so itself."""
_NUMBERED_LAYER = re.compile(r"\.\d+\.")
_BUFFERS = ("position_ids", "inv_freq", "masked_bias")


class EncoderModule(torch.nn.Module):
    """A model of transformers whose result is one tensor: embeddings [B, D], logits [B, labels], or both by token.

    Those of tokens are [B, T, …]. Sparse embeddings are [B, tokens of the vocabulary], mostly zeros.
    """

    _fill_1L: torch.Tensor | None

    def __init__(
        self,
        model: Any,
        pooling: tuple[Pooling, ...],
        dense: Sequence[tuple[DenseLayer, torch.nn.Linear]] = (),
        *,
        splade: Splade | None = None,
        normalizes_tokens: bool = False,
        is_causal: bool = False,
        output: int = 0,
        fill: tuple[int, int] | None = None,
    ) -> None:
        """`pooling` is empty for encoders with labels, and for classes that pool themselves.

        `is_causal` says that each token sees those before it alone. `output` is the place of the result among the
        model's outputs. `fill` is the token that fills texts up, which the model sees, and their length then.
        """
        super().__init__()
        self._normalizes_tokens = normalizes_tokens
        self.model, self.pooling, self._splade, self._is_causal = model, pooling, splade, is_causal
        self.output = output
        fill_1L = None if fill is None else torch.full((1, fill[1]), fill[0])
        self.register_buffer("_fill_1L", fill_1L, persistent=False)
        self.dense = torch.nn.ModuleList(
            torch.nn.Sequential(linear, getattr(torch.nn, layer.activation)()) for layer, linear in dense
        )
        self._normalizes_first = [layer.normalizes_first for layer, _ in dense]

    @property
    def pad_token_id(self) -> int:
        """The token that fills up shorter texts."""
        return self.model.config.pad_token_id or 0

    @property
    def end_token_id(self) -> int | None:
        """The token whose state is the embedding; None: the class does not look for one."""
        config = self.model.config
        return config.eos_token_id if getattr(config, "model_type", None) == "clip_text_model" else None

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute texts [B, T] that are padded on the right, where `attention_mask` is 0."""
        inputs = {"input_ids": input_ids}
        if self._fill_1L is not None:
            fill_BL = self._fill_1L.expand(input_ids.shape[0], -1)
            length = input_ids.shape[1]
            filled = torch.where(attention_mask == 0, fill_BL[:, :length], input_ids)
            inputs["input_ids"] = torch.cat([filled, fill_BL[:, length:]], dim=1)
        elif not self._is_causal:  # else no token sees the padding behind it: attention is plainly causal
            inputs["attention_mask"] = attention_mask
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        return self.finish(self.model(**inputs)[self.output], PaddedTexts(attention_mask))

    def finish(self, result: torch.Tensor, texts: Texts) -> torch.Tensor:
        """Compute what follows transformers' model, of its result."""
        if self.pooling:
            result = torch.cat([pool(mode, result.float(), texts) for mode in self.pooling], dim=-1)
        if self._splade is not None:
            return pool_sparsely(self._splade, result.float(), texts)
        for dense, normalizes_first in zip(self.dense, self._normalizes_first, strict=True):
            result = dense(torch.nn.functional.normalize(result, dim=-1) if normalizes_first else result.float())
        return torch.nn.functional.normalize(result, dim=-1) if self._normalizes_tokens else result.float()


class TaskModule(EncoderModule):
    """An encoder of which each text has the adapter of a task, or none."""

    _others_KR: torch.Tensor

    def read_adapters(self, spec: EncoderModelSpec) -> None:
        """Read the adapters of `spec` into the model. Raises ModelError: one is of another model."""
        self._chosen = Chosen()
        add_adapters(spec, self.model, self._chosen)
        tasks_R = torch.tensor([task for task, each in enumerate(spec.adapters, 1) for _ in range(each.rank)])
        others_KR = torch.arange(len(spec.adapters) + 1)[:, None] != tasks_R
        self.register_buffer("_others_KR", others_KR, persistent=False)

    def forward(  # type: ignore[override]  # it has no token types
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, adapter_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute texts as any encoder does, text b with the adapter number `adapter_ids[b]`, from 1, or none."""
        self._chosen.others_B1R = self._others_KR[adapter_ids].unsqueeze(1)
        return super().forward(input_ids, attention_mask)


def load(
    spec: EncoderModelSpec, config: EngineConfig, device: str, attention: str = "sdpa"
) -> EncoderModule | ImageModule:
    """Read the checkpoint in `spec.folder` onto `device`, in `config.dtype`; `attention` is one of transformers' names.

    Raises:
        MissingExtra: transformers is not installed.
        ModelError: transformers cannot load it, or weights are missing.

    """
    if spec.architecture == ARCHITECTURE:
        table = _load_table(spec, _DTYPES[config.dtype])
        return EncoderModule(table, spec.pooling).eval().requires_grad_(requires_grad=False).to(device)
    if has_images(spec.inputs):
        return _load_image_tower(spec, config, attention).eval().requires_grad_(requires_grad=False).to(device)
    tree = read_config(spec.path) | {"use_cache": False}  # which would keep keys and values for more tokens
    if spec.labels:  # as `encoder_folder.py` has read them, where transformers would fail or count others
        by_id = dict(enumerate(spec.labels))
        tree |= {"id2label": by_id, "label2id": None, "num_labels": len(by_id), "problem_type": None}
    model = _read_model(spec, tree, config, attention, OTHER_TOWER)
    dense = [(layer, _load_dense(spec.path, layer)) for layer in spec.dense]
    if spec.head is not None:
        linear = _load_head(spec, spec.head)
        dense = [(DenseLayer(spec.head.tensor, linear.in_features, 1, has_bias=False, activation="Identity"), linear)]
    tower = TOWERS.get(model.config.model_type)
    module = (TaskModule if spec.adapters else EncoderModule)(
        model,
        spec.pooling if tower is None else (),
        dense,
        splade=spec.splade,
        normalizes_tokens=spec.late_interaction is not None and spec.normalize,
        is_causal=model.config.model_type in CAUSAL or (tower is not None and not tower.fills_texts),
        output=0 if tower is None else tower.output,
        fill=None if spec.fill_id is None else (spec.fill_id, spec.max_length),
    )
    if isinstance(module, TaskModule):
        module.read_adapters(spec)
    return module.eval().requires_grad_(requires_grad=False).to(device)


def _load_image_tower(spec: EncoderModelSpec, config: EngineConfig, attention: str) -> ImageModule:
    file = spec.path / "config.json"
    found = image_tower(file, read_object(file))
    assert found is not None and spec.image_input is not None, "the folder was inspected"
    tower, tree = found
    make = ImageModule if spec.image_input.patches is None else PatchModule
    return make(_read_model(spec, tree, config, attention, TEXT_TOWER), spec.image_input, tower.output)


def _read_model(
    spec: EncoderModelSpec, tree: dict[str, Any], config: EngineConfig, attention: str, others: tuple[str, ...]
) -> Any:
    """Have transformers read the class of `spec` with the configuration `tree`.

    The names of tensors that belong to another part of the model begin as one of `others`. Raises as `load`.
    """
    transformers = require("transformers", "encoders-export", f"loading the checkpoint of {spec.name}")
    from huggingface_hub.errors import StrictDataclassError  # transformers requires it

    model_class = getattr(transformers, spec.architecture)  # `encoder_folder.py` has looked it up in a list
    if tree.get("num_experts"):
        from noria.models.encoder.experts import ExpertModel

        model_class = ExpertModel
    _silence(transformers)
    try:
        original = read_original(spec, tree)
        model, info = model_class.from_pretrained(
            spec.folder if original is None else None,
            state_dict=original,
            config=model_class.config_class.from_dict(_without_code(tree)),
            dtype=_DTYPES[config.dtype],
            attn_implementation=attention if model_class._supports_sdpa else "eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are looked for below; the library's error names none
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ModelError(f"the model in {spec.folder} cannot be loaded: {' '.join(str(error).split())}") from error
    missing = [str(key) for key in info["missing_keys"] if not _is_unused(str(key), spec)]
    if missing:
        raise ModelError(
            f"the weights in {spec.folder} do not match its configuration: {len(missing)} parameters are missing, the "
            f"first is {min(missing)}. Save the model again with save_pretrained."
        )
    mismatched = [each for each in info["mismatched_keys"] if not _is_unused(each[0], spec)]
    if mismatched:
        name, has, wants = min(mismatched)
        raise ModelError(
            f"the weights in {spec.folder} do not match its configuration: {len(mismatched)} parameters have another "
            f"shape, the first is {name}: {list(has)}, and by config.json {list(wants)}. {REDOWNLOAD_HINT}"
        )
    unexpected = [
        str(key)
        for key in info["unexpected_keys"]
        if _NUMBERED_LAYER.search(key) and not str(key).endswith(_BUFFERS) and not str(key).startswith(others)
    ]
    if unexpected:
        raise ModelError(
            f"the weights in {spec.folder} have {len(unexpected)} parameters that {spec.architecture} has not, the "
            f"first is {min(unexpected)}: it computes something else."
        )
    _check_finite(spec.path, model)
    return model


def _load_head(spec: EncoderModelSpec, head: TokenHead) -> torch.nn.Linear:
    """Read one or two rows of the matrix, in float32; the others are never in memory."""
    from safetensors import safe_open

    for file in weight_files(spec.path, "", FAMILIES[spec.family].weight_stems[""]):
        with safe_open(file, "pt") as opened:
            if head.tensor not in opened.keys():  # noqa: SIM118  # it is no dict
                continue
            matrix = opened.get_slice(head.tensor)
            weight = matrix[head.true_row : head.true_row + 1].float()
            if head.false_row is not None:
                weight -= matrix[head.false_row : head.false_row + 1].float()
    linear = torch.nn.Linear(weight.shape[1], 1, bias=False)
    linear.weight.data = weight
    _check_finite(spec.path, linear)
    return linear


class _Table(torch.nn.Module):
    """A static embedding, called as a model of transformers."""

    def __init__(self, vectors: torch.Tensor) -> None:
        super().__init__()
        self.vectors = torch.nn.Parameter(vectors)
        self.config = types.SimpleNamespace(pad_token_id=0)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:  # noqa: ARG002
        return (torch.nn.functional.embedding(input_ids, self.vectors),)


def _load_table(spec: EncoderModelSpec, dtype: torch.dtype) -> _Table:
    """Read a static embedding, and give each token its row; of a sparse one that is its weight."""
    if spec.task == "sparse_embedding":
        weights_V1 = torch.zeros(spec.vocab_size, 1)
        for token_id, weight in read_weights_of_tokens(spec.path).items():
            weights_V1[token_id] = weight
        table = _Table(weights_V1.to(dtype))
        _check_finite(spec.path, table)
        return table
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(spec.path, "", FAMILIES[spec.family].weight_stems[""]):
        tensors |= load_file(file)
    vectors = tensors[TABLE].float()
    if MAPPING in tensors:
        rows = tensors[MAPPING].long()
        if rows.min() < 0 or rows.max() >= len(vectors):
            raise ModelError(f"the weights in {spec.folder} have a token whose vector is row {int(rows.max())}.")
        vectors = vectors[rows]
    if WEIGHTS in tensors:
        vectors = vectors * tensors[WEIGHTS].float()[:, None]
    table = _Table(vectors.to(dtype))
    _check_finite(spec.path, table)
    return table


def _load_dense(folder: pathlib.Path, layer: DenseLayer) -> torch.nn.Linear:
    """Read a layer in float32: it is small, and embeddings are float32 from the pooling on."""
    from safetensors import safe_open

    linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.has_bias)
    for file in weight_files(folder, layer.path, layer.stem):  # names and shapes were compared when it was inspected
        with safe_open(file, "pt") as opened:
            names = {"weight", "bias", WEIGHT, BIAS}.intersection(opened.keys())
            tensors = {name.removeprefix("linear."): opened.get_tensor(name).float() for name in names}
        linear.load_state_dict(tensors, strict=False)
    _check_finite(folder / layer.path, linear)
    return linear


def _check_finite(folder: pathlib.Path, module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise ModelError(f"the weights in {folder} are not finite: {name} has NaN or infinity.")


def _is_unused(key: str, spec: EncoderModelSpec) -> bool:
    """Whether a parameter is of a pooler, which embeddings do without: their pooling is `pool`."""
    return spec.task in ("embedding", "token_embedding") and "pooler." in key


def _without_code(tree: Any) -> Any:
    """Remove `_CODE_KEYS` at every depth."""
    if isinstance(tree, dict):
        return {key: _without_code(value) for key, value in tree.items() if key not in _CODE_KEYS}
    return [_without_code(value) for value in tree] if isinstance(tree, list) else tree


def _silence(transformers: Any) -> None:
    """Disable progress bars and warnings of transformers, until the process ends; errors still raise."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
