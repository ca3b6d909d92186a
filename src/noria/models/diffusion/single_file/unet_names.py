"""Finds the tensors of a UNet in the names of CompVis and Stability AI, and says the name of each in diffusers.

input_blocks.N.0     conv_in, a resnet, or the downsampler at the end of a block of `down_blocks`
input_blocks.N.1     the transformer behind that resnet
middle_block.0 .1 .2 resnet, transformer, resnet of `mid_block`
output_blocks.N.0    a resnet, .1 its transformer, and the last one the upsampler of a block of `up_blocks`
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

_OUTER = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_ADDED = {"label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2"}
_GUIDANCE = "time_embed.cond_proj.weight"
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
}
_SHORTCUT = ("skip_connection", "conv_shortcut")  # only of a resnet that changes the number of channels
_WITH_BIAS = ("norm1", "norm2", "norm3", "attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2")
_WITHOUT_BIAS = tuple(f"attn{number}.to_{matrix}" for number in (1, 2) for matrix in "qkv")


@dataclass
class UnetTensors:
    """The tensors that a UNet has, if none is missing, and how its layers are arranged."""

    names: dict[str, str] = field(default_factory=dict)  # names in the file by those in diffusers
    # By block the number of layers of each transformer, 0 where a resnet has none.
    down_depths: list[list[int]] = field(default_factory=list)
    mid_depth: int = 0
    up_depths: list[list[int]] = field(default_factory=list)
    down_starts: list[str] = field(default_factory=list)  # name of the first convolution of each block


def find_unet_tensors(present: Container[str]) -> UnetTensors:
    """Return what a UNet needs by the names that are `present`; it may need others, which are then missing."""
    found = UnetTensors()
    for module, target in _OUTER.items():
        _add(found, module, target)
    if "label_emb.0.0.weight" in present:
        for module, target in _ADDED.items():
            _add(found, module, target)
    if _GUIDANCE in present:
        found.names["time_embedding.cond_proj.weight"] = _GUIDANCE
    _find_down_blocks(found, present)
    _add_resnet(found, present, "middle_block.0", "mid_block.resnets.0")
    _add_resnet(found, present, "middle_block.2", "mid_block.resnets.1")
    found.mid_depth = _add_transformer(found, present, "middle_block.1", "mid_block.attentions.0")
    _find_up_blocks(found, present)
    return found


def _find_down_blocks(found: UnetTensors, present: Container[str]) -> None:
    number, begins = 1, True
    while True:
        module = f"input_blocks.{number}"
        if f"{module}.0.op.weight" in present:
            _add(found, f"{module}.0.op", f"down_blocks.{len(found.down_depths) - 1}.downsamplers.0.conv")
            begins = True
        elif f"{module}.0.in_layers.0.weight" in present:
            if begins:
                found.down_depths.append([])
                found.down_starts.append(f"{module}.0.in_layers.2.weight")
                begins = False
            depths, target = found.down_depths[-1], f"down_blocks.{len(found.down_depths) - 1}"
            _add_resnet(found, present, f"{module}.0", f"{target}.resnets.{len(depths)}")
            depths.append(_add_transformer(found, present, f"{module}.1", f"{target}.attentions.{len(depths)}"))
        else:
            return
        number += 1


def _find_up_blocks(found: UnetTensors, present: Container[str]) -> None:
    number, begins = 0, True
    while f"output_blocks.{number}.0.in_layers.0.weight" in present:
        module = f"output_blocks.{number}"
        if begins:
            found.up_depths.append([])
        depths, target = found.up_depths[-1], f"up_blocks.{len(found.up_depths) - 1}"
        _add_resnet(found, present, f"{module}.0", f"{target}.resnets.{len(depths)}")
        depths.append(_add_transformer(found, present, f"{module}.1", f"{target}.attentions.{len(depths)}"))
        upsampler = f"{module}.{2 if depths[-1] else 1}.conv"
        begins = f"{upsampler}.weight" in present
        if begins:
            _add(found, upsampler, f"{target}.upsamplers.0.conv")
        number += 1


def _add(found: UnetTensors, module: str, target: str) -> None:
    for each in ("weight", "bias"):
        found.names[f"{target}.{each}"] = f"{module}.{each}"


def _add_resnet(found: UnetTensors, present: Container[str], module: str, target: str) -> None:
    for inner, name in _RESNET.items():
        _add(found, f"{module}.{inner}", f"{target}.{name}")
    if f"{module}.{_SHORTCUT[0]}.weight" in present:
        _add(found, f"{module}.{_SHORTCUT[0]}", f"{target}.{_SHORTCUT[1]}")


def _add_transformer(found: UnetTensors, present: Container[str], module: str, target: str) -> int:
    """Add a transformer, if there is one; return the number of its layers."""
    layers = list(_layers_of(module, present))
    if not layers:
        return 0
    for outer in ("norm", "proj_in", "proj_out"):
        _add(found, f"{module}.{outer}", f"{target}.{outer}")
    for layer in layers:
        for inner in _WITH_BIAS:
            _add(found, f"{module}.{layer}.{inner}", f"{target}.{layer}.{inner}")
        for inner in _WITHOUT_BIAS:
            found.names[f"{target}.{layer}.{inner}.weight"] = f"{module}.{layer}.{inner}.weight"
    return len(layers)


def _layers_of(module: str, present: Container[str]) -> Iterator[str]:
    number = 0
    while f"{module}.transformer_blocks.{number}.norm1.weight" in present:
        yield f"transformer_blocks.{number}"
        number += 1
