"""Finds the tensors of a VAE and of CLIP's text encoders in a checkpoint, and says what each is in the libraries.

A VAE has the names of CompVis or, in a file of its own, those of diffusers. CLIP's are those of transformers, with or
without `text_model.`, or those of OpenCLIP, which has the three matrices of attention in one.
"""

from collections.abc import Container
from typing import NamedTuple


class Pieces(NamedTuple):
    """Rows of a tensor that is cut into `num_pieces` of as many rows: those `taken`, in this order."""

    num_pieces: int
    taken: tuple[int, ...]


class Origin(NamedTuple):
    """The tensor of a file that a tensor of a part is made of."""

    name: str
    pieces: Pieces | None = None  # only these of its rows
    is_matrix: bool = False  # a convolution of one pixel that becomes a matrix, with the same numbers
    is_transposed: bool = False


Origins = dict[str, Origin]
"""Origins of a part's tensors, by their names in the part."""


class VaeTensors(NamedTuple):
    """The tensors that a VAE has, if none is missing."""

    origins: Origins
    down_starts: list[str]  # name in the file of the first convolution of each block
    num_layers: int
    latent: str  # name in the file of the decoder's first convolution


_VAE_RESNET = ("norm1", "conv1", "norm2", "conv2")
_VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_VAE_OUTER = {
    **{f"{coder}.{name}": f"{coder}.{name}" for coder in ("encoder", "decoder") for name in ("conv_in", "conv_out")},
    **{f"{coder}.norm_out": f"{coder}.conv_norm_out" for coder in ("encoder", "decoder")},
}
_QUANT_CONVOLUTIONS = ("quant_conv", "post_quant_conv")


def find_vae_tensors(present: Container[str], *, has_quant_convolutions: bool = True) -> VaeTensors:
    """Return what a VAE in CompVis' names needs by the names that are `present`."""
    found: Origins = {}
    for module, target in _VAE_OUTER.items():
        _add(found, module, target)
    for module in _QUANT_CONVOLUTIONS if has_quant_convolutions else ():
        _add(found, module, module)
    num_blocks = _count("encoder.down.{}.block.0.conv1.weight", present)
    num_layers = _count("encoder.down.0.block.{}.conv1.weight", present)
    for coder in ("encoder", "decoder"):
        for number, target in enumerate(("resnets.0", "resnets.1"), 1):
            _add_vae_resnet(found, present, f"{coder}.mid.block_{number}", f"{coder}.mid_block.{target}")
        _add_vae_attention(found, coder)
    for block in range(num_blocks):
        down, up = f"encoder.down.{block}", f"decoder.up.{num_blocks - 1 - block}"
        for layer in range(num_layers):
            _add_vae_resnet(found, present, f"{down}.block.{layer}", f"encoder.down_blocks.{block}.resnets.{layer}")
        for layer in range(num_layers + 1):
            _add_vae_resnet(found, present, f"{up}.block.{layer}", f"decoder.up_blocks.{block}.resnets.{layer}")
        if block < num_blocks - 1:
            _add(found, f"{down}.downsample.conv", f"encoder.down_blocks.{block}.downsamplers.0.conv")
            _add(found, f"{up}.upsample.conv", f"decoder.up_blocks.{block}.upsamplers.0.conv")
    starts = [f"encoder.down.{block}.block.0.conv1.weight" for block in range(num_blocks)]
    return VaeTensors(found, starts, num_layers, "decoder.conv_in.weight")


def find_diffusers_vae_tensors(present: Container[str]) -> VaeTensors:
    """Return likewise those of a VAE in diffusers' names, which it keeps."""
    num_blocks = _count("encoder.down_blocks.{}.resnets.0.conv1.weight", present)
    num_layers = _count("encoder.down_blocks.0.resnets.{}.conv1.weight", present)
    starts = [f"encoder.down_blocks.{block}.resnets.0.conv1.weight" for block in range(num_blocks)]
    return VaeTensors({}, starts, num_layers, "decoder.conv_in.weight")


