"""The LoRA adapters of one loaded model: from their files to the rows of its calls."""

import contextlib
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from noria.config import EngineConfig
from noria.engine.diffusion.loras.lora_cache import NO_ADAPTERS, Adapters, LoraCache
from noria.engine.diffusion.loras.lora_rows import LoraRows
from noria.engine.resources.priority import run_apart
from noria.errors import InvalidField, ModelError
from noria.folders import file_version
from noria.models.adapters.lora_folders import LoraFolders, check_digest
from noria.models.diffusion.block_compilation import check_not_compiled, with_hooks, without_compiled_blocks
from noria.models.diffusion.conditioning import Conditioning
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.loras.lora_file import read_lora
from noria.models.diffusion.loras.lora_layer import LoraWeights
from noria.models.diffusion.prompts.clip_prompt import PromptText
from noria.models.diffusion.prompts.multimodal_prompt import MultimodalPrompt
from noria.models.diffusion.unet_models.graphed_calls import without_graphs
from noria.protocol.diffusion import Lora
from noria.protocol.model_spec import CallChoice

_MAX_REJECTED = 256  # files that are remembered


class AdaptedPrompt(NamedTuple):
    """A prompt whose text encoders have LoRA adapters."""

    prompt: PromptText | MultimodalPrompt
    loras: tuple[tuple[str, float], ...]  # digests and weights


Prompt = PromptText | MultimodalPrompt | AdaptedPrompt


class ModelLoras:
    """Loads adapters on any thread, applies them on the loop's; `config` has no "auto" left."""

    def __init__(self, model: DiffusionModel, config: EngineConfig, choice: CallChoice | None = None) -> None:
        """Raises ConfigError if there are folders of adapters, but the model is compiled: its layers cannot change."""
        self._folders = LoraFolders.of(config)
        if self._folders:
            check_not_compiled(config, "loras")
        self._model, self._max_bytes = model, config.lora_cache_bytes
        self._has_compiled_blocks = config.compile_blocks
        self._are_compiled = choice is None or choice.compile_loras
        self.cache = LoraCache(
            {name: next(part.parameters()).device for name, part in model.lora_parts.items()}, config.lora_cache_bytes
        )
        parts = model.lora_parts if self._folders else {}
        is_padded = len(config.buckets) == 1
        self._rows = {name: LoraRows(name, part, for_all_rows=is_padded) for name, part in parts.items()}
        self._denoiser = next(iter(model.lora_parts), "")  # all other parts encode prompts
        self._rejected: dict[pathlib.Path, tuple[tuple[int, ...], str]] = {}  # by file: its version, and why

    def load(self, loras: Sequence[Lora], model: str) -> Adapters:
        """Return the adapters of a request for the model of this name, which must hold them as long as it needs them.

        Raises:
            LoraNotFound: one does not exist.
            InvalidField: one has another digest now, or does not fit the model or the cache, or the model has no parts
                that LoRAs can change.
            QueueFull: the adapters of other requests fill the cache.
        """
        if loras and not self._model.lora_parts:
            raise InvalidField(f"loras: {model} has no parts that LoRAs can change.", field="loras")
        return self.cache.get(loras, functools.partial(self._read, model))

    def _read(self, model: str, lora: Lora) -> LoraWeights:
        file = self._folders.find(lora, model)
        version = file_version(file)
        if (rejected := self._rejected.get(file)) is not None and rejected[0] == version:
            raise InvalidField(f"loras: {rejected[1]}", field="loras")
        try:
            # In a thread that ends, as samplers are compiled (ADR 5). A file in float32 has twice the bytes that its
            # adapter takes in float16.
            read = run_apart(lambda: read_lora(file, self._model.lora_parts, self._model.dtype, 2 * self._max_bytes))
            check_digest(lora, file)  # the file may have been replaced after `find`
            return read
        except ModelError as error:
            if not isinstance(error.__cause__, OSError):  # which may be better the next time
                self._rejected.pop(file, None)
                self._rejected[file] = version, error.message
                if len(self._rejected) > _MAX_REJECTED:
                    del self._rejected[next(iter(self._rejected))]
            raise InvalidField(f"loras: {error.message}", field="loras") from error

    def text_encode(self, prompts: Sequence[Prompt]) -> list[Conditioning]:
        """Return the conditioning of prompts, each encoded with its adapters, which requests hold."""
        # Only models that read ClipPrompt get one: for others the front end rejects what would be one.
        texts: list[Any] = [prompt.prompt if isinstance(prompt, AdaptedPrompt) else prompt for prompt in prompts]
        adapters = [
            Adapters(tuple(self.cache.loaded(*lora) for lora in prompt.loras))
            if isinstance(prompt, AdaptedPrompt)
            else NO_ADAPTERS
            for prompt in prompts
        ]
        with contextlib.ExitStack() as stack:
            for name, rows in self._rows.items():
                if name != self._denoiser:
                    stack.callback(rows.clear)  # the next prompts have other adapters
                    stack.enter_context(rows.applied(adapters))
            return self._model.text_encode(texts)

    @contextlib.contextmanager
    def denoising(self, adapters: Sequence[Adapters]) -> Iterator[None]:
        """Call the denoiser inside of this context with the adapters of each row."""
        rows = self._rows.get(self._denoiser)
        if rows is None:
            yield
            return
        with rows.applied(adapters), contextlib.ExitStack() as stack:
            if rows.is_active:
                stack.enter_context(without_graphs())
                if self._has_compiled_blocks:
                    call = with_hooks if self._are_compiled and rows.run_in_compiled else without_compiled_blocks
                    stack.enter_context(call(self._model.lora_parts[self._denoiser]))
            yield

    def prompt_key(self, prompt: PromptText | MultimodalPrompt, adapters: Adapters) -> Prompt:
        """Return the key of a prompt's embedding, in which only those adapters are that change a text encoder."""
        loras = tuple((each.digest, each.weight) for each in adapters if set(each.weights.layers) - {self._denoiser})
        return AdaptedPrompt(prompt, loras) if loras else prompt

    def release(self) -> None:
        """Release what is kept of the last calls; the adapters stay in the cache."""
        for rows in self._rows.values():
            rows.clear()
