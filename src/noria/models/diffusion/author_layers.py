"""The one table of names: how the authors of models call the layers that diffusers calls otherwise. Pure.

An author's layer is one of diffusers', or several whose outputs follow one another (`qkv`). `{}` is a block's number.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

Layout = Mapping[str, str]
"""Names of diffusers' layers by an author's; spaces separate several."""


def _under(author: str, ours: str, layers: Layout) -> dict[str, str]:
    """Return `layers` with both prefixes."""
    return {author + name: " ".join(ours + each for each in found.split()) for name, found in layers.items()}


_ADDED_QKV = "attn.add_q_proj attn.add_k_proj attn.add_v_proj"
_QKV = "attn.to_q attn.to_k attn.to_v"
_DOUBLE = {
    "img_attn.qkv": _QKV,
    "txt_attn.qkv": _ADDED_QKV,
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
}
_SINGLE_NORMS = {"norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k"}
_LINEARS = {"in_layer": "linear_1", "out_layer": "linear_2"}
_MLP = {"0": "linear_1", "2": "linear_2"}
_HEAD = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
# XLabs' processors: 1 is of the image, 2 of the text.
_XLABS = {
    "double_blocks.{}.processor.qkv_lora1": _QKV,
    "double_blocks.{}.processor.qkv_lora2": _ADDED_QKV,
    "double_blocks.{}.processor.proj_lora1": "attn.to_out.0",
    "double_blocks.{}.processor.proj_lora2": "attn.to_add_out",
}
_DIFFSYNTH_DOUBLE = {
    "attn.a_to_qkv": _QKV,
    "attn.b_to_qkv": _ADDED_QKV,
    **{f"attn.a_to_{each}": f"attn.to_{each}" for each in "qkv"},
    **{f"attn.b_to_{each}": f"attn.add_{each}_proj" for each in "qkv"},
    "attn.a_to_out": "attn.to_out.0",
    "attn.b_to_out": "attn.to_add_out",
    "ff_a.0": "ff.net.0.proj",
    "ff_a.2": "ff.net.2",
    "ff_b.0": "ff_context.net.0.proj",
    "ff_b.2": "ff_context.net.2",
    "norm1_a.linear": "norm1.linear",
    "norm1_b.linear": "norm1_context.linear",
}
_SINGLE_QKV_MLP = f"{_QKV} proj_mlp"
_FLUX = {
    **_HEAD,
    **_under("time_in.", "time_text_embed.timestep_embedder.", _LINEARS),
    **_under("vector_in.", "time_text_embed.text_embedder.", _LINEARS),
    **_under("guidance_in.", "time_text_embed.guidance_embedder.", _LINEARS),
    **_under("distilled_guidance_layer.layers.{}.", "distilled_guidance_layer.layers.{}.", _LINEARS),  # Chroma's
    **_under(
        "double_blocks.{}.",
        "transformer_blocks.{}.",
        {
            **_DOUBLE,
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
            "img_mod.lin": "norm1.linear",
            "txt_mod.lin": "norm1_context.linear",
        },
    ),
    **_under(
        "single_blocks.{}.",
        "single_transformer_blocks.{}.",
        {
            **_SINGLE_NORMS,
            "linear1": _SINGLE_QKV_MLP,
            "linear2": "proj_out",
            "modulation.lin": "norm.linear",
            "processor.qkv_lora": _QKV,
            "processor.proj_lora": "proj_out",
            "to_qkv_mlp": _SINGLE_QKV_MLP,  # DiffSynth's
            "norm.linear": "norm.linear",
            "proj_out": "proj_out",
        },
    ),
    **_under("", "transformer_blocks.{}.", _XLABS),
    **_under("blocks.{}.", "transformer_blocks.{}.", _DIFFSYNTH_DOUBLE),
}
_FLUX_2 = {
    **_HEAD,
    **_under("time_in.", "time_guidance_embed.timestep_embedder.", _LINEARS),
    **_under("guidance_in.", "time_guidance_embed.guidance_embedder.", _LINEARS),
    **{
        f"{each}.lin": f"{each}.linear"
        for each in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    },
    **_under(
        "double_blocks.{}.",
        "transformer_blocks.{}.",
        {
            **_DOUBLE,
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        },
    ),
    **_under(
        "single_blocks.{}.",
        "single_transformer_blocks.{}.",
        {**_SINGLE_NORMS, "linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"},
    ),
}
_STABLE_DIFFUSION_3 = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    **_under("t_embedder.mlp.", "time_text_embed.timestep_embedder.", _MLP),
    **_under("y_embedder.mlp.", "time_text_embed.text_embedder.", _MLP),
    **_under(
        "joint_blocks.{}.",
        "transformer_blocks.{}.",
        {
            "x_block.attn.qkv": _QKV,
            "x_block.attn.proj": "attn.to_out.0",
            "x_block.attn.ln_q": "attn.norm_q",
            "x_block.attn.ln_k": "attn.norm_k",
            "x_block.attn2.qkv": "attn2.to_q attn2.to_k attn2.to_v",
            "x_block.attn2.proj": "attn2.to_out.0",
            "x_block.attn2.ln_q": "attn2.norm_q",
            "x_block.attn2.ln_k": "attn2.norm_k",
            "x_block.mlp.fc1": "ff.net.0.proj",
            "x_block.mlp.fc2": "ff.net.2",
            "x_block.adaLN_modulation.1": "norm1.linear",
            "context_block.attn.qkv": _ADDED_QKV,
            "context_block.attn.proj": "attn.to_add_out",
            "context_block.attn.ln_q": "attn.norm_added_q",
            "context_block.attn.ln_k": "attn.norm_added_k",
            "context_block.mlp.fc1": "ff_context.net.0.proj",
            "context_block.mlp.fc2": "ff_context.net.2",
            "context_block.adaLN_modulation.1": "norm1_context.linear",
        },
    ),
}
_STACKS = ("layers.{}.", "noise_refiner.{}.", "context_refiner.{}.")
_Z_IMAGE = {
    "x_embedder": "all_x_embedder.2-1",
    **_under("final_layer.", "all_final_layer.2-1.", {each: each for each in ("linear", "adaLN_modulation.1")}),
}
_LUMINA_2 = {
    **_under("t_embedder.mlp.", "time_caption_embed.timestep_embedder.", _MLP),
    **_under("cap_embedder.", "time_caption_embed.caption_embedder.", {"0": "0", "1": "1"}),
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "final_layer.linear": "norm_out.linear_2",
}
for _stack in _STACKS:
    _Z_IMAGE |= _under(
        f"{_stack}attention.",
        f"{_stack}attention.",
        {"qkv": "to_q to_k to_v", "out": "to_out.0", "q_norm": "norm_q", "k_norm": "norm_k"},
    )
    _LUMINA_2 |= _under(
        _stack,
        _stack,
        {
            "attention.qkv": _QKV,
            "attention.out": "attn.to_out.0",
            "attention.q_norm": "attn.norm_q",
            "attention.k_norm": "attn.norm_k",
            "adaLN_modulation.1": "norm1.linear",
            **{f"feed_forward.w{number}": f"feed_forward.linear_{number}" for number in (1, 2, 3)},
        },
    )
_KREA_BLOCK = {
    **{f"attn.w{each}": f"attn.to_{each}" for each in "qkv"},
    "attn.wo": "attn.to_out.0",
    "attn.gate": "attn.to_gate",
    **{f"mlp.{each}": f"ff.{each}" for each in ("gate", "up", "down")},
}
_KREA_2 = {
    "first": "img_in",
    "last.linear": "final_layer.linear",
    "tmlp.0": "time_embed.linear_1",
    "tmlp.2": "time_embed.linear_2",
    "tproj.1": "time_mod_proj",
    "txtmlp.1": "txt_in.linear_1",
    "txtmlp.3": "txt_in.linear_2",
    "txtfusion.projector": "text_fusion.projector",
    **_under("blocks.{}.", "transformer_blocks.{}.", _KREA_BLOCK),
    **_under("txtfusion.layerwise_blocks.{}.", "text_fusion.layerwise_blocks.{}.", _KREA_BLOCK),
    **_under("txtfusion.refiner_blocks.{}.", "text_fusion.refiner_blocks.{}.", _KREA_BLOCK),
}
_LAYOUTS: Mapping[str, Layout] = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX_2,
    "SD3Transformer2DModel": _STABLE_DIFFUSION_3,
    "ZImageTransformer2DModel": _Z_IMAGE,
    "Lumina2Transformer2DModel": _LUMINA_2,
    "Krea2Transformer2DModel": _KREA_2,
}
"""By the class of the denoiser; the authors of others have diffusers' names."""

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def authors_layers(denoiser: str, modules: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each author's layer with the modules that it is, of a denoiser of this class that has `modules`."""
    if denoiser == "UNet2DConditionModel":
        yield from ((name, (module,)) for module, name in _unet_names(modules))
        return
    known = set(modules)
    for author, found in _LAYOUTS.get(denoiser, {}).items():
        for number in itertools.count() if "{}" in author else (0,):
            named = tuple(found.format(*[number] * found.count("{}")).split())
            if not known.issuperset(named):
                break
            yield author.format(number), named


def _unet_names(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the modules of a UNet with their names in the original code of Stable Diffusion."""
    starts = dict(_UNET)
    number = 1
    for block in _numbers("down_blocks.{}.", modules):
        for layer in _numbers(f"down_blocks.{block}.resnets.{{}}.", modules):
            starts[f"down_blocks.{block}.resnets.{layer}"] = f"input_blocks.{number}.0"
            starts[f"down_blocks.{block}.attentions.{layer}"] = f"input_blocks.{number}.1"
            number += 1
        if f"down_blocks.{block}.downsamplers.0.conv" in modules:
            starts[f"down_blocks.{block}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
            number += 1
    for name, place in (("resnets.0", 0), ("attentions.0", 1), ("resnets.1", 2)):
        starts[f"mid_block.{name}"] = f"middle_block.{place}"
    number = 0
    for block in _numbers("up_blocks.{}.", modules):
        has_attention = any(name.startswith(f"up_blocks.{block}.attentions.") for name in modules)
        for layer in _numbers(f"up_blocks.{block}.resnets.{{}}.", modules):
            starts[f"up_blocks.{block}.resnets.{layer}"] = f"output_blocks.{number}.0"
            starts[f"up_blocks.{block}.attentions.{layer}"] = f"output_blocks.{number}.1"
            number += 1
        starts[f"up_blocks.{block}.upsamplers.0"] = f"output_blocks.{number - 1}.{1 + has_attention}"
    for module in modules:
        ends = [at for at, letter in enumerate(f"{module}.") if letter == "."]
        start = next((module[:end] for end in reversed(ends) if module[:end] in starts), None)
        if start is not None:
            rest = module[len(start) + 1 :]
            named = _RESNET.get(rest, rest) if ".resnets." in start else rest
            yield module, f"{starts[start]}.{named}".removesuffix(".")


def _numbers(template: str, modules: Sequence[str]) -> Iterator[int]:
    """Yield 0, 1 and so on while modules start so."""
    return itertools.takewhile(
        lambda number: any(name.startswith(template.format(number)) for name in modules), itertools.count()
    )
