"""Says by names whether a file has a transformer, of which family, and which tensor becomes which of diffusers' layers.

A file has the author's names, of which `../author_layers.py` has the table, or diffusers'; both can have a prefix.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from noria.errors import ModelError, short_repr
from noria.models.diffusion.author_layers import authors_layers
from noria.models.diffusion.single_file.part_names import Origin, Origins, Pieces
from noria.models.diffusion.single_file.stored_numbers import BESIDE_LAYERS

_MAX_BLOCKS = 256  # blocks of one kind; published models have at most 60
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "")

# Layers in diffusers' names, by block. With * a layer has no bias; with ? not every model of the family has it.
_NORMS = "attn.norm_q* attn.norm_k*"
_QKV = "attn.to_q attn.to_k attn.to_v"
_ADDED = "attn.add_q_proj attn.add_k_proj attn.add_v_proj"
_JOINT = f"{_QKV} {_ADDED} attn.to_out.0 attn.norm_q* attn.norm_k* attn.norm_added_q* attn.norm_added_k*"
_FEED_FORWARD = "ff.net.0.proj ff.net.2"
_FLUX_BLOCK = f"{_JOINT} attn.to_add_out {_FEED_FORWARD} ff_context.net.0.proj ff_context.net.2"
_FLUX_SINGLE = f"{_QKV} {_NORMS} proj_mlp proj_out"
_TIME = "time_text_embed.timestep_embedder.linear_1 time_text_embed.timestep_embedder.linear_2"
_POOLED = "time_text_embed.text_embedder.linear_1 time_text_embed.text_embedder.linear_2"
_GUIDANCE = "time_text_embed.guidance_embedder.linear_1? time_text_embed.guidance_embedder.linear_2?"
_Z_BLOCK = (
    "attention.to_q* attention.to_k* attention.to_v* attention.to_out.0* attention.norm_q* attention.norm_k* "
    "feed_forward.w1* feed_forward.w2* feed_forward.w3* attention_norm1* attention_norm2* ffn_norm1* ffn_norm2*"
)


@dataclass(frozen=True)
class TransformerKind:
    """A transformer that is served from a single file."""

    family: str  # a name of `FAMILIES`
    title: str
    example: str  # a folder of the hub with its other parts
    class_name: str
    signatures: tuple[tuple[str, ...], ...]  # a file that has all tensors of one of these has such a transformer
    outer: str  # layers outside blocks
    blocks: Mapping[str, str]  # layers in blocks, by the name of the blocks
    parameters: Mapping[str, str] = field(default_factory=dict)  # the author's names of tensors that are no layer's
    unused: tuple[str, ...] = ()  # tensors that diffusers has no use for
    swapped: tuple[str, ...] = ()  # layers whose shift the author has first, and diffusers the scale


KINDS = (
    TransformerKind(
        "flux",
        "FLUX.1",
        "black-forest-labs/FLUX.1-schnell",
        "FluxTransformer2DModel",
        (
            ("double_blocks.0.img_mod.lin.weight", "vector_in.in_layer.weight"),
            ("transformer_blocks.0.norm1.linear.weight", "single_transformer_blocks.0.norm.linear.weight"),
        ),
        f"x_embedder context_embedder norm_out.linear proj_out {_TIME} {_POOLED} {_GUIDANCE}",
        {
            "transformer_blocks": f"{_FLUX_BLOCK} norm1.linear norm1_context.linear",
            "single_transformer_blocks": f"{_FLUX_SINGLE} norm.linear",
        },
        swapped=("norm_out.linear",),
    ),
    TransformerKind(
        "chroma",
        "Chroma",
        "lodestones/Chroma1-HD",
        "ChromaTransformer2DModel",
        (("distilled_guidance_layer.in_proj.weight",),),
        "x_embedder context_embedder proj_out distilled_guidance_layer.in_proj distilled_guidance_layer.out_proj",
        {
            "transformer_blocks": _FLUX_BLOCK,
            "single_transformer_blocks": _FLUX_SINGLE,
            "distilled_guidance_layer.layers": "linear_1 linear_2",
            "distilled_guidance_layer.norms": "*",
        },
    ),
    TransformerKind(
        "stable-diffusion-3",
        "Stable Diffusion 3",
        "stabilityai/stable-diffusion-3.5-large",
        "SD3Transformer2DModel",
        (
            ("joint_blocks.0.x_block.attn.qkv.weight", "x_embedder.proj.weight"),
            ("transformer_blocks.0.attn.add_q_proj.weight", "pos_embed.proj.weight"),
        ),
        f"pos_embed.proj context_embedder norm_out.linear proj_out {_TIME} {_POOLED}",
        {
            "transformer_blocks": f"{_QKV} {_ADDED} attn.to_out.0 attn.norm_q*? attn.norm_k*? attn.norm_added_q*? "
            "attn.norm_added_k*? attn.to_add_out? attn2.to_q? attn2.to_k? attn2.to_v? attn2.to_out.0? attn2.norm_q*? "
            f"attn2.norm_k*? {_FEED_FORWARD} ff_context.net.0.proj? ff_context.net.2? norm1.linear norm1_context.linear"
        },
        parameters={"pos_embed.pos_embed": "pos_embed"},
        swapped=("norm_out.linear", "transformer_blocks.{last}.norm1_context.linear"),
    ),
    TransformerKind(
        "z-image",
        "Z-Image",
        "Tongyi-MAI/Z-Image-Turbo",
        "ZImageTransformer2DModel",
        (("layers.0.adaLN_modulation.0.weight", "noise_refiner.0.adaLN_modulation.0.weight"),),
        "all_x_embedder.2-1 all_final_layer.2-1.linear all_final_layer.2-1.adaLN_modulation.1 t_embedder.mlp.0 "
        "t_embedder.mlp.2 cap_embedder.0* cap_embedder.1",
        {
            "noise_refiner": f"{_Z_BLOCK} adaLN_modulation.0",
            "context_refiner": _Z_BLOCK,
            "layers": f"{_Z_BLOCK} adaLN_modulation.0",
        },
        parameters={"x_pad_token": "x_pad_token", "cap_pad_token": "cap_pad_token"},
        unused=("norm_final.weight",),
    ),
    TransformerKind(
        "qwen-image",
        "Qwen-Image",
        "Qwen/Qwen-Image",
        "QwenImageTransformer2DModel",
        (("transformer_blocks.0.img_mod.1.weight", "txt_norm.weight"),),
        f"img_in txt_in txt_norm* norm_out.linear proj_out {_TIME}",
        {
            "transformer_blocks": f"{_JOINT} attn.to_add_out img_mod.1 txt_mod.1 img_mlp.net.0.proj img_mlp.net.2 "
            "txt_mlp.net.0.proj txt_mlp.net.2"
        },
    ),
)


def find_transformer(names: Collection[str]) -> tuple[TransformerKind, str] | None:
    """Return what transformer a file with these tensors has, and the prefix of its tensors; None: it has none."""
    for prefix in _PREFIXES:
        for kind in KINDS:
            if any(all(prefix + name in names for name in signature) for signature in kind.signatures):
                return kind, prefix
    return None


def find_transformer_tensors(kind: TransformerKind, names: Collection[str]) -> Origins:
    """Return what the tensors of a transformer are made of; `names` are those in a file, without the prefix.

    Raises ModelError, which names no file: some are missing, or there are others.
    """
    layers = dict(_layers(kind, {stack: _count_blocks(kind, stack, names) for stack in kind.blocks}))
    found = _from_author(kind, layers, names)
    for target, author in kind.parameters.items():
        found[target] = Origin(target if target in names else author)
    missing = []
    for layer, marks in layers.items():
        for end in ("weight",) if "*" in marks else ("weight", "bias"):
            target = f"{layer}.{end}"
            if target not in found and (name := _same_name(layer, end, names)):
                found[target] = Origin(name)
            elif target not in found and "?" not in marks:
                missing.append(target)
    if missing:
        raise ModelError(
            f"{len(missing)} tensors of {kind.title} are missing, the first is {missing[0]} in diffusers' names. Take "
            "a complete file."
        )
    used = {origin.name for origin in found.values()}
    ignored = (*BESIDE_LAYERS, *kind.unused)
    if unknown := sorted(name for name in names if name not in used and not name.endswith(ignored)):
        raise ModelError(
            f"it has {len(unknown)} tensors that no {kind.title} has, the first is {short_repr(unknown[0])}: another "
            "model, or a file with parts that are not served."
        )
    return found


def _count_blocks(kind: TransformerKind, stack: str, names: Collection[str]) -> int:
    """Return how many blocks there are of a kind, without a gap, in diffusers' names or the author's, up to a limit."""
    first = [name for name, _ in _block_layers(kind, stack, 0)]
    starts = {f"{stack}.", *(author.partition("0.")[0] for author, _ in authors_layers(kind.class_name, first))}
    numbers = {name[len(each) :].partition(".")[0] for each in starts for name in names if name.startswith(each)}
    return next(number for number in itertools.count() if number == _MAX_BLOCKS or str(number) not in numbers)


def _layers(kind: TransformerKind, blocks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield all layers, in diffusers' names, with their marks."""
    for each in kind.outer.split():
        yield _unmarked(each)
    for stack, num_blocks in blocks.items():
        for number in range(num_blocks):
            yield from _block_layers(kind, stack, number)


