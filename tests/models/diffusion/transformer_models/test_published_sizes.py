"""Parameters and memory of models as they are published, built without memory on the meta device."""

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

_TEXT = {"vocab_size": 49408, "max_position_embeddings": 77}
T5_XXL = T5Config(
    vocab_size=32128,
    d_model=4096,
    d_kv=64,
    d_ff=10240,
    num_layers=24,
    num_heads=64,
    feed_forward_proj="gated-gelu",
)
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


@pytest.fixture(scope="module")
def xl():
    """The parts of Stable Diffusion XL, in float16 but for the VAE, which overflows there."""
    with torch.device("meta"):
        first = CLIPTextConfig(
            **_TEXT, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
        )
        second = CLIPTextConfig(
            **_TEXT,
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=32,
            num_attention_heads=20,
            projection_dim=1280,
        )
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
        return {
            "unet": UNet2DConditionModel(**XL_UNET).half(),
            "text_encoder": CLIPTextModel(first).half(),
            "text_encoder_2": CLIPTextModelWithProjection(second).half(),
            "vae": vae,
        }


def test_parameters_of_stable_diffusion_xl(xl):
    parameters = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in xl.items()}
    assert parameters == {
        "unet": 2_567_463_684,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
        "vae": 83_653_863,
    }


def test_memory_of_stable_diffusion_xl(xl):
    """The figure of docs/models.md."""
    weights = sum(parameter.nbytes for part in xl.values() for parameter in part.parameters())
    assert round(weights / 1e9, 1) == 7.1
    tokens, pooled = torch.empty(77, 2048, dtype=torch.float16), torch.empty(1280, dtype=torch.float16)
    assert Conditioning({"tokens": tokens}, {"pooled": pooled}).nbytes == 317_952


def test_the_unet_takes_what_the_family_gives_it(xl):
    rows, dtype = 3, torch.float16
    with torch.device("meta"):
        output = xl["unet"](
            torch.empty(rows, 4, 104, 152, dtype=dtype),
            torch.empty(rows),
            torch.empty(rows, 77, 768 + 1280, dtype=dtype),
            added_cond_kwargs={
                "text_embeds": torch.empty(rows, xl["text_encoder_2"].config.projection_dim, dtype=dtype),
                "time_ids": torch.empty(rows, 6, dtype=dtype),
            },
        ).sample
    assert output.shape == (rows, 4, 104, 152)


