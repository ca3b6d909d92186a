"""Z-Image on one device: a language model's tokens and latents in one sequence of a transformer, whose rows are ragged.

As the other families, without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on the hidden states before Qwen3's last layer, `caption` [T, D], of a prompt in a chat of one message.
- Rows of a call have different sizes of images and lengths of prompts; the transformer pads and masks them itself.
- It predicts the velocity from the image to the noise, with its sign turned, at a time that runs from 0 to 1.
- Guidance is c + g·(c - u), active above 0.
- The start is drawn in float32, whatever the model's dtype.

Shapes: B images, R rows (two for a guided image), T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Sequence

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.diffusion_model import LatentRows
from noria.models.diffusion.folders.transformer_models.transformer_folder import MAX_PROMPT_TOKENS
from noria.models.diffusion.transformer_models.transformer_model import (
    QWEN_CHAT,
    TRAIN_STEPS,
    TransformerModel,
    TransformerParts,
)
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule, shift_of_length


class ZImage(TransformerModel):
    """The parts of one ZImagePipeline folder, ready on a device."""

    transformer_class = "ZImageTransformer2DModel"
    text_classes = (("Qwen2Tokenizer", "Qwen3Model"),)
    pads_right = True

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config, Guidance("cond", active_above=0.0, norm_limit=parts.spec.cfg_normalization))
        self.noise_dtype = torch.float32

    def call_size(self, num_pixels: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same for all sizes, which share calls."""
        return 0, 0

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly spaced noise levels, and the shift of the size if the scheduler's configuration wants one."""
        sigmas = tuple(torch.linspace(1.0, 1 / num_steps, num_steps).tolist())  # in float32, as the pipeline
        if not self.scheduler_config.get("use_dynamic_shifting"):
            return Schedule(sigmas)
        return Schedule(sigmas, mu=shift_of_length(self.num_tokens(width_px, height_px), self.scheduler_config))

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, truncated as by diffusers' `encode_prompt`, without padding."""
        chats = [QWEN_CHAT.format("" if prompt is None else prompt) for prompt in prompts]
        tokens = self._tokenizer(
            chats, padding=True, max_length=MAX_PROMPT_TOKENS, truncation=True, return_tensors="pt"
        )
        outputs = self._text_outputs(tokens, output_hidden_states=True, use_cache=False)
        return self._without_padding(outputs.hidden_states[-2], tokens, name="caption")

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> LatentRows:
        """Return the velocity of each row, of the row's shape; rows can have different sizes."""
        captions = conditioning.tokens["caption"]
        outputs = self._transformer(
            [latents_CHW.to(self.dtype)[:, None] for latents_CHW in latents_R],  # with one frame
            (TRAIN_STEPS - timesteps_R) / TRAIN_STEPS,
            [captions[row, :length] for row, length in enumerate(conditioning.lengths)],
            return_dict=False,
        )[0]
        velocities = [-output_CFHW[:, 0].float() for output_CFHW in outputs]
        return torch.stack(velocities) if isinstance(latents_R, torch.Tensor) else velocities
