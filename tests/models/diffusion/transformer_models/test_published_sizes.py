"""Parameters and memory of models as they are published, built without memory on the meta device."""

import functools
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    MistralConfig,
    MistralModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
    Qwen3VLVisionConfig,
    Qwen3VLVisionModel,
    T5Config,
    T5EncoderModel,
)

import single_files
from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, collate
from noria.models.diffusion.single_file.checkpoint import read_checkpoint
from noria.models.diffusion.single_file.folder_plan import FolderPlan
from noria.models.diffusion.transformer_models.qwen_image import QwenImage
from noria.models.diffusion.transformer_models.transformer_model import TransformerParts

XL_UNET = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_KL_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_CLIP_L = {"vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_OPEN_CLIP_H = {
    "vocab_size": 49408, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23,
    "num_attention_heads": 16, "hidden_act": "gelu",
}  # fmt: skip
_OPEN_CLIP_G = _OPEN_CLIP_H | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280,
}  # fmt: skip
_OF_8_GROUPS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_QWEN_7B = {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip
_QWEN3_VL_8B = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, **_OF_8_GROUPS
}  # fmt: skip
_SD3_MEDIUM = {
    "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192
}  # fmt: skip
_SD3_LARGE = {
    "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}  # fmt: skip
_KLEIN = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
_SANA_600M = {
    "num_attention_heads": 36, "num_layers": 28, "cross_attention_dim": 1152, "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
}  # fmt: skip
_PIXART = {"caption_channels": 4096, "use_additional_conditions": False}
_DC_VAE = {
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_norm_types": "rms_norm", "upsample_block_type": "interpolate", "downsample_block_type": "Conv",
}  # fmt: skip


def clip_texts():
    """The text encoders of Stable Diffusion XL."""
    return CLIPTextModel(CLIPTextConfig(**_CLIP_L)), CLIPTextModelWithProjection(CLIPTextConfig(**_OPEN_CLIP_G))


def kl_vae(latent_channels=16):
    has_convolutions = latent_channels == 4
    return AutoencoderKL(
        **_KL_VAE,
        latent_channels=latent_channels,
        use_quant_conv=has_convolutions,
        use_post_quant_conv=has_convolutions,
    )


def qwen3_4b(num_hidden_layers=36):
    """The text encoder of Z-Image, FLUX.2 klein and, by its sizes, Krea 2."""
    sizes = {"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728}
    return Qwen3Model(Qwen3Config(**sizes, **_OF_8_GROUPS, num_hidden_layers=num_hidden_layers))


def mistral_small(num_hidden_layers):
    """The text encoder of FLUX.2 dev: Mistral Small 3."""
    sizes = {"vocab_size": 131_072, "hidden_size": 5120, "intermediate_size": 32_768}
    return MistralModel(MistralConfig(**sizes, **_OF_8_GROUPS, num_hidden_layers=num_hidden_layers))


@functools.cache
def t5_xxl():
    sizes = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))


def qwen2_5_vl():
    whole = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=_QWEN_7B))
    return whole.model.language_model


def qwen3_vl():
    """The text encoder of 8 billion parameters, without its head."""
    vision = Qwen3VLVisionModel(Qwen3VLVisionConfig(out_hidden_size=4096))
    return torch.nn.ModuleList([Qwen3VLTextModel(Qwen3VLTextConfig(**_QWEN3_VL_8B)), vision])


def z_image():
    return ZImageTransformer2DModel(), qwen3_4b(), kl_vae()


def qwen_image():
    return QwenImageTransformer2DModel(), qwen2_5_vl(), AutoencoderKLQwenImage()


def qwen_image_21():
    return QwenImage21Transformer2DModel(), qwen3_vl(), AutoencoderKLQwenImage21()


def krea_2():
    return Krea2Transformer2DModel(), qwen3_4b(), AutoencoderKLQwenImage()


def lumina_2():
    return Lumina2Transformer2DModel(cap_feat_dim=2304), Gemma2Model(Gemma2Config()), kl_vae()


def flux_dev():
    return FluxTransformer2DModel(guidance_embeds=True), t5_xxl(), clip_texts()[0], kl_vae()