def qwen3_4b(num_hidden_layers=36):
    """The text encoder of Z-Image and FLUX.2 klein."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )


def mistral_small(num_hidden_layers):
    """The text encoder of FLUX.2 dev: Mistral Small 3."""
    return MistralConfig(
        vocab_size=131_072,
        hidden_size=5120,
        intermediate_size=32_768,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )


@pytest.fixture(scope="module")
def z_image():
    """The parts of Z-Image, in bfloat16."""
    with torch.device("meta"):
        text = qwen3_4b()
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=16,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        parts = {"transformer": ZImageTransformer2DModel(), "text_encoder": Qwen3Model(text), "vae": vae}
        return {name: part.bfloat16() for name, part in parts.items()}


def test_parameters_and_memory_of_z_image(z_image):
    """The figures of docs/models.md."""
    parameters = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in z_image.items()}
    assert parameters == {"transformer": 6_154_908_736, "text_encoder": 4_022_468_096, "vae": 83_819_683}
    assert round(2 * sum(parameters.values()) / 1e9, 1) == 20.5
    assert Conditioning({"caption": torch.empty(512, 2560, dtype=torch.bfloat16)}).nbytes == 2_621_440


def test_the_transformer_of_z_image_takes_rows_of_several_sizes(z_image):
    sizes, lengths = [(128, 128), (152, 104), (64, 64)], [20, 512, 1]
    with torch.device("meta"):
        outputs = z_image["transformer"](
            [torch.empty(16, 1, *size, dtype=torch.bfloat16) for size in sizes],
            torch.empty(3),
            [torch.empty(length, 2560, dtype=torch.bfloat16) for length in lengths],
            return_dict=False,
        )[0]
    assert [output.shape for output in outputs] == [(16, 1, *size) for size in sizes]


@pytest.fixture(scope="module")
def qwen_image():
    """The parts of Qwen-Image, in bfloat16."""
    text = {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    with torch.device("meta"):
        whole = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text))
        parts = {
            "transformer": QwenImageTransformer2DModel(),
            "text_encoder": whole.model.language_model,
            "vae": AutoencoderKLQwenImage(),
        }
        return {name: part.bfloat16() for name, part in parts.items()}


def test_parameters_and_memory_of_qwen_image(qwen_image):
    """The figures of docs/models.md."""
    parameters = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in qwen_image.items()}
    assert parameters == {"transformer": 20_430_401_088, "text_encoder": 7_070_619_136, "vae": 126_892_531}
    assert round(2 * sum(parameters.values()) / 1e9, 1) == 55.3
    tokens = torch.empty(512, 3584, dtype=torch.bfloat16)
    assert Conditioning({"encoder_hidden_states": tokens}).nbytes == 3_670_016


def test_the_transformer_of_qwen_image_takes_rows_of_several_sizes(qwen_image):
    config = EngineConfig(dtype="bfloat16", channels_last=False)
    vae = AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1)  # fits colours, for which it must have memory
    text_encoder = SimpleNamespace(model=SimpleNamespace(language_model=None))
    parts = TransformerParts(None, ((None, text_encoder),), qwen_image["transformer"], vae, {})
    model = QwenImage(parts, config)
    sizes, lengths = [(116, 208), (208, 116), (128, 128)], [40, 512, 7]
    texts = [
        Conditioning({"encoder_hidden_states": torch.empty(n, 3584, dtype=torch.bfloat16, device="meta")})
        for n in lengths
    ]
    latents = [torch.empty(16, *size, device="meta") for size in sizes]
    outputs = model.predict(latents, torch.empty(3, device="meta"), collate(texts), None)
    assert [output.shape for output in outputs] == [(16, *size) for size in sizes]


def test_parameters_and_memory_of_krea_2(z_image):
    """The figures of docs/models.md; its text encoder has the sizes of Z-Image's, its VAE is that of Qwen-Image."""
    with torch.device("meta"):
        parts = Krea2Transformer2DModel(), z_image["text_encoder"], AutoencoderKLQwenImage()
    parameters = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert parameters == [12_820_073_036, 4_022_468_096, 126_892_531]
    assert round(2 * sum(parameters) / 1e9, 1) == 33.9
    tokens = torch.empty(512, 12, 2560, dtype=torch.bfloat16)
    assert Conditioning({"encoder_hidden_states": tokens}).nbytes == 31_457_280


def test_parameters_and_memory_of_lumina_2(z_image):
    """The figures of docs/models.md; its VAE has the sizes of that of Z-Image."""
    with torch.device("meta"):
        parts = Lumina2Transformer2DModel(cap_feat_dim=2304), Gemma2Model(Gemma2Config()), z_image["vae"]
    parameters = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert parameters == [2_609_769_152, 2_614_341_888, 83_819_683]
    assert round(2 * sum(parameters) / 1e9, 1) == 10.6
    tokens = torch.empty(256, 2304, dtype=torch.bfloat16)
    assert Conditioning({"encoder_hidden_states": tokens}).nbytes == 1_179_648


@pytest.fixture(scope="module")
def flux():
    """The transformer of FLUX.1 dev and its T5, in bfloat16."""
    with torch.device("meta"):
        return FluxTransformer2DModel(guidance_embeds=True).bfloat16(), T5EncoderModel(T5_XXL).bfloat16()


def test_parameters_and_memory_of_flux(flux):
    """The figures of docs/models.md; CLIP and the VAE add 0.4 GB."""
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in flux]
    assert counts == [11_901_408_320, 4_762_310_656]
    assert round(2 * sum(counts) / 1e9 + 0.4, 1) == 33.7
    tokens, pooled = torch.empty(512, 4096, dtype=torch.bfloat16), torch.empty(768, dtype=torch.bfloat16)
    assert round(Conditioning({"tokens": tokens}, {"pooled": pooled}).nbytes / 1e6, 1) == 4.2


