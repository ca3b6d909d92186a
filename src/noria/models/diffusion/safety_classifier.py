"""The check of generated images by an image classifier of transformers, in float32, on the device of their model.

Pixels are prepared on the device: resized, cut and normalized as the folder's own image processor does it on a CPU.
That both agree is tested when the classifier is loaded, so that a processor with steps of its own is refused.

Shapes: B images, L labels, H × W size of an image, S × T size of the classifier's input.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from noria.errors import ModelError
from noria.models.adapters.safety_folders import PREPROCESSOR_FILE, STEM, SafetyFolder, SafetyRule
from noria.models.diffusion.part_loading import SharedParts, load_weights

_MODES = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_LARGEST_CROPPED_PX = 384  # ConvNeXt's processor cuts images only below this side
_TEST_PX = (80, 56)  # height and width of the test image, whose proportions no input has
_TEST_TOLERANCE = 1.5  # levels of 255: Pillow's weights are integers, so that a level may be rounded the other way


class _Preparation(NamedTuple):
    """The steps from pixels to the classifier's input."""

    size: tuple[int, int] | int  # height and width; a number is that of the shorter side, in the image's proportions
    crop: tuple[int, int] | None  # height and width of the middle that is kept
    mode: str
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, pixels_BHW3: torch.Tensor) -> torch.Tensor:
        """Return the classifier's input [B, 3, S, T] of pixels [B, H, W, 3], 0 to 255."""
        image_B3HW = pixels_BHW3.movedim(-1, 1).float()
        old_height, new_size = image_B3HW.shape[2], self._resized(*image_B3HW.shape[2:])
        for size in ((old_height, new_size[1]), new_size):  # as Pillow: one axis after the other, each in whole levels
            resized_B3HW = torch.nn.functional.interpolate(image_B3HW, size, mode=self.mode, antialias=True)
            image_B3HW = (resized_B3HW + 0.5).floor().clamp(0, 255)
        if self.crop is not None:
            (height, width), (crop_height, crop_width) = image_B3HW.shape[2:], self.crop
            top, left = (height - crop_height) // 2, (width - crop_width) // 2
            image_B3HW = image_B3HW[:, :, top : top + crop_height, left : left + crop_width]
        mean, std = (image_B3HW.new_tensor(each)[:, None, None] for each in (self.mean, self.std))
        prepared_B3ST: torch.Tensor = (image_B3HW * self.scale - mean) / std
        return prepared_B3ST

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        shorter = min(height, width)
        return height * self.size // shorter, width * self.size // shorter


class SafetyCheck:
    """A loaded classifier, and which of its answers are refused."""

    def __init__(self, rule: SafetyRule, classifier: Any, preparation: _Preparation) -> None:
        self.rule = rule
        self._classifier, self._preparation = classifier, preparation
        self._is_refused_L = torch.tensor(
            [label in rule.labels for label in rule.folder.labels], device=classifier.device
        )

    def scores(self, pixels_BHW3: torch.Tensor) -> torch.Tensor:
        """Return the scores [B] of images, uint8: the probability of the refused labels, 0 to 1.

        Of labels with a probability each it is the largest. What is not a number is 1.
        """
        logits_BL: torch.Tensor = self._classifier(pixel_values=self._preparation.apply(pixels_BHW3)).logits.float()
        if self.rule.folder.is_multi_label:
            scores_B: torch.Tensor = logits_BL.sigmoid().where(self._is_refused_L, 0).amax(dim=1)
        else:
            scores_B = logits_BL.softmax(dim=1).where(self._is_refused_L, 0).sum(dim=1)
        return scores_B.nan_to_num(nan=1.0).clamp(max=1.0)


_loaded: SharedParts[Any] = SharedParts()  # by digest and device


def is_loaded(rule: SafetyRule, device: str) -> bool:
    """Whether another model of this process holds the classifier."""
    return (rule.folder.digest, device) in _loaded


def load_safety_check(rule: SafetyRule, device: str) -> SafetyCheck:
    """Load the classifier of a rule onto a device.

    Raises ModelError: its weights do not match its configuration, or its images are prepared by steps of its own.
    """
    preparation = _read_preparation(rule.folder)
    classifier = _loaded.get((rule.folder.digest, device), lambda: _load(rule.folder, preparation, device))
    return SafetyCheck(rule, classifier, preparation)


def _load(folder: SafetyFolder, preparation: _Preparation, device: str) -> Any:
    """Load the classifier of a folder, and try it."""
    from transformers import AutoModelForImageClassification

    try:
        classifier = load_weights(AutoModelForImageClassification, folder.path, STEM, torch.float32, device)
        with torch.inference_mode():
            image = torch.zeros((1, *_TEST_PX, 3), dtype=torch.uint8, device=device)
            num_labels = classifier(pixel_values=preparation.apply(image)).logits.shape[1]
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the safety classifier in {folder.path} cannot be loaded: {error}") from error
    if num_labels != len(folder.labels):
        raise ModelError(
            f"{folder.path / 'config.json'}: id2label has {len(folder.labels)} labels, but the classifier answers "
            f"with {num_labels} numbers. Save the model again with save_pretrained."
        )
    return classifier


def _read_preparation(folder: SafetyFolder) -> _Preparation:
    """Return what the folder's image processor does, as a test image shows.

    Raises ModelError: there is no such processor, or it does something else.
    """
    import PIL.Image
    from transformers import AutoImageProcessor

    file = folder.path / PREPROCESSOR_FILE
    pixels_HW3 = np.random.default_rng(0).integers(0, 256, (*_TEST_PX, 3), np.uint8)
    try:
        processor: Any = AutoImageProcessor.from_pretrained(folder.path, backend="pil", local_files_only=True)
        expected_1 = processor(PIL.Image.fromarray(pixels_HW3), return_tensors="pt")["pixel_values"]
        preparation = _preparation_of(processor.to_dict())
        found_1 = preparation.apply(torch.from_numpy(pixels_HW3)[None])
        std = torch.tensor(preparation.std)[:, None, None]
        is_same = found_1.shape == expected_1.shape and bool(
            (((found_1 - expected_1) * std).abs().amax() / preparation.scale) <= _TEST_TOLERANCE
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:  # each processor raises its own kinds
        raise ModelError(f"{file}: the image processor that it describes cannot be used: {error!r}.") from error
    if not is_same:
        raise ModelError(
            f"{file}: the image processor {type(processor).__name__} does more than to resize (bilinear or bicubic), "
            "cut the middle out, and normalize. Use a classifier whose processor does only that."
        )
    return preparation


def _preparation_of(settings: dict[str, Any]) -> _Preparation:
    """Return the steps that a processor's settings describe, as far as there are such."""
    size, share = settings["size"], settings.get("crop_pct")
    cut = settings.get("crop_size") if settings.get("do_center_crop") else None
    crop = None if cut is None else (cut["height"], cut["width"])
    edge = size.get("shortest_edge")
    resized = (size["height"], size["width"]) if edge is None else edge
    if edge is not None and share is not None:  # ConvNeXt's
        is_cut = edge < _LARGEST_CROPPED_PX
        resized, crop = (int(edge / share), (edge, edge)) if is_cut else ((edge, edge), None)
    normalizes = settings.get("do_normalize", True)
    return _Preparation(
        resized,
        crop,
        _MODES[int(settings["resample"])],
        settings["rescale_factor"] if settings.get("do_rescale", True) else 1.0,
        tuple(settings["image_mean"]) if normalizes else (0.0,) * 3,
        tuple(settings["image_std"]) if normalizes else (1.0,) * 3,
    )
