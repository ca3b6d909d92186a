"""Checkpoints in a single file, in the names of CompVis and OpenCLIP: made of tiny folders in diffusers format."""

import json
import os
import pathlib
import re
from collections.abc import Container, Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import tiny_models
from noria.models.diffusion.single_file.clip_tokenizer import write_clip_tokenizer
from noria.models.diffusion.single_file.part_names import SD2_LAYERS

Tensors = dict[str, torch.Tensor]

# The sizes that a file's tensors tell nothing about are those of the published models: heads of 64, groups of 32.
_VAE = {"block_out_channels": (32, 32, 32), "norm_num_groups": 32}
_TEXT = {
    "vocab_size": 49408, "max_position_embeddings": 77, "hidden_size": 16, "num_attention_heads": 1,
    "eos_token_id": 2,
}  # fmt: skip
_OPEN_CLIP = {**_TEXT, "hidden_act": "gelu"}
_UNET = {"norm_num_groups": 32}
_WIDE = {**_UNET, "block_out_channels": (32, 64), "attention_head_dim": (1, 1), "use_linear_projection": True}
_PARTS: Mapping[str, dict[str, Any]] = {
    "sd1": {
        "text_encoder": _TEXT,
        "unet": {**_UNET, "block_out_channels": (32, 64), "attention_head_dim": 8, "cross_attention_dim": 16},
    },
    "sd2": {"text_encoder": _OPEN_CLIP, "unet": {**_WIDE, "cross_attention_dim": 16}},
    "sdxl": {
        "text_encoder": _TEXT,
        "text_encoder_2": _OPEN_CLIP,
        "unet": {**_WIDE, "cross_attention_dim": 32, "sample_size": 16},
    },
    "refiner": {"text_encoder_2": _OPEN_CLIP, "unet": {**_WIDE, "cross_attention_dim": 16}},
}
_SAVE = {
    "sd1": tiny_models.save_stable_diffusion,
    "sd2": tiny_models.save_stable_diffusion,
    "sdxl": tiny_models.save_stable_diffusion_xl,
    "refiner": tiny_models.save_xl_refiner,
}
_SCALING = {"sd1": 0.18215, "sd2": 0.18215, "sdxl": 0.13025}
_PAD = {"tokenizer": "<|endoftext|>", "tokenizer_2": "!"}
_TEXT_PREFIXES = {
    "sd1": {"text_encoder": "cond_stage_model.transformer."},
    "sd2": {"text_encoder": "cond_stage_model.model."},
    "sdxl": {
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.model.",
    },
    "refiner": {"text_encoder_2": "conditioner.embedders.0.model."},
}


def save_folder(folder: pathlib.Path, family: str, *, for_inpainting: bool = False, **scheduler: Any) -> pathlib.Path:
    """Write a folder whose checkpoint is of `family`; `scheduler` are settings of its scheduler."""
    changes = {part: dict(settings) for part, settings in _PARTS[family].items()}
    if family in _SCALING:
        changes["vae"] = {**_VAE, "scaling_factor": _SCALING[family]}
    if for_inpainting:
        changes["unet"] |= {"in_channels": 9}
        changes["pipeline"] = f"StableDiffusion{'XL' if family == 'sdxl' else ''}InpaintPipeline"
    _SAVE[family](folder, scheduler=scheduler, **changes)
    for tokenizer in folder.glob("tokenizer*"):
        for file in tokenizer.iterdir():
            file.unlink()
        tokenizer.rmdir()
        write_clip_tokenizer(tokenizer, "!" if family == "sd2" else _PAD[tokenizer.name])
    return folder


def load_parts(folder: pathlib.Path) -> dict[str, Tensors]:
    """Return the tensors of a folder by part."""
    return {file.parent.name: load_file(file) for file in folder.glob("*/*.safetensors")}


def checkpoint_tensors(parts: Mapping[str, Tensors], family: str) -> Tensors:
    """Return the tensors of all parts in the names that a single file has."""
    found: Tensors = {}
    for name, tensor in parts["unet"].items():
        found[f"model.diffusion_model.{_unet_name(name, parts['unet'])}"] = tensor
    if "vae" in parts:
        found |= {f"first_stage_model.{name}": tensor for name, tensor in vae_tensors(parts["vae"]).items()}
    for part, prefix in _TEXT_PREFIXES[family].items():
        is_open_clip = prefix.endswith(".model.")
        named = _open_clip(parts[part], has_unused=part == "text_encoder") if is_open_clip else parts[part]
        for name, tensor in named.items():
            inner = "" if is_open_clip or name.startswith("text_model.") else "text_model."
            found[f"{prefix}{inner}{name}"] = tensor
    return {name: tensor.clone() for name, tensor in found.items()}


