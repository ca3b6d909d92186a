"""The image towers of CLIP and SigLIP in torch, with squares or, of SigLIP 2 (NaFlex), images of any shape.

Of the latter transformers resizes the table of positions for one image after the other. Resizing is linear, so that
here each patch has the sum of the table's rows by weights of its own, which a graph computes for a batch.

Shapes: B images, N patches of the largest, P pixels of a patch's side, G rows of the square table, D numbers.
"""

from typing import Any

import torch

from noria.protocol.text import ImageInput


class ImageModule(torch.nn.Module):
    """An image tower of transformers whose result are embeddings [B, D]."""

    scale_311: torch.Tensor
    shift_311: torch.Tensor

    def __init__(self, model: Any, image_input: ImageInput, output: int) -> None:
        """`output` is the place of the result among the model's outputs."""
        super().__init__()
        self.model, self._output = model, output
        for name, values in (("scale_311", image_input.scale), ("shift_311", image_input.shift)):
            self.register_buffer(name, torch.tensor(values).reshape(3, 1, 1), persistent=False)

    def forward(self, pixels_BSS3: torch.Tensor) -> torch.Tensor:
        """Compute images of uint8 RGB."""
        values_B3SS = pixels_BSS3.permute(0, 3, 1, 2).float() * self.scale_311 + self.shift_311
        result: torch.Tensor = self.model(pixel_values=values_B3SS.to(self.model.dtype))[self._output]
        return result.float()


class PatchModule(ImageModule):
    """An image tower of transformers whose result are embeddings [B, D] of images of any shape."""

    def __init__(self, model: Any, image_input: ImageInput, output: int) -> None:
        """Do as `ImageModule`."""
        super().__init__(model, image_input, output)
        model.embeddings.resize_positional_embeddings = positions_of

    def forward(  # type: ignore[override]
        self, pixels_BNPP3: torch.Tensor, shapes_B2: torch.Tensor
    ) -> torch.Tensor:
        """Compute patches of uint8 RGB; image b has those of its rows and columns, row by row, and others behind."""
        values_BNPP3 = pixels_BNPP3.float() * self.scale_311.flatten() + self.shift_311.flatten()
        shapes_B2 = shapes_B2.clamp(min=1)  # a row that only fills up a batch has none
        number_B1 = shapes_B2[:, :1] * shapes_B2[:, 1:]
        mask_BN = (torch.arange(pixels_BNPP3.shape[1], device=shapes_B2.device) < number_B1).long()
        result: torch.Tensor = self.model(
            pixel_values=values_BNPP3.flatten(2).to(self.model.dtype),
            pixel_attention_mask=mask_BN,
            spatial_shapes=shapes_B2,
        )[self._output]
        return result.float()


def positions_of(table_GGD: torch.Tensor, shapes_B2: torch.Tensor, max_length: int) -> torch.Tensor:
    """Return the position of each patch, [B, max_length, D]: the table, resized to the rows and columns of its image.

    That of patches behind the image's own may be anything.
    """
    size = table_GGD.shape[0]
    height_B1, width_B1 = shapes_B2[:, :1], shapes_B2[:, 1:]
    places_N = torch.arange(max_length, device=shapes_B2.device)
    rows_BNG = _weights(torch.div(places_N, width_B1, rounding_mode="floor"), height_B1, size)
    columns_BNG = _weights(places_N % width_B1, width_B1, size)
    weights_BNGG = rows_BNG.unsqueeze(3) * columns_BNG.unsqueeze(2)
    return (weights_BNGG.flatten(2) @ table_GGD.flatten(0, 1).float()).to(table_GGD.dtype)


def _weights(places_BN: torch.Tensor, length_B1: torch.Tensor, size: int) -> torch.Tensor:
    """Return what each of `size` numbers counts at a place of `length`: bilinear, over all of them if it is smaller."""
    step_B1 = size / length_B1.float()
    reach_B11 = step_B1.clamp(min=1.0).unsqueeze(2)
    centers_BN1 = ((places_BN + 0.5) * step_B1).unsqueeze(2)
    numbers_G = torch.arange(size, device=places_BN.device) + 0.5
    weights_BNG = (1.0 - (numbers_G - centers_BN1).abs() / reach_B11).clamp(min=0.0)
    return weights_BNG / weights_BNG.sum(2, keepdim=True).clamp(min=1e-12)
