"""A toy model, not linear, so that an error in a sample comes back in all that follow; and configs of schedulers."""

import math

import torch

STABLE_DIFFUSION = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.42.1",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
EDM = {"_class_name": "EDMEulerScheduler", "sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5}
CONFIGS = {"diffusion": STABLE_DIFFUSION, "flow": FLOW, "edm": EDM}

SHAPE_CHW = (4, 8, 8)
IMAGE = torch.linspace(-1.5, 1.5, math.prod(SHAPE_CHW)).sin().reshape(SHAPE_CHW)


def toy_model(inputs_BCHW: torch.Tensor, timesteps_B: torch.Tensor) -> torch.Tensor:
    """Bounded and smooth, like a denoiser's output; mixes channels and pixels, and heeds the timestep."""
    phase = torch.cos(timesteps_B / 300.0)[:, None, None, None]
    mixed = 0.7 * inputs_BCHW + 0.3 * inputs_BCHW.roll(1, -1) - 0.2 * inputs_BCHW.flip(1)
    return torch.tanh(mixed + 0.3 * phase)
