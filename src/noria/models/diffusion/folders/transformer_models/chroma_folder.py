"""Checks and describes a folder of Chroma: T5 with its tokenizer, transformer, vae, scheduler."""

import pathlib

from noria.models.diffusion.folders.pipeline_folder import Count, VaeConfig
from noria.models.diffusion.folders.transformer_models.flux_folder import packed_sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import PackedTransformer, TransformerFolder
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

# diffusers' pipeline gives all others noise levels: UniPC other ones than it does for FLUX.1, and the rest take none.
_SCHEDULERS = ("flow-euler",)


class _Transformer(PackedTransformer, frozen=True):
    axes_dims_rope: tuple[Count, Count, Count] = (16, 56, 56)
    approximator_num_channels: Count = 64


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    folder.read_flow_scheduler()
    t5, vae = folder.read_t5(), folder.read_part("vae", VaeConfig)
    transformer = folder.read_part("transformer", _Transformer)
    folder.check_packed(transformer, vae, t5.d_model, "d_model of text_encoder")
    guidance = {"approximator_num_channels": (1, transformer.approximator_num_channels)}
    folder.check_layer("transformer", ("distilled_guidance_layer.in_proj.weight",), guidance)
    return folder.make_spec(packed_sides(vae), _SCHEDULERS, steps=35, guidance=5.0)
