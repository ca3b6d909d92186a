"""Loads the parts of a folder in diffusers format, for all families. Safetensors only, checked before by the catalog.

diffusers and transformers read the weights. With accelerate installed they create a part without memory for parameters
and then put the file's tensors in their place; else a part would first be filled with random numbers in float32.
"""

import contextlib
import logging
import pathlib
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from noria.config import EngineConfig
from noria.errors import ModelError, short_repr
from noria.models.diffusion.block_quantization import check_streamable, denoiser_part, quantize_blocks
from noria.models.diffusion.folders.quantization import BitsAndBytes, read_quantization
from noria.models.diffusion.vae import memory_format_of, without_overflow
from noria.models.diffusion.weight_streaming import WeightStreamer
from noria.models.families import FAMILIES
from noria.models.files.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.files.gguf_file import read_gguf_header
from noria.models.files.sentencepiece_file import SPIECE, needs_pieces, read_vocabulary
from noria.models.files.weights import REDOWNLOAD_HINT, variant, weight_files
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec

_log = logging.getLogger("noria.models")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


PartT = TypeVar("PartT")


class SharedParts(Generic[PartT]):
    """Parts that the models of a process share while one of them holds them, by what makes them equal."""

    def __init__(self) -> None:
        self._parts: weakref.WeakValueDictionary[tuple[object, ...], PartT] = weakref.WeakValueDictionary()

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._parts

    def get(self, key: tuple[object, ...], load: Callable[[], PartT]) -> PartT:
        """Return the part of a key; if no model holds it, what `load` returns."""
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = load()
        return part


def text_encoder_placement(config: EngineConfig, device: str) -> tuple[torch.dtype, str]:
    """Return the dtype and the device of the text encoders of a model on `device`; `config` has no "auto" left.

    On a CPU beside a GPU they are in float32, because few CPUs are fast in another.
    """
    dtype = DTYPES[config.dtype]
    if config.text_encoder_device == "same":
        return dtype, device
    return torch.float32 if config.text_encoder_device == "cpu" else dtype, config.text_encoder_device


def make_streamer(config: EngineConfig, device: str) -> WeightStreamer | None:
    """Return what streams the parts of one model with `engine.offload`; None: all are on their devices."""
    return None if config.offload == "none" or device == "meta" else WeightStreamer(config, device)


def load_part(
    part_class: Any,
    spec: DiffusionModelSpec,
    name: str,
    dtype: torch.dtype,
    device: str,
    streamer: WeightStreamer | None = None,
) -> Any:
    """Load one part onto a device, to be called and not trained; onto "meta" without its weights.

    With a `streamer` its blocks may stay in the host's memory.

    Raises ModelError: weights are missing, which the libraries would silently fill with random numbers, or are
    quantized and would stream.
    """
    folder, stem = spec.path / name, FAMILIES[spec.family].weight_stems[name]
    if streamer is None or not streamer.streams(name):
        return load_weights(part_class, folder, stem, dtype, device)
    check_streamable(spec, name)
    part = load_weights(part_class, folder, stem, dtype, "cpu")
    streamer.add(name, part)
    return part


def load_denoiser(
    part_class: Any,
    spec: DiffusionModelSpec,
    config: EngineConfig,
    device: str,
    streamer: WeightStreamer | None = None,
) -> Any:
    """Load the denoiser as `load_part`, and quantize its blocks if `config`, which has no "auto" left, says so.

    It was checked before that they can be.
    """
    name, dtype = denoiser_part(spec), DTYPES[config.dtype]
    if config.quantize == "none":
        return load_part(part_class, spec, name, dtype, device, streamer)
    part = load_part(part_class, spec, name, dtype, "cpu")
    quantize_blocks(part, config.quantize, device)
    return part


def load_weights(part_class: Any, folder: pathlib.Path, stem: str, dtype: torch.dtype, device: str) -> Any:
    """Load the part in `folder`, whose weight files are called `stem`, as `load_part` does. The log says how long."""
    if device == "meta":
        with torch.device("meta"):
            is_of_diffusers = hasattr(part_class, "load_config")
            configured = (
                part_class.from_config(part_class.load_config(folder))
                if is_of_diffusers
                else part_class(part_class.config_class.from_pretrained(folder, local_files_only=True))
            )
        return configured.to(dtype).eval().requires_grad_(requires_grad=False)
    started_s = time.monotonic()
    part = _load_weights(part_class, folder, stem, dtype, device)
    seconds = time.monotonic() - started_s
    extra = fields(event="part_loaded", folder=str(folder), device=device, seconds=round(seconds, 3))
    _log.info("loaded %s in %.1f s", "/".join(folder.parts[-2:]), seconds, extra=extra)
    return part


def _load_weights(part_class: Any, folder: pathlib.Path, stem: str, dtype: torch.dtype, device: str) -> Any:
    if device == "cpu" and isinstance(read_quantization(folder / "config.json"), BitsAndBytes):
        raise ModelError(
            f"{folder}: its weights are quantized by bitsandbytes, whose loader needs a GPU. Use a GPU, or a folder "
            "that torchao has quantized (Int8WeightOnlyConfig)."
        )
    file = weight_files(folder.parent, folder.name, stem)[0]
    if file.suffix == GGUF_SUFFIX:
        return _load_gguf(part_class, file, dtype, device)
    part, info = part_class.from_pretrained(
        folder,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,
        local_files_only=True,
        variant=variant(folder, stem),
    )
    missing_keys = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    if missing_keys:
        raise ModelError(
            f"the weights in {folder} do not match its configuration: {len(missing_keys)} parameters are missing or "
            f"have another shape, the first is {missing_keys[0]}. Save the model again with save_pretrained."
        )
    wanted = {each.dtype for each in part.parameters() if type(each.data).__name__ == "Float8Tensor"} - {dtype}
    if wanted:
        name = str(wanted.pop()).removeprefix("torch.")
        raise ModelError(f"{folder}: its weights in float8 multiply only {name}: set engine.dtype to {name}.")
    return part.to(device).eval().requires_grad_(requires_grad=False)