def test_the_transformer_takes_what_the_family_gives_it(flux):
    rows, dtype = 2, torch.bfloat16
    with torch.device("meta"):
        (output,) = flux[0](
            hidden_states=torch.empty(rows, 76 * 52, 64, dtype=dtype),
            encoder_hidden_states=torch.empty(rows, 512, 4096, dtype=dtype),
            pooled_projections=torch.empty(rows, 768, dtype=dtype),
            timestep=torch.empty(rows, dtype=dtype),
            guidance=torch.empty(rows),
            img_ids=torch.empty(76 * 52, 3, dtype=dtype),
            txt_ids=torch.empty(512, 3, dtype=dtype),
            return_dict=False,
        )
    assert output.shape == (rows, 76 * 52, 64)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192},
            2.03,
        ),
        (
            {
                "num_layers": 38,
                "num_attention_heads": 38,
                "caption_projection_dim": 2432,
                "pos_embed_max_size": 192,
                "qk_norm": "rms_norm",
            },
            8.06,
        ),
    ],
    ids=["3 medium", "3.5 large"],
)
def test_parameters_of_stable_diffusion_3(config, expected):
    """The figures of docs/models.md, in billions."""
    with torch.device("meta"):
        transformer = SD3Transformer2DModel(**config)
    assert round(sum(parameter.numel() for parameter in transformer.parameters()) / 1e9, 2) == expected


KLEIN = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}


@pytest.mark.parametrize(
    ("config", "text_class", "text", "billions", "gigabytes", "prompt_megabytes"),
    [
        (KLEIN, Qwen3Model, qwen3_4b(28), [3.88, 3.22, 0.08], 14.3, 7.9),  # 28 layers of Qwen3 are kept
        ({}, MistralModel, mistral_small(31), [32.22, 17.9, 0.08], 100.4, 15.7),  # 31 of Mistral
    ],
    ids=["klein 4B", "dev"],
)
def test_parameters_and_memory_of_flux_2(config, text_class, text, billions, gigabytes, prompt_megabytes):
    """The figures of docs/models.md."""
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(**config).bfloat16()
        parts = transformer, text_class(text), AutoencoderKLFlux2()
        height, width, text_width = 76, 52, 3 * text.hidden_size  # tokens of an image of 1216 × 832 px
        (output,) = transformer(
            hidden_states=torch.empty(2, height * width, 128, dtype=torch.bfloat16),
            encoder_hidden_states=torch.empty(2, 512, text_width, dtype=torch.bfloat16),
            timestep=torch.empty(2, dtype=torch.bfloat16),
            guidance=torch.empty(2),
            img_ids=torch.empty(height * width, 4),
            txt_ids=torch.empty(512, 4),
            return_dict=False,
        )
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert [round(count / 1e9, 2) for count in counts] == billions
    assert round(2 * sum(counts) / 1e9, 1) == gigabytes
    assert output.shape == (2, height * width, 128)
    prompt = Conditioning({"tokens": torch.empty(512, text_width, dtype=torch.bfloat16)})
    assert round(prompt.nbytes / 1e6, 1) == prompt_megabytes