def flux_2_klein():
    return Flux2Transformer2DModel(**_KLEIN), qwen3_4b(28), AutoencoderKLFlux2()  # 28 layers of Qwen3 are kept


def flux_2_dev():
    return Flux2Transformer2DModel(), mistral_small(31), AutoencoderKLFlux2()  # 31 layers of Mistral are kept


def chroma():
    return ChromaTransformer2DModel(), t5_xxl(), kl_vae()


def sana(**settings):
    return SanaTransformer2DModel(**settings), Gemma2Model(Gemma2Config()), AutoencoderDC(**_DC_VAE)


def pixart_sigma():
    return PixArtTransformer2DModel(**_PIXART), t5_xxl(), kl_vae(4)


def on_meta(make, dtype=torch.bfloat16):
    """The parts that `make` returns, without memory."""
    with torch.device("meta"):
        made = make()
        return [part.to(dtype) for part in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize(
    ("make", "parameters", "gigabytes", "prompt", "prompt_megabytes"),
    [
        (z_image, [6_154_908_736, 4_022_468_096, 83_819_683], 20.5, (512, 2560), 2.6),
        (qwen_image, [20_430_401_088, 7_070_619_136, 126_892_531], 55.3, (512, 3584), 3.7),
        (krea_2, [12_820_073_036, 4_022_468_096, 126_892_531], 33.9, (512, 12, 2560), 31.5),
        (lumina_2, [2_609_769_152, 2_614_341_888, 83_819_683], 10.6, (256, 2304), 1.2),
        (flux_dev, [11_901_408_320, 4_762_310_656, 123_060_480, 83_819_683], 33.7, (512, 4096), 4.2),
        (flux_2_klein, [3.88, 3.22, 0.08], 14.3, (512, 3 * 2560), 7.9),
        (flux_2_dev, [32.22, 17.9, 0.08], 100.4, (512, 3 * 5120), 15.7),
        (qwen_image_21, [7.12, 8.14, 0.34], 31.2, (1024 + 5, 4096), 8.4),
        (chroma, [8.9, 4_762_310_656, 0.08], 27.5, (512, 4096), 4.2),
        (lambda: sana(**_SANA_600M), [0.59, 2.61, 0.31], 7.0, (300, 2304), 1.4),
        (sana, [1.6, 2.61, 0.31], 9.1, (300, 2304), 1.4),
        (pixart_sigma, [0.61, 4.76, 0.08], 10.9, (300, 4096), 2.5),
        (lambda: SD3Transformer2DModel(**_SD3_MEDIUM), [2.03], 4.1, (333, 4096), 2.7),
        (lambda: SD3Transformer2DModel(**_SD3_LARGE), [8.06], 16.1, (333, 4096), 2.7),
    ],
    ids=[
        *("Z-Image", "Qwen-Image", "Krea 2", "Lumina 2", "FLUX.1 dev", "FLUX.2 klein", "FLUX.2 dev", "Qwen-Image 2.1"),
        *("Chroma", "Sana 0.6B", "Sana 1.6B", "PixArt-Σ", "SD 3 medium", "SD 3.5 large"),
    ],
)
def test_parameters_and_memory_are_the_figures_of_the_documents(make, parameters, gigabytes, prompt, prompt_megabytes):
    """The figures of docs/models.md, in 16 bits; parameters are a number, or billions.

    Of Stable Diffusion 3 they are those of the transformer alone.
    """
    counts = [sum(each.numel() for each in part.parameters()) for part in on_meta(make)]
    rounded = [
        count if isinstance(expected, int) else round(count / 1e9, 2)
        for count, expected in zip(counts, parameters, strict=True)
    ]
    assert rounded == parameters
    assert round(2 * sum(counts) / 1e9, 1) == gigabytes
    tokens = Conditioning({"tokens": torch.empty(prompt, dtype=torch.bfloat16)})
    assert round(tokens.nbytes / 1e6, 1) == prompt_megabytes


def test_parameters_and_memory_of_stable_diffusion_xl():
    """The figure of docs/models.md, in float16 but for the VAE, which overflows there."""
    parts = [
        *on_meta(lambda: (UNet2DConditionModel(**XL_UNET), *clip_texts()), torch.float16),
        *on_meta(lambda: kl_vae(4), torch.float32),
    ]
    counts = [sum(each.numel() for each in part.parameters()) for part in parts]
    assert counts == [2_567_463_684, 123_060_480, 694_659_840, 83_653_863]
    assert round(sum(parameter.nbytes for part in parts for parameter in part.parameters()) / 1e9, 1) == 7.1
    tokens, pooled = torch.empty(77, 2048, dtype=torch.float16), torch.empty(1280, dtype=torch.float16)
    assert Conditioning({"tokens": tokens}, {"pooled": pooled}).nbytes == 317_952


ROWS, HEIGHT, WIDTH = 2, 76, 52  # tokens of an image of 1216 × 832 px
ONE = {"num_layers": 1}  # the blocks of a transformer take the same inputs
ONE_EACH = {"num_layers": 1, "num_single_layers": 1}
empty = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
TIMES = torch.empty(ROWS, device="meta")
SHOWN = torch.ones(ROWS, 300, dtype=torch.bool, device="meta")
PACKED = {
    "hidden_states": empty(ROWS, HEIGHT * WIDTH, 64),
    "encoder_hidden_states": empty(ROWS, 512, 4096),
    "timestep": empty(ROWS),
    "img_ids": empty(HEIGHT * WIDTH, 3),
    "txt_ids": empty(512, 3),
}


def of_flux_2(width):
    ids = {"img_ids": empty(HEIGHT * WIDTH, 4), "txt_ids": empty(512, 4), "guidance": TIMES}
    images = {"hidden_states": empty(ROWS, HEIGHT * WIDTH, 128), "timestep": empty(ROWS)}
    return {**images, **ids, "encoder_hidden_states": empty(ROWS, 512, width)}


@pytest.mark.parametrize(
    ("make", "inputs", "shape"),
    [
        (
            lambda: UNet2DConditionModel(**XL_UNET | {"transformer_layers_per_block": 1}),
            {
                "sample": empty(ROWS, 4, 104, 152),
                "timestep": TIMES,
                "encoder_hidden_states": empty(ROWS, 77, 768 + 1280),
                "added_cond_kwargs": {"text_embeds": empty(ROWS, 1280), "time_ids": empty(ROWS, 6)},
            },
            (ROWS, 4, 104, 152),
        ),
        (
            lambda: FluxTransformer2DModel(guidance_embeds=True, **ONE_EACH),
            PACKED | {"pooled_projections": empty(ROWS, 768), "guidance": TIMES},
            (ROWS, HEIGHT * WIDTH, 64),
        ),
        (
            lambda: ChromaTransformer2DModel(**ONE_EACH),
            PACKED | {"attention_mask": empty(ROWS, 512 + HEIGHT * WIDTH)},
            (ROWS, HEIGHT * WIDTH, 64),
        ),
        (lambda: Flux2Transformer2DModel(**_KLEIN | ONE_EACH), of_flux_2(3 * 2560), (ROWS, HEIGHT * WIDTH, 128)),
        (lambda: Flux2Transformer2DModel(**ONE_EACH), of_flux_2(3 * 5120), (ROWS, HEIGHT * WIDTH, 128)),
        (
            lambda: SanaTransformer2DModel(**ONE),
            {
                "hidden_states": empty(ROWS, 32, 26, 38),
                "encoder_hidden_states": empty(ROWS, 300, 2304),
                "encoder_attention_mask": SHOWN,
                "timestep": TIMES,
            },
            (ROWS, 32, 26, 38),
        ),
        (
            lambda: PixArtTransformer2DModel(**_PIXART | ONE),
            {
                "hidden_states": empty(ROWS, 4, 104, 152),
                "encoder_hidden_states": empty(ROWS, 300, 4096),
                "encoder_attention_mask": SHOWN,
                "timestep": TIMES,
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            },
            (ROWS, 8, 104, 152),
        ),
    ],
    ids=["XL", "FLUX.1 dev", "Chroma", "FLUX.2 klein", "FLUX.2 dev", "Sana", "PixArt-Σ"],
)
def test_a_denoiser_takes_what_its_family_gives_it(make, inputs, shape):
    (denoiser,) = on_meta(make)
    with torch.device("meta"):
        output, *_ = denoiser(**inputs, return_dict=False)
    assert output.shape == shape


def test_the_transformer_of_z_image_takes_rows_of_several_sizes():
    (transformer,) = on_meta(lambda: ZImageTransformer2DModel(n_layers=1, n_refiner_layers=1))
    sizes = [(128, 128), (152, 104), (64, 64)]
    with torch.device("meta"):
        outputs = transformer(
            [empty(16, 1, *size) for size in sizes],
            torch.empty(3),
            [empty(length, 2560) for length in (20, 512, 1)],
            return_dict=False,
        )[0]
    assert [output.shape for output in outputs] == [(16, 1, *size) for size in sizes]


def test_the_transformer_of_qwen_image_takes_rows_of_several_sizes():
    (transformer,) = on_meta(lambda: QwenImageTransformer2DModel(**ONE))
    vae = AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1)  # fits colours, for which it must have memory
    text_encoder = SimpleNamespace(model=SimpleNamespace(language_model=None))
    parts = TransformerParts(None, ((None, text_encoder),), transformer, vae, {})
    model = QwenImage(parts, EngineConfig(dtype="bfloat16", channels_last=False))
    sizes = [(116, 208), (208, 116), (128, 128)]
    texts = [Conditioning({"encoder_hidden_states": empty(length, 3584)}) for length in (40, 512, 7)]
    latents = [torch.empty(16, *size, device="meta") for size in sizes]
    outputs = model.predict(latents, torch.empty(3, device="meta"), collate(texts), None)
    assert [output.shape for output in outputs] == [(16, *size) for size in sizes]


