"""FLUX.2 dev and klein on one device: a transformer that predicts the velocity of patched latents.

Without diffusers' pipeline, and with its numbers. What differs from FLUX.1:

- Conditioned on 512 tokens of a language model, padding included: the inputs of three of its layers side by side, of a
  prompt in a chat.
- Blocks of 2 × 2 of the VAE's latents, scaled by statistics of a batch norm, are the channels of one latent here. The
  start is drawn so.
- The shift of the noise levels depends on the image's size and on the number of steps.
- dev takes the guidance scale itself, in one row. klein is guided by an empty text, unless the request has a negative
  prompt; distilled, it takes neither guidance nor that.
- Shown reference images, whose latents follow the image's, at other times.
- Rows with nearly as many tokens share a call, whatever their sizes and references, see `token_rows.py`.

Shapes: B images, R rows (two for a guided image), T tokens of a prompt, C latent channels, H × W latent size, N = H · W
tokens of an image, M of references, D = C numbers of a token.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, num_cut_of
from noria.models.diffusion.folders.transformer_models.flux_2_folder import (
    DEV_TEXT_LAYERS,
    KLEIN_TEXT_LAYERS,
    is_distilled,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import MAX_PROMPT_TOKENS
from noria.models.diffusion.transformer_models.token_row_model import TokenRowModel
from noria.models.diffusion.transformer_models.token_rows import Sizes
from noria.models.diffusion.transformer_models.transformer_model import QWEN_CHAT, TransformerParts
from noria.models.diffusion.vae import LatentVae, PatchedVae
from noria.sampling.guidance import CLASSIFIER_FREE, Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length_and_steps

_TIME_OF_A_REFERENCE = 10  # the distance between images on the first axis of positions


class _Flux2(TokenRowModel):
    """The common part of both."""

    patch = 1
    vae_class: ClassVar[type[LatentVae]] = PatchedVae
    transformer_class = "Flux2Transformer2DModel"
    text_layers: ClassVar[tuple[int, ...]]  # layers of the language model whose inputs condition the transformer
    chat: ClassVar[str]  # around a prompt. A folder's own template is a program, and is not run

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly falling sigmas, and a shift by the number of the image's tokens and of steps."""
        _, height, width = self.latent_shape(width_px, height_px)
        return Schedule(evenly_falling_sigmas(num_steps), mu=shift_of_length_and_steps(height * width, num_steps))

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, as by diffusers' `encode_prompt`."""
        tokens = self._tokenizer(
            [self.chat.format(self._text("" if prompt is None else prompt)) for prompt in prompts],
            add_special_tokens=False,
            padding="max_length",
            max_length=MAX_PROMPT_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        hidden_states = self._text_outputs(tokens, output_hidden_states=True, use_cache=False).hidden_states
        tokens_BTD = torch.cat([hidden_states[layer] for layer in self.text_layers], dim=-1)
        return self._conditioned(tokens_BTD, num_cut_of(tokens))

    def _text(self, prompt: str) -> str:
        """Return what the chat contains of a prompt."""
        return prompt

    def _keep_text_layers(self, language_model: Any) -> None:
        """Encode texts by this model, without its layers whose outputs nothing takes."""
        self._text_encoder = language_model
        del language_model.layers[self.text_layers[-1] + 1 :]

    def _to_tokens(self, latents_RCHW: torch.Tensor) -> torch.Tensor:
        return latents_RCHW.to(self.dtype).flatten(2).mT

    def _from_tokens(self, tokens_RND: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return tokens_RND.mT.reshape(len(tokens_RND), -1, height, width)

    def _positions(self, size: tuple[int, int], reference_sizes: Sizes) -> torch.Tensor:
        return _row_positions(size, reference_sizes, self.device)

    def _text_positions(self, num_tokens: int) -> torch.Tensor:
        return _grid(0, 1, 1, num_tokens, self.device)


class Flux2Klein(_Flux2):
    """The parts of one Flux2KleinPipeline folder, ready on a device."""

    text_classes = (("Qwen2Tokenizer", "Qwen3Model"),)
    text_layers = KLEIN_TEXT_LAYERS
    chat = f"{QWEN_CHAT}<think>\n\n</think>\n\n"  # with `enable_thinking=False`

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        guidance = Guidance(active_above=math.inf) if is_distilled(parts.spec.path) else CLASSIFIER_FREE
        super().__init__(parts, config, guidance)
        self._keep_text_layers(self._text_encoder)


class Flux2Dev(_Flux2):
    """The parts of one Flux2Pipeline folder, ready on a device."""

    # The pipeline's PixtralProcessor reads images, too; of a text it makes what the tokenizer in its folder does.
    text_classes = (("PreTrainedTokenizerFast", "Mistral3ForConditionalGeneration"),)
    text_layers = DEV_TEXT_LAYERS
    chat = (
        "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing "
        "on object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
    )

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config, Guidance(embedded=True))
        self._keep_text_layers(self._text_encoder.model.language_model)  # its layers for images are not kept

    def _text(self, prompt: str) -> str:
        """Return the prompt without the token of an image, of which there is none."""
        return prompt.replace("[IMG]", "")


@functools.lru_cache(maxsize=64)
def _row_positions(size: tuple[int, int], reference_sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Return [N + M, 4] of an image and of its references, of H × W latents."""
    sizes = (size, *reference_sizes)
    return torch.cat([_grid(_TIME_OF_A_REFERENCE * k, *each, 1, device) for k, each in enumerate(sizes)])


@functools.lru_cache(maxsize=64)
def _grid(time: int, rows: int, columns: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return [N, 4] of time, row, column and token: of an image's tokens, or of a prompt's, which are in one place."""
    axes = [torch.tensor([time]), *(torch.arange(length) for length in (rows, columns, tokens))]
    return torch.cartesian_prod(*axes).to(device)