def save_checkpoint(file: pathlib.Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> pathlib.Path:
    """Write a file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    return file


def save_header(file: pathlib.Path, tensors: Tensors) -> pathlib.Path:
    """Write a file whose numbers take no space on the disk; `tensors` may be on the device meta."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    return file


_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_OUTER = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0", "conv_out": "out.2", "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip


def _unet_name(name: str, names: Container[str]) -> str:
    """Return a UNet's name of a tensor in CompVis' form, for a UNet that has `names`."""
    stem, _, end = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{end}"
    path = name.split(".")
    kind, number = path[0], int(path[1]) if path[1].isdigit() else 0
    per_block = (
        3 if "down_blocks.0.resnets.1.conv1.weight" in names else 2
    )  # its layers, and a change of size or one more
    if kind == "mid_block":
        place = f"middle_block.{1 if path[1] == 'attentions' else 2 * int(path[2])}"
        layer, inner = path[1], path[3:]
    elif path[2] == "downsamplers":
        return f"input_blocks.{per_block * (number + 1)}.0.op.{end}"
    elif path[2] == "upsamplers":
        is_behind_transformer = f"up_blocks.{number}.attentions.0.norm.weight" in names
        return f"output_blocks.{per_block * (number + 1) - 1}.{2 if is_behind_transformer else 1}.conv.{end}"
    else:
        base = per_block * number + (kind == "down_blocks")
        place = f"{'input' if kind == 'down_blocks' else 'output'}_blocks.{base + int(path[3])}"
        place += f".{0 if path[2] == 'resnets' else 1}"
        layer, inner = path[2], path[4:]
    if layer == "resnets":
        inner = [_RESNET[inner[0]], *inner[1:]]
    return ".".join([place, *inner])


def vae_tensors(vae: Tensors) -> Tensors:
    """Return the tensors of a VAE in CompVis' names."""
    found = {}
    last = max(int(match[1]) for name in vae if (match := re.match(r"encoder\.down_blocks\.(\d)", name)))
    for name, value in vae.items():
        tensor = value
        new = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
        new = re.sub(r"up_blocks\.(\d)\.resnets", lambda match: f"up.{last - int(match[1])}.block", new)
        new = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", new)
        new = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda match: f"up.{last - int(match[1])}.upsample", new)
        new = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", new)
        new = new.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if "mid_block.attentions.0" in new:
            new = new.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
            new = re.sub(r"to_([qkv])\.", r"\1.", new).replace("to_out.0", "proj_out")
            tensor = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
        found[new] = tensor
    return found


_OPEN_CLIP_NAMES = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm": "ln_final", "encoder.layers": "transformer.resblocks", "self_attn.out_proj": "attn.out_proj",
    "layer_norm": "ln_", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
}  # fmt: skip


