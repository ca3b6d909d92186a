"""Sana on one device: a transformer with linear attention, and latents of 32 × 32 pixels.

Without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on the output of Gemma 2 for a prompt in lower case. An instruction to describe an image in more detail
  precedes prompts, not negative ones, and then of its outputs only the first and the last are kept.
- Rows of a call have different lengths of prompts, which the transformer masks. The pipeline pads all to 300.
- The start of an image is drawn in float32, whatever the transformer's precision.
- The scheduler sets the steps' noise levels itself, with the shift of its configuration.
- Models with twice as many channels of output also predict a variance, which is not used.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Sequence

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, num_cut_of
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel, TransformerParts
from noria.sampling.guidance import Guidance

MAX_TOKENS = 300
"""The most tokens of a prompt, the pipeline's default; longer ones are cut."""

_INSTRUCTION = (
    "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for image "
    "generation. Evaluate the level of detail in the user prompt:\n"
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
    "relationships to create vivid and concrete scenes.\n"
    "- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.\n"
    "Here are examples of how to transform or refine prompts:\n"
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
    "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.\n"
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
    "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
    "skyscrapers.\n"
    "Please generate only the enhanced description for the prompt below and avoid including any additional commentary "
    "or evaluations:\n"
    "User Prompt: "
)
"""The pipeline's default, with which its authors trained Sana: the words are an input of the model."""


class Sana(TransformerModel):
    """The parts of one SanaPipeline folder, ready on a device."""

    transformer_class = "SanaTransformer2DModel"
    text_classes = (("GemmaTokenizer", "Gemma2Model"),)
    pads_right = True

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config, Guidance(prompt_prefix=_INSTRUCTION))
        self.noise_dtype = torch.float32
        self._timestep_scale: float = parts.transformer.config.timestep_scale
        self._num_instruction_tokens = len(self._tokenizer(_INSTRUCTION).input_ids)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, cut as by diffusers' `encode_prompt`, without padding.

        A text that begins with the instruction is a prompt, others are negative prompts.
        """
        ids_B, starts, num_cut = [], [], []
        for prompt in prompts:
            text = "" if prompt is None else prompt
            instruction = _INSTRUCTION if text.startswith(_INSTRUCTION) else ""
            start = self._num_instruction_tokens - 1 if instruction else 1  # index of the second token that is kept
            text = instruction + text.removeprefix(instruction).lower().strip()
            cut = self._tokenizer([text], max_length=start + MAX_TOKENS - 1, truncation=True)
            ids_B += cut.input_ids
            num_cut += num_cut_of(cut)
            starts.append(start)
        tokens = self._tokenizer.pad({"input_ids": ids_B}, return_tensors="pt")
        outputs_BTD = self._text_outputs(tokens, use_cache=False)[0].to(self.device, self.dtype)
        return [
            Conditioning(
                {"encoder_hidden_states": torch.cat([output_TD[:1], output_TD[start : len(ids)]])}, num_cut=cut
            )
            for output_TD, start, ids, cut in zip(outputs_BTD, starts, ids_B, num_cut, strict=True)
        ]

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> torch.Tensor:
        """Return the velocity [R, C, H, W]."""
        outputs = self._transformer(
            latents_RCHW.to(self.dtype),
            timestep=timesteps_R * self._timestep_scale,
            encoder_attention_mask=conditioning.mask_RT,
            **conditioning.tokens,
            return_dict=False,
        )
        velocity_RCHW: torch.Tensor = outputs[0][:, : self._latent_channels]
        return velocity_RCHW
