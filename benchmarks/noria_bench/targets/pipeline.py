"""The baseline of the server: the same model in diffusers' pipeline and in a bare loop, in this process."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image

from noria.config import EngineConfig
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto, resolve_device
from noria.images import scheduler_names
from noria.models.adapters.lora_folders import LoraFolders
from noria.models.diffusion.unet_models.unet import set_attention
from noria.protocol.diffusion import DiffusionModelSpec, Lora


class Pipeline:
    """diffusers' StableDiffusionPipeline with the engine's settings: dtype, memory format, attention, scheduler."""

    def __init__(self, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> None:
        """Load it on `device`; no setting of `config` may be "auto"."""
        import diffusers
        import transformers

        for library in (diffusers, transformers):
            library.utils.logging.set_verbosity_error()
            library.utils.logging.disable_progress_bar()
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
        self.pipe: Any = diffusers.StableDiffusionPipeline.from_pretrained(
            spec.folder, dtype=dtype, safety_checker=None
        )
        self._scheduler_config = dict(self.pipe.scheduler.config)
        self._lora_folders, self._loras, self._model = LoraFolders.of(config), set[str](), spec.name
        self.use_scheduler(spec.default_scheduler)
        self.pipe.to(device)
        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.pipe.unet.to(memory_format=memory_format)
        self.pipe.vae.to(memory_format=memory_format)
        set_attention(self.pipe.unet, config.attention)
        if config.compile:
            self.pipe.unet = torch.compile(self.pipe.unet, dynamic=False)
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        self.pipe.set_progress_bar_config(disable=True)

    def use_scheduler(self, name: str) -> None:
        """Use the scheduler of this name, created from the model's own configuration."""
        import diffusers

        choice = scheduler_names.find(name)
        scheduler_class = getattr(diffusers, choice.diffusers_class)
        self.pipe.scheduler = scheduler_class.from_config(self._scheduler_config, **choice.overrides)

    def use_loras(self, weights: Mapping[str, float]) -> None:
        """Apply these LoRAs, by peft, to all images until the next call; each file is read once."""
        for name in weights.keys() - self._loras:
            self.pipe.load_lora_weights(self._lora_folders.find(Lora(name, 1.0), self._model), adapter_name=name)
            self._loras.add(name)
        if weights:
            self.pipe.enable_lora()
            self.pipe.set_adapters(list(weights), list(weights.values()))
        elif self._loras:
            self.pipe.disable_lora()

    @torch.inference_mode()
    def call(
        self, images: list[Image.Image] | None, strength: float | None, size: tuple[int, int], **options: Any
    ) -> Any:
        """Return PIL images, by the call for start images if there are some, which has the same parts."""
        if images is None:
            return self.pipe(**options, width=size[0], height=size[1]).images
        import diffusers

        pipe = diffusers.StableDiffusionImg2ImgPipeline(**self.pipe.components, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
        return pipe(**options, image=images, strength=strength).images

    @torch.inference_mode()
    def generate(self, prompt: str, num_steps: int, guidance_scale: float) -> Any:
        """Return one PIL image, by the pipeline's own call."""
        generator = torch.Generator("cpu").manual_seed(1)
        (image,) = self.pipe(
            prompt, num_inference_steps=num_steps, guidance_scale=guidance_scale, generator=generator
        ).images
        return image

    @torch.inference_mode()
    def generate_batch(self, prompts: list[str], num_steps: int, guidance_scale: float) -> torch.Tensor:
        """The shortest loop: encode, step all rows together with diffusers' scheduler, decode.

        Returns uint8 [B, H, W, 3].
        """
        pipe, batch = self.pipe, len(prompts)
        size = pipe.unet.config.sample_size
        tokens = pipe.tokenizer([""] * batch + prompts, padding="max_length", return_tensors="pt").input_ids
        text = pipe.text_encoder(tokens.to(pipe.device))[0]
        seeded = [torch.Generator().manual_seed(k) for k in range(batch)]
        noise = [torch.randn(4, size, size, generator=generator, dtype=text.dtype) for generator in seeded]
        pipe.scheduler.set_timesteps(num_steps)
        latents = torch.stack(noise).to(pipe.device) * pipe.scheduler.init_noise_sigma
        for t in pipe.scheduler.timesteps:
            rows = pipe.scheduler.scale_model_input(torch.cat([latents, latents]), t)
            negative, prompted = pipe.unet(rows, t, encoder_hidden_states=text, return_dict=False)[0].chunk(2)
            guided = negative + guidance_scale * (prompted - negative)
            latents = pipe.scheduler.step(guided, t, latents, return_dict=False)[0]
        images: torch.Tensor = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
        return ((images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1) * 255).round().to(torch.uint8).cpu()


def load_pipeline(spec: DiffusionModelSpec, config: EngineConfig) -> tuple[Pipeline, EngineConfig]:
    """Load the pipeline on the first device; return it and the settings without "auto", whose threads torch now has."""
    machine = detect_machine()
    device = resolve_device(config.devices[0], machine)
    settings = resolve_auto(config, spec, device, machine)
    assert isinstance(settings.threads, int)
    torch.set_num_threads(settings.threads)
    return Pipeline(spec, settings, device), settings


def time_calls(num_calls: int, function: Any) -> list[float]:
    """Seconds of each of `num_calls` calls, after an untimed one."""
    function()
    seconds = []
    for _ in range(num_calls):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds
