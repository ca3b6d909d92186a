"""The model families that Noria serves. A new family is a row of `FAMILIES` and the two modules that the row names.

The class that a folder's model_index.json (diffusers) or config.json (transformers) names says its family. The folder's
files also name the classes of its parts; only a class that the family lists is ever looked up in a library. This module
imports neither the libraries nor the families' modules until a folder is inspected or a model loaded.
"""

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from noria.errors import ModelError, short_repr
from noria.models.encoder.architectures import CLASS_PREFIXES, CLASSES, DENSE_PATHS, TASK_FOLDERS
from noria.models.encoder.folders.tower_config import DOUBLE_TOWERS, TOWERS
from noria.models.family import MASKLESS_ATTENTION, Family, Part
from noria.models.files.weights import read_object
from noria.models.foreign_folders import describe_config, describe_folder

INDEX_FILES: Mapping[str, tuple[str, ...]] = {
    "model_index.json": ("_class_name",),
    "config.json": ("architectures", "model_type"),
}
"""Where a folder names its class: in the first of these files that it has, under these keys."""

_UNET_ATTENTION = ("sdpa", "plain", "sliced", "xformers")
# For transformers that call diffusers' dispatcher of attention, with masks of numbers, of padded tokens, or none.
_WITH_ANY_MASK = ("sdpa", "_native_cudnn", "_native_efficient", "_native_math")
_WITH_PADDING = (*_WITH_ANY_MASK, "flash_varlen", "sage_varlen", "_flash_varlen_3")


def _parts(**parts: Part) -> Mapping[str, Part]:
    """Return the parts of a diffusion model: these and a scheduler, whose classes `images/scheduler_names.py` knows."""
    return MappingProxyType({**parts, "scheduler": Part()})


def _network(*classes: str) -> Part:
    """Return a denoiser or a VAE, one of diffusers' classes."""
    return Part(classes, "diffusion_pytorch_model")


def _text_encoder(*classes: str) -> Part:
    """Return a text encoder, one of transformers' classes."""
    return Part(classes, "model")


def _with_transformer(
    name: str,
    description: str,
    class_names: tuple[str, ...],
    module: str,
    *,
    inspect: str = "inspect",
    attention: tuple[str, ...] = ("sdpa",),
    gpu_dtype: str = "bfloat16",
    **parts: Part,
) -> Family:
    """Return the family of a transformer: `module` is the name of both of its modules, and of its class."""
    stem, _, model_class = module.partition(":")
    return Family(
        name,
        description,
        class_names,
        _parts(**parts),
        inspect_with=f"noria.models.diffusion.folders.transformer_models.{stem}_folder:{inspect}",
        load_with=f"noria.models.diffusion.transformer_models.{stem}:{model_class}.load",
        attention=attention,
        gpu_dtype=gpu_dtype,
    )


_CLIP_TOKENIZER = Part(("CLIPTokenizer", "CLIPTokenizerFast"))
_CLIP = _text_encoder("CLIPTextModel")
_UNET = _network("UNet2DConditionModel")
_UNET_PARTS = {
    "tokenizer": _CLIP_TOKENIZER,
    "text_encoder": _CLIP,
    "unet": _UNET,
    "vae": _network("AutoencoderKL", "AutoencoderTiny"),
}
_KL_VAE = _network("AutoencoderKL")

_QWEN_VAE = _network("AutoencoderKLQwenImage")
_T5_TOKENIZER = Part(("T5Tokenizer", "T5TokenizerFast"))
_T5 = _text_encoder("T5EncoderModel")
_CLIP_WITH_PROJECTION = _text_encoder("CLIPTextModelWithProjection")
_QWEN_TOKENIZER = Part(("Qwen2Tokenizer", "Qwen2TokenizerFast"))
_GEMMA_TOKENIZER = Part(("GemmaTokenizer", "GemmaTokenizerFast"))
_GEMMA2 = _text_encoder("Gemma2Model")
_QWEN3 = _text_encoder("Qwen3Model", "Qwen3ForCausalLM")

_ROWS = (
    Family(
        name="stable-diffusion",
        description="Stable Diffusion 1.x, 2.x and models with the same parts",
        class_names=("StableDiffusionPipeline", "StableDiffusionInpaintPipeline"),
        parts=_parts(**_UNET_PARTS),
        inspect_with="noria.models.diffusion.folders.unet_models.stable_diffusion_folder:inspect",
        load_with="noria.models.diffusion.unet_models.stable_diffusion:StableDiffusion.load",
        attention=_UNET_ATTENTION,
    ),
    Family(
        name="stable-diffusion-xl",
        description="Stable Diffusion XL and models distilled from it",
        class_names=("StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline"),
        parts=_parts(
            **_UNET_PARTS,
            tokenizer_2=_CLIP_TOKENIZER,
            text_encoder_2=_CLIP_WITH_PROJECTION,
        ),
        inspect_with="noria.models.diffusion.folders.unet_models.stable_diffusion_xl_folder:inspect",
        load_with="noria.models.diffusion.unet_models.stable_diffusion_xl:StableDiffusionXL.load",
        attention=_UNET_ATTENTION,
    ),
    Family(
        name="stable-diffusion-xl-refiner",
        description="the refiner of Stable Diffusion XL, only for engine.refiners",
        class_names=("StableDiffusionXLImg2ImgPipeline",),
        # Not the VAE: images are decoded by that of the model which is refined.
        parts=_parts(
            tokenizer_2=_CLIP_TOKENIZER,
            text_encoder_2=_CLIP_WITH_PROJECTION,
            unet=_UNET,
        ),
        inspect_with="noria.models.diffusion.folders.unet_models.refiner_folder:inspect",
        load_with="noria.models.diffusion.unet_models.refiner:load_refiner",
    ),
    _with_transformer(
        name="z-image",
        description="Z-Image and Z-Image-Turbo",
        class_names=("ZImagePipeline",),
        module="z_image:ZImage",
        attention=_WITH_PADDING,
        tokenizer=_QWEN_TOKENIZER,
        text_encoder=_QWEN3,
        transformer=_network("ZImageTransformer2DModel"),
        vae=_KL_VAE,
    ),
    _with_transformer(
        name="qwen-image",
        description="Qwen-Image",
        class_names=("QwenImagePipeline",),
        module="qwen_image:QwenImage",
        attention=_WITH_PADDING,
        tokenizer=_QWEN_TOKENIZER,
        text_encoder=_text_encoder("Qwen2_5_VLForConditionalGeneration"),
        transformer=_network("QwenImageTransformer2DModel"),
        vae=_QWEN_VAE,
    ),
    _with_transformer(
        name="qwen-image-edit-plus",
        description="Qwen-Image-Edit-Plus",
        class_names=("QwenImageEditPlusPipeline",),
        module="qwen_image:QwenImageEditPlus",
        attention=_WITH_PADDING,
        tokenizer=_QWEN_TOKENIZER,
        processor=Part(("Qwen2VLProcessor", "Qwen2_5_VLProcessor")),
        text_encoder=_text_encoder("Qwen2_5_VLForConditionalGeneration"),
        transformer=_network("QwenImageTransformer2DModel"),
        vae=_QWEN_VAE,
    ),
    _with_transformer(
        name="qwen-image-2-1",
        description="Qwen-Image 2.1",
        class_names=("QwenImage21Pipeline",),
        module="qwen_image_21:QwenImage21",
        attention=_WITH_ANY_MASK,
        processor=Part(("Qwen3VLProcessor",)),
        text_encoder=_text_encoder("Qwen3VLForConditionalGeneration"),
        transformer=_network("QwenImage21Transformer2DModel"),
        vae=_network("AutoencoderKLQwenImage21"),
    ),
    _with_transformer(
        name="krea-2",
        description="Krea 2",
        class_names=("Krea2Pipeline",),
        module="krea2:Krea2",
        attention=_WITH_PADDING,
        tokenizer=_QWEN_TOKENIZER,
        text_encoder=_text_encoder("Qwen3VLModel", "Qwen3VLForConditionalGeneration"),
        transformer=_network("Krea2Transformer2DModel"),
        vae=_QWEN_VAE,
    ),
    _with_transformer(
        name="lumina-2",
        description="Lumina Image 2",
        class_names=("Lumina2Pipeline",),
        module="lumina2:Lumina2",
        tokenizer=_GEMMA_TOKENIZER,
        text_encoder=_GEMMA2,
        transformer=_network("Lumina2Transformer2DModel"),
        vae=_KL_VAE,
    ),
    _with_transformer(
        name="stable-diffusion-3",
        description="Stable Diffusion 3 and 3.5",
        class_names=("StableDiffusion3Pipeline",),
        module="stable_diffusion_3:StableDiffusion3",
        gpu_dtype="float16",
        tokenizer=_CLIP_TOKENIZER,
        text_encoder=_CLIP_WITH_PROJECTION,
        tokenizer_2=_CLIP_TOKENIZER,
        text_encoder_2=_CLIP_WITH_PROJECTION,
        tokenizer_3=_T5_TOKENIZER,
        text_encoder_3=_T5,
        transformer=_network("SD3Transformer2DModel"),
        vae=_KL_VAE,
    ),
    _with_transformer(
        name="flux",
        description="FLUX.1 dev, schnell, Fill and Kontext",
        class_names=("FluxPipeline", "FluxFillPipeline", "FluxKontextPipeline"),
        module="flux:Flux",
        attention=(*_WITH_PADDING, *MASKLESS_ATTENTION),
        tokenizer=_CLIP_TOKENIZER,
        text_encoder=_CLIP,
        tokenizer_2=_T5_TOKENIZER,
        text_encoder_2=_T5,
        transformer=_network("FluxTransformer2DModel"),
        vae=_KL_VAE,
    ),
    _with_transformer(
        name="chroma",
        description="Chroma",
        class_names=("ChromaPipeline",),
        module="chroma:Chroma",
        attention=_WITH_ANY_MASK,
        tokenizer=_T5_TOKENIZER,
        text_encoder=_T5,
        transformer=_network("ChromaTransformer2DModel"),
        vae=_KL_VAE,
    ),
    _with_transformer(
        name="flux-2-klein",
        description="FLUX.2 klein, distilled or not",
        class_names=("Flux2KleinPipeline",),
        module="flux_2:Flux2Klein",
        inspect="inspect_klein",
        attention=(*_WITH_PADDING, *MASKLESS_ATTENTION),
        tokenizer=_QWEN_TOKENIZER,
        text_encoder=_QWEN3,
        transformer=_network("Flux2Transformer2DModel"),
        vae=_network("AutoencoderKLFlux2"),
    ),
    _with_transformer(
        name="flux-2-dev",
        description="FLUX.2 dev",
        class_names=("Flux2Pipeline",),
        module="flux_2:Flux2Dev",
        inspect="inspect_dev",
        attention=(*_WITH_PADDING, *MASKLESS_ATTENTION),
        tokenizer=Part(("PixtralProcessor",)),
        text_encoder=_text_encoder("Mistral3ForConditionalGeneration"),
        transformer=_network("Flux2Transformer2DModel"),
        vae=_network("AutoencoderKLFlux2"),
    ),
    _with_transformer(
        name="sana",
        description="Sana and Sana 1.5, without Sprint",
        class_names=("SanaPipeline",),
        module="sana:Sana",
        tokenizer=_GEMMA_TOKENIZER,
        text_encoder=_GEMMA2,
        transformer=_network("SanaTransformer2DModel"),
        vae=_network("AutoencoderDC"),
    ),
    _with_transformer(
        name="pixart-sigma",
        description="PixArt-Σ",
        class_names=("PixArtSigmaPipeline",),
        module="pixart_sigma:PixArtSigma",
        gpu_dtype="float16",
        tokenizer=_T5_TOKENIZER,
        text_encoder=_T5,
        # Published folders name its class of earlier versions of diffusers.
        transformer=_network("PixArtTransformer2DModel", "Transformer2DModel"),
        vae=_KL_VAE,
    ),
    Family(
        name="text-encoder",
        description="text encoders: embeddings, classification, reranking",
        index_file="config.json",
        class_names=(*CLASS_PREFIXES, *TOWERS, *DOUBLE_TOWERS, "model2vec"),
        parts=MappingProxyType(
            {
                "": Part(CLASSES, "model"),
                "1_Pooling": Part(),
                **{name: Part(weights="model", is_optional=True) for name in ("2_Dense", "3_Dense", DENSE_PATHS)},
                **{
                    name: Part(weights="adapter_model", is_optional=True, config="adapter_config.json")
                    for name in TASK_FOLDERS.values()
                },
                **{f"{number}_Normalize": Part(is_identifying=False) for number in range(2, 6)},
                "1_LogitScore": Part(),
                "1_SpladePooling": Part(),
                "[0-9]*_MultiVectorMask": Part(),
            }
        ),
        extra="encoders",
        packages=("tokenizers", "onnxruntime"),
        inspect_with="noria.models.encoder.folders.encoder_folder:inspect",
        load_with="noria.models.encoder.checkpoint:load",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ROWS})


def identify_family(folder: pathlib.Path) -> Family:
    """Return the family of a model folder.

    Raises ModelError: the folder names no class, or only classes that no family has.
    """
    file = next((folder / name for name in INDEX_FILES if (folder / name).exists()), None)
    if file is None:
        raise ModelError(describe_folder(folder))
    return family_of(file.name, read_object(file), str(file))


def family_of(index_file: str, tree: Mapping[str, Any], source: str) -> Family:
    """Return the family whose class an index file names; `source` is the file's name for messages.

    Raises ModelError: it names no class, or only classes that no family has.
    """
    found = {key: tree.get(key) for key in INDEX_FILES[index_file]}
    architectures = found.get("architectures")
    names = [*found.values(), *(architectures if isinstance(architectures, list) else ())]
    for family in FAMILIES.values():
        if family.index_file == index_file and any(name in family.class_names for name in names):
            return family
    if index_file == "config.json" and (what := describe_config(tree)):
        raise ModelError(f"{source}: {what}")
    got = " and ".join(f"{key} is {short_repr(value)}" for key, value in found.items())
    known = [name for family in FAMILIES.values() if family.index_file == index_file for name in family.class_names]
    raise ModelError(f"{source}: {got}, which no model family has. Known are: {', '.join(known)}.")
