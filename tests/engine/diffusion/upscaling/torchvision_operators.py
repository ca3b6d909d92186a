"""Two operators that torchvision's build for CUDA lacks beside a torch for CPUs, and that its import asks for."""

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