def _open_clip(stored: Tensors, *, has_unused: bool) -> Tensors:
    """Return a text encoder's tensors in OpenCLIP's names; of SD 2's 23 layers with one more, which is not used."""
    found: Tensors = {"logit_scale": torch.zeros(())}
    for name, tensor in stored.items():
        new = name.removeprefix("text_model.")
        if name == "text_projection.weight":
            found["text_projection"] = tensor.T
            continue
        for theirs, ours in _OPEN_CLIP_NAMES.items():
            new = new.replace(theirs, ours)
        if match := re.fullmatch(r"(.*)\.self_attn\.q_proj\.(weight|bias)", new):
            matrices = [stored[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            found[f"{match[1]}.attn.in_proj_{match[2]}"] = torch.cat(matrices)
        elif not re.search(r"[kv]_proj", new):
            found[new] = tensor
    number = 1 + max(int(match[1]) for name in found if (match := re.search(r"resblocks\.(\d+)\.", name)))
    if has_unused and number == SD2_LAYERS:
        last = {name: tensor for name, tensor in found.items() if f"resblocks.{number - 1}." in name}
        found |= {name.replace(f".{number - 1}.", f".{number}."): tensor + 1 for name, tensor in last.items()}
    return found


# The authors' names of a transformer's tensors, by patterns of diffusers' names; several tensors of one name are one.
_DOUBLE = [
    (r"attn\.to_[qkv]\.", "img_attn.qkv."), (r"attn\.add_[qkv]_proj\.", "txt_attn.qkv."),
    (r"attn\.to_out\.0\.", "img_attn.proj."), (r"attn\.to_add_out\.", "txt_attn.proj."),
    (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
    (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
    (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
    (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
    (r"ff\.net\.0\.proj\.", "img_mlp.0."), (r"ff\.net\.2\.", "img_mlp.2."),
    (r"ff_context\.net\.0\.proj\.", "txt_mlp.0."), (r"ff_context\.net\.2\.", "txt_mlp.2."),
    (r"norm1\.linear\.", "img_mod.lin."), (r"norm1_context\.linear\.", "txt_mod.lin."),
]  # fmt: skip
_SINGLE = [
    (r"attn\.to_[qkv]\.", "linear1."), (r"proj_mlp\.", "linear1."), (r"proj_out\.", "linear2."),
    (r"attn\.norm_q\.weight", "norm.query_norm.scale"), (r"attn\.norm_k\.weight", "norm.key_norm.scale"),
    (r"norm\.linear\.", "modulation.lin."),
]  # fmt: skip
_FLUX = [
    *((rf"^transformer_blocks\.(\d+)\.{ours}", rf"double_blocks.\1.{author}") for ours, author in _DOUBLE),
    *((rf"^single_transformer_blocks\.(\d+)\.{ours}", rf"single_blocks.\1.{author}") for ours, author in _SINGLE),
    (r"^x_embedder\.", "img_in."), (r"^context_embedder\.", "txt_in."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^proj_out\.", "final_layer.linear."), (r"linear_1\.", "in_layer."), (r"linear_2\.", "out_layer."),
    (r"^time_text_embed\.timestep_embedder", "time_in"), (r"^time_text_embed\.text_embedder", "vector_in"),
    (r"^time_text_embed\.guidance_embedder", "guidance_in"),
    (r"^(distilled_guidance_layer\.norms\.\d+)\.weight", r"\1.scale"),
]  # fmt: skip
_JOINT = [
    (r"attn\.add_[qkv]_proj\.", "context_block.attn.qkv."), (r"(attn2?)\.to_[qkv]\.", r"x_block.\1.qkv."),
    (r"(attn2?)\.to_out\.0\.", r"x_block.\1.proj."), (r"attn\.to_add_out\.", "context_block.attn.proj."),
    (r"attn\.norm_added_([qk])\.", r"context_block.attn.ln_\1."), (r"(attn2?)\.norm_([qk])\.", r"x_block.\1.ln_\2."),
    (r"ff\.net\.0\.proj\.", "x_block.mlp.fc1."), (r"ff\.net\.2\.", "x_block.mlp.fc2."),
    (r"ff_context\.net\.0\.proj\.", "context_block.mlp.fc1."), (r"ff_context\.net\.2\.", "context_block.mlp.fc2."),
    (r"norm1\.linear\.", "x_block.adaLN_modulation.1."),
    (r"norm1_context\.linear\.", "context_block.adaLN_modulation.1."),
]  # fmt: skip
_AUTHORS: Mapping[str, list[tuple[str, str]]] = {
    "flux": _FLUX,
    "chroma": _FLUX,
    "sd3": [
        (r"^transformer_blocks\.(\d+)\.", r"joint_blocks.\1."),
        *((rf"(?<=\d\.){ours}", author) for ours, author in _JOINT),
        (r"^pos_embed\.pos_embed$", "pos_embed"), (r"^pos_embed\.proj\.", "x_embedder.proj."),
        (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."), (r"^proj_out\.", "final_layer.linear."),
        (r"^time_text_embed\.timestep_embedder", "t_embedder"), (r"^time_text_embed\.text_embedder", "y_embedder"),
        (r"linear_1\.", "mlp.0."), (r"linear_2\.", "mlp.2."),
    ],
    "z-image": [
        (r"attention\.to_[qkv]\.", "attention.qkv."), (r"attention\.to_out\.0\.", "attention.out."),
        (r"attention\.norm_([qk])\.", r"attention.\1_norm."), (r"^all_(x_embedder|final_layer)\.2-1\.", r"\1."),
    ],
    "qwen-image": [],
}  # fmt: skip
_ORDER = ("to_q", "add_q", "to_k", "add_k", "to_v", "add_v", "proj_mlp")


def transformer_tensors(transformer: Tensors, family: str) -> Tensors:
    """Return the tensors of a transformer in the names of its author."""
    last = max(
        (int(match[1]) for name in transformer if (match := re.match(r"transformer_blocks\.(\d+)", name))), default=0
    )
    swapped = ["norm_out.linear.", *([f"transformer_blocks.{last}.norm1_context.linear."] if family == "sd3" else [])]
    fused: dict[str, list[torch.Tensor]] = {}
    for name in sorted(transformer, key=lambda name: [each not in name for each in _ORDER]):
        new, tensor = name, transformer[name]
        for ours, author in _AUTHORS[family]:
            new = re.sub(ours, author, new)
        if family in ("flux", "sd3") and name.startswith(tuple(swapped)):
            tensor = tensor.roll(len(tensor) // 2, 0)
        fused.setdefault(new, []).append(tensor)
    return {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in fused.items()}