def test_parameters_and_memory_of_qwen_image_21():
    """The figures of docs/models.md; the text encoder is that of 8 billion parameters, without its head."""
    text = Qwen3VLTextConfig(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    with torch.device("meta"):
        encoder = Qwen3VLTextModel(text), Qwen3VLVisionModel(Qwen3VLVisionConfig(out_hidden_size=4096))
        parts = QwenImage21Transformer2DModel(), torch.nn.ModuleList(encoder), AutoencoderKLQwenImage21()
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert [round(count / 1e9, 2) for count in counts] == [7.12, 8.14, 0.34]
    assert round(2 * sum(counts) / 1e9, 1) == 31.2
    prompt = Conditioning({"tokens": torch.empty(1024 + 5, 4096, dtype=torch.bfloat16)})
    assert round(prompt.nbytes / 1e6, 1) == 8.4


def test_parameters_of_chroma():
    """The figures of docs/models.md; T5 and the VAE are those of FLUX.1."""
    rows, dtype = 2, torch.bfloat16
    with torch.device("meta"):
        transformer = ChromaTransformer2DModel().to(dtype)
        (output,) = transformer(
            hidden_states=torch.empty(rows, 76 * 52, 64, dtype=dtype),
            encoder_hidden_states=torch.empty(rows, 512, 4096, dtype=dtype),
            timestep=torch.empty(rows, dtype=dtype),
            img_ids=torch.empty(76 * 52, 3, dtype=dtype),
            txt_ids=torch.empty(512, 3, dtype=dtype),
            attention_mask=torch.empty(rows, 512 + 76 * 52, dtype=dtype),
            return_dict=False,
        )
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert round(count / 1e9, 2) == 8.90
    assert round(2 * (count + 4_762_310_656) / 1e9 + 0.2, 1) == 27.5
    assert output.shape == (rows, 76 * 52, 64)


@pytest.fixture(scope="module")
def deep_vae():
    """The VAE of Sana, of which a latent is 32 × 32 pixels."""
    with torch.device("meta"):
        return AutoencoderDC(
            encoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            decoder_block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            decoder_norm_types="rms_norm",
            upsample_block_type="interpolate",
            downsample_block_type="Conv",
        )


_SANA_600M = {
    "num_attention_heads": 36,
    "num_layers": 28,
    "cross_attention_dim": 1152,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
}


@pytest.mark.parametrize(("settings", "parameters", "gigabytes"), [(_SANA_600M, 0.59, 7.0), ({}, 1.60, 9.1)])
def test_parameters_and_memory_of_sana(deep_vae, settings, parameters, gigabytes):
    """The figures of docs/models.md."""
    with torch.device("meta"):
        transformer = SanaTransformer2DModel(**settings).bfloat16()
        parts = transformer, Gemma2Model(Gemma2Config()), deep_vae
        (output,) = transformer(
            torch.empty(2, 32, 26, 38, dtype=torch.bfloat16),
            encoder_hidden_states=torch.empty(2, 300, 2304, dtype=torch.bfloat16),
            encoder_attention_mask=torch.ones(2, 300, dtype=torch.bool),
            timestep=torch.empty(2),
            return_dict=False,
        )
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert [round(count / 1e9, 2) for count in counts] == [parameters, 2.61, 0.31]
    assert round(2 * sum(counts) / 1e9, 1) == gigabytes
    assert output.shape == (2, 32, 26, 38)
    assert Conditioning({"tokens": torch.empty(300, 2304, dtype=torch.bfloat16)}).nbytes == 1_382_400


def test_parameters_and_memory_of_pixart_sigma(xl):
    """The figures of docs/models.md; its VAE is that of Stable Diffusion XL."""
    dtype = torch.float16
    with torch.device("meta"):
        transformer = PixArtTransformer2DModel(caption_channels=4096, use_additional_conditions=False).to(dtype)
        parts = transformer, T5EncoderModel(T5_XXL), xl["vae"]
        (output,) = transformer(
            torch.empty(2, 4, 104, 152, dtype=dtype),
            encoder_hidden_states=torch.empty(2, 300, 4096, dtype=dtype),
            encoder_attention_mask=torch.ones(2, 300, dtype=torch.bool),
            timestep=torch.empty(2),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert [round(count / 1e9, 2) for count in counts] == [0.61, 4.76, 0.08]
    assert round(2 * sum(counts) / 1e9, 1) == 10.9
    assert output.shape == (2, 8, 104, 152)
    assert round(Conditioning({"tokens": torch.empty(300, 4096, dtype=dtype)}).nbytes / 1e6, 1) == 2.5


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
_CLIP_L = {"vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_OPEN_CLIP_H = {
    "vocab_size": 49408, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23,
    "num_attention_heads": 16, "hidden_act": "gelu",
}  # fmt: skip
_OPEN_CLIP_G = _OPEN_CLIP_H | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280,
}  # fmt: skip


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
    classes = {
        "text_encoder": CLIPTextModel,
        "text_encoder_2": CLIPTextModelWithProjection,
    }
    vae = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
    }
    with torch.device("meta"):
        models = {"unet": UNet2DConditionModel(**unet), "vae": AutoencoderKL(**vae)}
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
        assert {name: found["vae"][name] for name in vae} == {
            name: list(value) if isinstance(value, tuple) else value for name, value in vae.items()
        }
        assert found["unet"]["sample_size"] == (128 if family == "sdxl" else 64)