def _load_gguf(part_class: Any, file: pathlib.Path, dtype: torch.dtype, device: str) -> Any:
    """Load a part from a GGUF file, whose matrices stay as they are and are converted in each call of a layer."""
    import diffusers

    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    try:
        part = part_class.from_single_file(
            str(file),
            config=str(file.parent),
            quantization_config=config,
            dtype=dtype,
            device=device,
            local_files_only=True,
        )
    except (ValueError, RuntimeError, LookupError, AttributeError, TypeError) as error:
        is_missing = isinstance(error, NotImplementedError | LookupError)  # torch's meta device or converters raise it
        reason = f"tensors are missing ({error!r})" if is_missing else str(error).partition(" If you want")[0]
        raise ModelError(
            f"{file}: of the architecture {short_repr(read_gguf_header(file).architecture)}, it cannot be read as the "
            f"{part_class.__name__} that config.json describes: {reason}"
        ) from error
    for name, module in part.named_modules():
        is_quantized = any(hasattr(each, "quant_type") for each in module.parameters(recurse=False))
        if is_quantized and not isinstance(module, torch.nn.Linear):
            raise ModelError(f"{file}: {name} is quantized; only linear layers can be. Use another quantization of it.")
    return part.eval().requires_grad_(requires_grad=False)


def unquantized_dtype(part: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a part's inputs: a quantized weight says the one that it was made from."""
    floats = [each.dtype for each in part.parameters() if type(each) is torch.nn.Parameter and each.is_floating_point()]
    return floats[0]


def load_text_encoder(
    classes: tuple[Any, Any],
    spec: DiffusionModelSpec,
    suffix: str,
    dtype: torch.dtype,
    device: str,
    streamer: WeightStreamer | None = None,
    **tokenizer_options: Any,
) -> tuple[Any, Any]:
    """Load the tokenizer and the text encoder of this suffix, of the two classes.

    Raises ModelError: as `load_part` and `load_tokenizer`.
    """
    tokenizer_class, encoder_class = classes
    text_encoder = load_part(encoder_class, spec, f"text_encoder{suffix}", dtype, device, streamer)
    parts = FAMILIES[spec.family].parts
    folder = spec.path / (f"tokenizer{suffix}" if f"tokenizer{suffix}" in parts else f"processor{suffix}")
    return load_tokenizer(tokenizer_class, folder, text_encoder, **tokenizer_options), text_encoder


def load_tokenizer(tokenizer_class: Any, folder: pathlib.Path, text_encoder: Any, **options: Any) -> Any:
    """Load the tokenizer of a text encoder.

    Raises ModelError: it cannot be read, or has token ids beyond the text encoder's, of which any file may add some.
    """
    try:
        if needs_pieces(folder):
            vocabulary = read_vocabulary(folder / SPIECE)
            table, pieces = vocabulary.normalization or None, list(vocabulary.pieces)
            tokenizer = tokenizer_class(vocab=pieces, _spm_precompiled_charsmap=table, extra_ids=0, **options)
        else:
            tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, **options)
    except (KeyboardInterrupt, SystemExit, ModelError):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ModelError(f"{folder}: not a tokenizer: {error}. {REDOWNLOAD_HINT}") from error
    max_token_id, num_tokens = max(tokenizer.get_vocab().values()), len(text_encoder.get_input_embeddings().weight)
    if max_token_id >= num_tokens:
        raise ModelError(
            f"{folder}: has token ids up to {max_token_id}, but the text encoder has {num_tokens} tokens. Ids are in "
            f"tokenizer.json, tokenizer_config.json and added_tokens.json. {REDOWNLOAD_HINT}"
        )
    return tokenizer


def load_vae(
    spec: DiffusionModelSpec,
    config: EngineConfig,
    device: str,
    streamer: WeightStreamer | None = None,
    *,
    may_overflow: bool = False,
) -> Any:
    """Load the VAE, whose class the folder names; if it `may_overflow`, as `without_overflow` returns it."""
    import diffusers

    index_file, index = spec.path / "model_index.json", load_pipeline_config(spec)
    name = FAMILIES[spec.family].check_class(index_file, "vae", index["vae"][1])
    place = device if streamer is None else "cpu"
    vae = load_part(getattr(diffusers, name), spec, "vae", DTYPES[config.dtype], place)
    if may_overflow:
        vae = without_overflow(vae)
    if streamer is not None:
        streamer.add("vae", vae.to(memory_format=memory_format_of(vae, config)))
    return vae


def load_pipeline_config(spec: DiffusionModelSpec) -> dict[str, Any]:
    """Return the folder's model_index.json."""
    import diffusers

    return dict(diffusers.DiffusionPipeline.load_config(spec.path))


def load_scheduler_config(spec: DiffusionModelSpec) -> dict[str, Any]:
    """Return the folder's scheduler_config.json."""
    import diffusers

    return dict(diffusers.DDIMScheduler.load_config(spec.path / "scheduler"))


@contextlib.contextmanager
def loading(spec: DiffusionModelSpec) -> Any:
    """Convert the libraries' exceptions to a ModelError that names the model.

    Disables progress bars and warnings of diffusers and transformers, until the process ends; errors still raise.
    """
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError(f"the model in {spec.folder} cannot be loaded: {error}") from error
