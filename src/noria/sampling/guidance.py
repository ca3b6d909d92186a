"""How the outputs for a prompt and for its negative prompt become one output. This module imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance as a family of models uses it (Ho and Salimans, 2022).

    With c and u, the outputs for the prompt and for the negative prompt, and the request's scale g, the output is
    u + g·(c - u) for "uncond" (eq. 6 with g = 1 + w), and c + g·(c - u) for "cond".
    """

    form: Literal["uncond", "cond"] = "uncond"
    active_above: float = 1.0  # a request with this scale or less has no row for its negative prompt
    rescale: float = 0.0  # φ of Lin et al. (2024), eq. 16: how much of the output's deviation becomes that of c
    norm_limit: float = 0.0  # the output's norm is at most this times that of c (`cfg_normalization`); 0: no limit
    # The norms of these parts of the output become those of c: patches of 2 × 2 latents, or lines of each channel.
    equal_norms: Literal["", "patches", "lines"] = ""
    embedded: bool = False  # the model takes the scale itself, in one row, and no negative prompt
    # What a request without a negative prompt has instead; "unguided": no second row, whatever its scale.
    negative_absent: Literal["empty", "zeros", "unguided"] = "empty"
    prompt_prefix: str = ""  # precedes prompts, but not negative ones

    def is_active(self, scale: float, negative_prompt: str | None) -> bool:
        """Whether an image with this scale and this negative prompt needs a second row in each model call."""
        is_wanted = negative_prompt is not None or self.negative_absent != "unguided"
        return is_wanted and scale > self.active_above and not self.embedded

    def negative(self, prompt: str | None) -> str | None:
        """Return the negative prompt to encode; None: zeros, or there is none."""
        return "" if prompt is None and self.negative_absent == "empty" else prompt

    def combine(
        self, cond_BCHW: "torch.Tensor", uncond_BCHW: "torch.Tensor", scale_B: "torch.Tensor"
    ) -> "torch.Tensor":
        """Return the guided outputs in float32.

        An unguided image passes its output as both, with the scale `active_above`, and the result equals it exactly.
        """
        cond_BCHW, uncond_BCHW = cond_BCHW.float(), uncond_BCHW.float()
        scale_B111 = scale_B[:, None, None, None]
        origin_BCHW = uncond_BCHW if self.form == "uncond" else cond_BCHW
        guided_BCHW = origin_BCHW + scale_B111 * (cond_BCHW - uncond_BCHW)
        if not self.rescale and not self.norm_limit and not self.equal_norms:
            return guided_BCHW
        axes = tuple(range(1, guided_BCHW.ndim))
        if self.equal_norms == "patches":
            cond, guided = _patches(cond_BCHW), _patches(guided_BCHW)
            rescaled_BCHW = (guided * (_norm(cond, (1, 3, 5)) / _norm(guided, (1, 3, 5)))).reshape_as(guided_BCHW)
        elif self.equal_norms:
            rescaled_BCHW = guided_BCHW * (_norm(cond_BCHW, (3,)) / _norm(guided_BCHW, (3,)))
        elif self.norm_limit:
            ratio_B111 = self.norm_limit * _norm(cond_BCHW, axes) / _norm(guided_BCHW, axes)
            rescaled_BCHW = guided_BCHW * ratio_B111.clamp(max=1.0)
        else:
            ratio_B111 = cond_BCHW.std(axes, keepdim=True) / guided_BCHW.std(axes, keepdim=True)
            rescaled_BCHW = self.rescale * (guided_BCHW * ratio_B111) + (1 - self.rescale) * guided_BCHW
        return rescaled_BCHW.where(scale_B111 > self.active_above, guided_BCHW)


def _norm(outputs: "torch.Tensor", axes: tuple[int, ...]) -> "torch.Tensor":
    return outputs.square().sum(axes, keepdim=True).sqrt()


def _patches(outputs_BCHW: "torch.Tensor") -> "torch.Tensor":
    """Return [B, C, H / 2, 2, W / 2, 2]."""
    height, width = outputs_BCHW.shape[2:]
    return outputs_BCHW.reshape(*outputs_BCHW.shape[:2], height // 2, 2, width // 2, 2)


CLASSIFIER_FREE = Guidance()
"""The guidance of Stable Diffusion."""