def _add_vae_resnet(found: Origins, present: Container[str], module: str, target: str) -> None:
    for inner in _VAE_RESNET:
        _add(found, f"{module}.{inner}", f"{target}.{inner}")
    if f"{module}.nin_shortcut.weight" in present:
        _add(found, f"{module}.nin_shortcut", f"{target}.conv_shortcut")


def _add_vae_attention(found: Origins, coder: str) -> None:
    for inner, name in _VAE_ATTENTION.items():
        module, target = f"{coder}.mid.attn_1.{inner}", f"{coder}.mid_block.attentions.0.{name}"
        found[f"{target}.weight"] = Origin(f"{module}.weight", is_matrix=inner != "norm")
        found[f"{target}.bias"] = Origin(f"{module}.bias")


class ClipTensors(NamedTuple):
    """The tensors that a text encoder has, if none is missing."""

    origins: Origins
    num_layers: int  # layers in the file
    tokens: str  # names in the file of some tensors
    positions: str
    feed_forward: str
    projection: str | None = None


_CLIP_LAYER = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"
)  # fmt: skip


def find_clip_tensors(present: Container[str]) -> ClipTensors:
    """Return what a text encoder in transformers' names needs by the names that are `present`."""
    tokens = "embeddings.token_embedding.weight"
    inner = "" if tokens in present else "text_model."  # NovelAI's checkpoints and others lack it
    layer = f"{inner}encoder.layers"
    num_layers = _count(f"{layer}.{{}}.layer_norm1.weight", present)
    names = [f"embeddings.{each}_embedding.weight" for each in ("token", "position")]
    modules = ["final_layer_norm"]
    modules += [f"encoder.layers.{number}.{name}" for number in range(num_layers) for name in _CLIP_LAYER]
    names += [f"{module}.{each}" for module in modules for each in ("weight", "bias")]
    origins = {f"text_model.{name}": Origin(f"{inner}{name}") for name in names}
    positions = f"{inner}embeddings.position_embedding.weight"
    return ClipTensors(origins, num_layers, f"{inner}{tokens}", positions, f"{layer}.0.mlp.fc1.weight")


SD2_LAYERS = 23  # that it reads of OpenCLIP's 24; files of diffusers' script have no more

_OPEN_CLIP_LAYER = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def find_open_clip_tensors(present: Container[str], *, has_projection: bool) -> ClipTensors:
    """Return likewise of one in OpenCLIP's names; without `has_projection` with the layers that SD 2 reads."""
    num_layers = _count("transformer.resblocks.{}.ln_1.weight", present)
    tokens, positions = "token_embedding.weight", "positional_embedding"
    found = {
        "text_model.embeddings.token_embedding.weight": Origin(tokens),
        "text_model.embeddings.position_embedding.weight": Origin(positions),
    }
    _add(found, "ln_final", "text_model.final_layer_norm")
    for layer in range(num_layers if has_projection else min(num_layers, SD2_LAYERS)):
        module, target = f"transformer.resblocks.{layer}", f"text_model.encoder.layers.{layer}"
        for inner, name in _OPEN_CLIP_LAYER.items():
            _add(found, f"{module}.{inner}", f"{target}.{name}")
        for each in ("weight", "bias"):
            for third, name in enumerate("qkv"):
                pieces = Pieces(3, (third,))
                found[f"{target}.self_attn.{name}_proj.{each}"] = Origin(f"{module}.attn.in_proj_{each}", pieces)
    projection = None
    if has_projection:
        is_layer = "text_projection.weight" in present  # the transpose of the matrix that text_projection is
        projection = "text_projection.weight" if is_layer else "text_projection"
        found["text_projection.weight"] = Origin(projection, is_transposed=not is_layer)
    return ClipTensors(found, num_layers, tokens, positions, "transformer.resblocks.0.mlp.c_fc.weight", projection)


def _add(found: Origins, module: str, target: str) -> None:
    for each in ("weight", "bias"):
        found[f"{target}.{each}"] = Origin(f"{module}.{each}")


def _count(pattern: str, present: Container[str]) -> int:
    """Return how many of the names that a pattern makes of 0, 1, 2 … are present without a gap."""
    number = 0
    while pattern.format(number) in present:
        number += 1
    return number
