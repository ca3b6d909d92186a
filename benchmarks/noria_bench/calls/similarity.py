"""How near one image is to another: SSIM, and LPIPS where its package is installed."""

import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Image = NDArray[np.uint8]
"""[height, width, 3]"""
Lpips = Callable[[Image, Image], float]
"""The distance of two images: 0 if they are equal."""

_RADIUS_PX, _SIGMA_PX = 5, 1.5
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


def ssim(image: Image, reference: Image) -> float:
    """The mean structural similarity of the three channels (Wang et al., 2004, eq. 13): 1 if the images are equal.

    The windows are Gaussian, of 11 px and σ 1.5, and lie wholly in the image, which has at least 11 px a side.
    """
    x, y = (each.astype(np.float64) for each in (image, reference))

    def local_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        means: NDArray[np.float64] = gaussian_filter(values, _SIGMA_PX, radius=_RADIUS_PX, axes=(0, 1))
        return means[_RADIUS_PX:-_RADIUS_PX, _RADIUS_PX:-_RADIUS_PX]

    mean_x, mean_y = local_mean(x), local_mean(y)
    variances = local_mean(x * x) - mean_x**2 + local_mean(y * y) - mean_y**2
    covariance = local_mean(x * y) - mean_x * mean_y
    similarity = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return float((similarity / ((mean_x**2 + mean_y**2 + _C1) * (variances + _C2))).mean())


def load_lpips() -> tuple[Lpips | None, str]:
    """Return LPIPS of the package `lpips` with its AlexNet on the CPU; or None, and why it is not measured."""
    if importlib.util.find_spec("lpips") is None:
        return None, "LPIPS is not measured: pip install lpips torchvision"
    try:
        import lpips

        network = lpips.LPIPS(net="alex", verbose=False)
    except Exception as error:  # torchvision does not fit torch, or cannot download the weights
        return None, f"LPIPS is not measured: its network cannot be loaded ({type(error).__name__}: {error})"

    @torch.inference_mode()
    def distance(image: Image, reference: Image) -> float:
        tensors = [torch.from_numpy(each / 127.5 - 1).float().permute(2, 0, 1)[None] for each in (image, reference)]
        return float(network(*tensors))

    return distance, ""