_SD2_UNET = {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True}
_TWO_TEXTS = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
_REFINER_UNET = {
    **_TWO_TEXTS,
    "sample_size": 128,
    "block_out_channels": (384, 768, 1536, 1536),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 4, 4, 4),  # the first block has none, so any number
    "attention_head_dim": (6, 12, 24, 24),
    "cross_attention_dim": 1280,
    "projection_class_embeddings_input_dim": 2560,
    "use_linear_projection": True,
}


@pytest.mark.parametrize(
    ("family", "unet", "texts"),
    [
        ("sd1", {"cross_attention_dim": 768}, {"text_encoder": _CLIP_L}),
        ("sd2", _SD2_UNET, {"text_encoder": _OPEN_CLIP_H}),
        ("sdxl", XL_UNET, {"text_encoder": _CLIP_L, "text_encoder_2": _OPEN_CLIP_G}),
        ("refiner", _REFINER_UNET, {"text_encoder_2": _OPEN_CLIP_G}),
    ],
)
def test_published_models_get_their_configurations(family, unet, texts, tmp_path):
    """By the shapes alone, in a file without numbers."""
    classes = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
    with torch.device("meta"):
        models = {"unet": UNet2DConditionModel(**unet), "vae": AutoencoderKL(**_KL_VAE)}
        configs = {part: CLIPTextConfig(**settings) for part, settings in texts.items()}
        models |= {part: classes[part](config) for part, config in configs.items()}
    parts = {part: model.state_dict() for part, model in models.items()}
    file = single_files.save_header(tmp_path / "a.safetensors", single_files.checkpoint_tensors(parts, family))
    found = FolderPlan(read_checkpoint(file), None).configs
    for name, value in unet.items():
        assert found["unet"][name] == (list(value) if isinstance(value, tuple) else value)
    for part, settings in texts.items():
        assert {name: found[part][name] for name in settings} == settings
    if family != "refiner":
        assert {name: found["vae"][name] for name in _KL_VAE} == {
            name: list(value) if isinstance(value, tuple) else value for name, value in _KL_VAE.items()
        }
        assert found["unet"]["sample_size"] == (128 if family == "sdxl" else 64)
