"""Folders of image classifiers with few random weights, as transformers saves them."""

import pathlib
from typing import Any

import tiny_models


def save_classifier(
    folder: pathlib.Path,
    labels: tuple[str, ...] = ("normal", "nsfw"),
    processor: str = "ViT",
    settings: dict[str, Any] | None = None,
    **config: Any,
) -> pathlib.Path:
    """Save a ViT of 32 × 32 pixels with the image processor of a family, and return the folder."""
    import torch
    import transformers

    torch.manual_seed(3)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=32,
            patch_size=8,
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            **config,
        )
    )
    tiny_models.randomise(model)
    model.save_pretrained(folder)
    if settings is None:
        settings = {"size": {"height": 32, "width": 32}}
    getattr(transformers, f"{processor}ImageProcessorPil")(**settings).save_pretrained(folder)
    return folder
