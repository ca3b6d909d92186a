"""FLUX.1 (dev, schnell, Kontext) on one device: a transformer that predicts the velocity of packed latents.

Without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on 512 tokens of T5, padding included, and on the pooled output of CLIP.
- Blocks of 2 × 2 latents are the transformer's tokens; here latents stay [C, H, W], and are packed for its call.
- The steps' noise levels fall evenly from 1, and the scheduler shifts them by the image's size.
- dev takes the guidance scale itself, in one row; schnell takes none. Neither takes a negative prompt.
- Fill takes a start image and a mask: of each latent the latents of what is kept and all pixels of the mask.
- Kontext is shown a reference image: its latents follow the image's, with 1 as the first coordinate of positions. Its
  pipelines give noise levels to all schedulers, and encode a start image to the mean.
- IP-Adapters add what an image says to the outputs of the first blocks, see `ip_adapter.py`.
- Rows with nearly as many tokens share a call, whatever their sizes and references, see `token_rows.py`.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size, N = H / 2 · W / 2 tokens of an
image, M of references, D numbers of a token.
"""

import functools
from collections.abc import Sequence
from typing import Self

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, ReferenceTokens
from noria.models.diffusion.diffusion_model import InpaintingInput, LatentRows
from noria.models.diffusion.folders.transformer_models.flux_folder import KONTEXT
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH
from noria.models.diffusion.ip_adapter import IpAdapters, load_ip_adapters
from noria.models.diffusion.part_loading import loading
from noria.models.diffusion.transformer_models.patches import from_tokens, positions, to_tokens
from noria.models.diffusion.transformer_models.token_row_model import TokenRowModel
from noria.models.diffusion.transformer_models.token_rows import Sizes
from noria.models.diffusion.transformer_models.transformer_model import TransformerParts, text_outputs
from noria.models.diffusion.vae import LatentDistribution
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule

_MAX_TOKENS = 512  # tokens of T5: the pipeline's default, for schnell too


class Flux(TokenRowModel):
    """The parts of one FluxPipeline folder, ready on a device."""

    patch = PATCH
    transformer_class = "FluxTransformer2DModel"
    text_classes = (("CLIPTokenizer", "CLIPTextModel"), ("T5TokenizerFast", "T5EncoderModel"))

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        transformer = parts.transformer
        super().__init__(parts, config, Guidance(embedded=True), transformer.out_channels // PATCH**2)
        self._is_kontext = parts.spec.pipeline == KONTEXT
        self._clip, self._t5 = parts.text_encoders
        self.lora_parts = {"transformer": transformer, "text_encoder": self._clip[1], "text_encoder_2": self._t5[1]}
        if transformer.config.in_channels != transformer.out_channels:
            self.inpainting = InpaintingInput(self.latent_scale**2, mask_is_first=False, always_has_start=True)
        self._takes_guidance: bool = transformer.config.guidance_embeds
        self.ip_adapters = IpAdapters({}, transformer, has_compiled_blocks=False)

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> Self:
        """Read the parts of `spec.folder`, and the IP-Adapters that fit them, onto `device`; raises as the others."""
        model = super().load(spec, config, device)
        with loading(spec):
            model.ip_adapters = load_ip_adapters(spec, model._transformer, config, device)
        return model

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly falling sigmas, of Kontext for all schedulers, and a shift by the number of tokens."""
        return self._shifted_schedule(width_px, height_px, num_steps, gives_flow_sigmas=self._is_kontext)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, as by diffusers' `encode_prompt`."""
        texts = ["" if prompt is None else prompt for prompt in prompts]
        pooled_BP = text_outputs(self._clip, texts, self._clip[0].model_max_length)[0].pooler_output
        outputs, num_cut = text_outputs(self._t5, texts, _MAX_TOKENS)
        tokens_BTD = outputs.last_hidden_state
        return self._conditioned(tokens_BTD, num_cut, {"pooled_projections": pooled_BP})

    def encode(self, pixels_BHW3: torch.Tensor) -> LatentDistribution:
        """Return the latents of start images, of Kontext their mean, so that no noise is drawn."""
        found = super().encode(pixels_BHW3)
        return LatentDistribution(found.mean_BCHW, None) if self._is_kontext else found

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
        references: Sequence[ReferenceTokens | None] = (),
    ) -> LatentRows:
        """Return the velocity of each row, as `TokenRowModel.predict`; schnell ignores the scales."""
        scales_R = guidance_R if self._takes_guidance else None
        return super().predict(latents_R, timesteps_R, conditioning, scales_R, references)

    def _to_tokens(self, latents_RCHW: torch.Tensor) -> torch.Tensor:
        return to_tokens(latents_RCHW.to(self.dtype))

    def _from_tokens(self, tokens_RND: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return from_tokens(tokens_RND, height, width)

    def _positions(self, size: tuple[int, int], reference_sizes: Sizes) -> torch.Tensor:
        return _row_positions(size, reference_sizes, self.device, self.dtype)

    def _text_positions(self, num_tokens: int) -> torch.Tensor:
        return positions(num_tokens, 0, self.device, self.dtype)


@functools.lru_cache(maxsize=64)
def _row_positions(
    size: tuple[int, int], reference_sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return [N + M, 3] of an image and of its references, of H × W latents."""
    parts = [positions(height // PATCH, width // PATCH, device, dtype) for height, width in (size, *reference_sizes)]
    if not reference_sizes:
        return parts[0]
    of_references_M3 = torch.cat(parts[1:])
    of_references_M3[:, 0] = 1
    return torch.cat([parts[0], of_references_M3])
