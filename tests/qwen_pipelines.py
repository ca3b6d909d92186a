"""Diffusers' pipelines of Qwen-Image that read images, without torchvision, and requests with reference images."""

import io
import json

import numpy as np
import PIL.Image
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    BatchFeature,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flow_pipelines import make_request
from noria.frontend.services.images.request_images import check_references
from noria.images.start_image import ImageFiles, RequestImages

SHOWN = [(80, 70), (140, 66), (64, 96)]  # sizes of reference images


class _Processor:
    """A processor of diffusers' pipelines without torchvision: each image is as many tokens as it has parts."""

    def __init__(self, tokenizer, *, has_types, **options):
        self.tokenizer, self._has_types = tokenizer, has_types
        self._read = Qwen2VLImageProcessorPil(**options)

    def apply_chat_template(self, messages, **_):
        (message,) = messages
        text = f"<|im_start|>{message['role']}\n{message['content'][0]['text']}<|im_end|>\n"
        return [self.tokenizer(text).input_ids]

    def __call__(self, text, images=None, **options):
        if images is None:
            return self.tokenizer(text, **options)
        read = self._read(images=images, return_tensors="pt")
        (text,) = text
        for grid in read.image_grid_thw:
            text = text.replace("<|image_pad|>", "<one>" * (int(grid.prod()) // 4), 1)
        tokens = self.tokenizer([text.replace("<one>", "<|image_pad|>")], **options)
        if not self._has_types:
            return BatchFeature({**tokens, **read})
        types = (tokens.input_ids == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        return BatchFeature({**tokens, **read, "mm_token_type_ids": types})


def open_edit_plus(folder):
    tokenizer = Qwen2Tokenizer.from_pretrained(folder, subfolder="tokenizer")
    return QwenImageEditPlusPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler"),
        vae=AutoencoderKLQwenImage.from_pretrained(folder, subfolder="vae"),
        text_encoder=Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, subfolder="text_encoder"),
        tokenizer=None,
        processor=_Processor(tokenizer, has_types=False),
        transformer=QwenImageTransformer2DModel.from_pretrained(folder, subfolder="transformer"),
    )


def open_qwen_image_21(folder):
    tokenizer, halves = Qwen2Tokenizer.from_pretrained(folder, subfolder="processor"), [0.5] * 3
    options = {"patch_size": 16, "image_mean": halves, "image_std": halves, "do_resize": False}
    return QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler"),
        vae=AutoencoderKLQwenImage21.from_pretrained(folder, subfolder="vae"),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(folder, subfolder="text_encoder"),
        processor=_Processor(tokenizer, has_types=True, **options),
        transformer=QwenImage21Transformer2DModel.from_pretrained(folder, subfolder="transformer"),
        sample_sigmas=json.loads((folder / "model_index.json").read_text()).get("sample_sigmas"),
    )


def shown_images(number, num_images):
    """The reference images of the request with this number."""
    generator = np.random.default_rng(number)
    sizes = [SHOWN[(number + k) % 3] for k in range(num_images)]
    return [PIL.Image.fromarray(generator.integers(0, 256, (*size[::-1], 3), np.uint8)) for size in sizes]


def request_with_references(spec, number, num_images, **fields):
    """Return a request with reference images, and its frame of data."""
    files = []
    for image in shown_images(number, num_images):
        file = io.BytesIO()
        image.save(file, format="png")
        files.append(file.getvalue())
    images = RequestImages(ImageFiles(references=tuple(files)))
    request = make_request(number, reference_images=check_references(images.facts.references, spec), **fields)
    return request, memoryview(images.pixels(64, 64, spec)) if files else None