def _block_layers(kind: TransformerKind, stack: str, number: int) -> Iterator[tuple[str, str]]:
    for each in kind.blocks[stack].split():
        inner, marks = _unmarked(each)
        yield f"{stack}.{number}.{inner}".rstrip("."), marks


def _unmarked(layer: str) -> tuple[str, str]:
    name = layer.rstrip("*?")
    return name, layer[len(name) :]


def _from_author(kind: TransformerKind, layers: Collection[str], names: Collection[str]) -> Origins:
    """Return what is in the file under the author's names."""
    last = sum(layer.startswith("transformer_blocks.") and layer.endswith(".attn.to_q") for layer in layers) - 1
    swapped = [each.format(last=last) for each in kind.swapped]
    found: Origins = {}
    for author, ours in authors_layers(kind.class_name, list(layers)):
        for end in ("weight", "bias", "scale"):
            if (name := f"{author}.{end}") in names:
                for number, layer in enumerate(ours):
                    pieces = Pieces(2, (1, 0)) if layer in swapped else _pieces(ours, number)
                    found[f"{layer}.{'bias' if end == 'bias' else 'weight'}"] = Origin(name, pieces)
    return found


def _pieces(layers: tuple[str, ...], number: int) -> Pieces | None:
    """Return the rows of one of the layers that an author has in one; a feed-forward has four times as many."""
    if len(layers) == 1:
        return None
    if not layers[-1].endswith("proj_mlp"):
        return Pieces(len(layers), (number,))
    return Pieces(7, (number,) if number < 3 else (3, 4, 5, 6))


def _same_name(layer: str, end: str, names: Collection[str]) -> str | None:
    """Return the tensor of a layer that a file has under diffusers' name; authors call the weights of norms `scale`."""
    ends = (end, "scale") if end == "weight" else (end,)
    return next((f"{layer}.{each}" for each in ends if f"{layer}.{each}" in names), None)
