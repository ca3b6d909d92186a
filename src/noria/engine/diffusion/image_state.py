"""A running image as it goes on in another slot, or another engine: its place in its table, and what is weighed later.

What follows from the request is not part of it: the target encodes texts and images again, and draws again all noise
up to there. The target has compiled the table itself; the rows that are sent only have to agree with it, since another
machine may round a fit differently.

Shapes: S slots, K columns of history, P places that later calls weigh, E elements of an image's latents, N calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from noria.engine.diffusion.device_transfer import copy_to_host
from noria.engine.resumption import InvalidStateError
from noria.protocol.messages import ImageState
from noria.sampling.step import clear_slot
from noria.sampling.tables import SamplerTable, window_of
from noria.scheduling.types import ReleasedImage

_ROUNDING = 1e-5  # fits in float32 agree to 1e-7; another scheduler, or another number of steps, is off by 1e-3


@dataclass(frozen=True, eq=False)
class BegunImage:
    """An image that goes on at `call`, with the latents of places before it, in the host's memory."""

    call: int
    samples: tuple[int, ...]
    outputs: tuple[int, ...]
    latents_PE: torch.Tensor  # float32 latents of the samples, then of the outputs
    copied: "torch.cuda.Event | None" = None  # None: no copy of them is pending

    def write(self, history_SKE: torch.Tensor, slot: int) -> None:
        """Write the image into its slot; waits for no device, and takes none of its memory."""
        clear_slot(history_SKE, slot)
        columns = _columns(self.samples, self.outputs, window_of(history_SKE.shape[1]))
        for column, latents_E in zip(columns, self.latents_PE, strict=True):
            history_SKE[slot, column].copy_(latents_E, non_blocking=True)


def save_image(call: int, slot: int, table: SamplerTable, history_SKE: torch.Tensor) -> BegunImage:
    """Return the image in `slot`, which goes on at `call`; waits for no device, and takes none of its memory."""
    samples, outputs = table.weighed_from(call)
    columns = _columns(samples, outputs, window_of(history_SKE.shape[1]))
    latents_PE, copied = copy_to_host([history_SKE[slot, column] for column in columns])
    return BegunImage(call, samples, outputs, latents_PE, copied)


def dump_image(released: ReleasedImage, table: SamplerTable, begun: BegunImage) -> tuple[ImageState, bytes]:
    """Return the state of a saved image, and its bytes; waits for the device."""
    call, batch_size_sum = released.progress
    assert begun.call == call, released
    if begun.copied is not None:
        begun.copied.synchronize()
    data = _rows(table).tobytes() + begun.latents_PE.numpy().astype("<f4", copy=False).tobytes()
    return ImageState(released.image.index, call, batch_size_sum, begun.samples, begun.outputs, len(data)), data


def load_image(state: ImageState, data: memoryview, table: SamplerTable, num_elements: int) -> BegunImage:
    """Return the image that another engine has dumped.

    Raises InvalidStateError: it is of another table or size, lacks what later calls weigh, or is not finite.
    """
    if not 0 < state.call <= table.num_calls:
        raise InvalidStateError(f"call {state.call} is none of {table.num_calls}")
    rows_NR = _rows(table)
    sent = (*state.samples, *state.outputs)
    if len(data) != rows_NR.nbytes + 4 * len(sent) * num_elements:
        raise InvalidStateError(
            f"{len(data)} bytes are not {len(sent)} places of {num_elements} values and {table.num_calls} rows"
        )
    values = np.frombuffer(data, "<f4")
    if not np.allclose(values[: rows_NR.size], rows_NR.ravel(), rtol=_ROUNDING, atol=_ROUNDING):
        raise InvalidStateError("its table is another one")
    samples, outputs = table.weighed_from(state.call)
    missing = [q for q in samples if q not in state.samples] + [q for q in outputs if q not in state.outputs]
    if missing:
        raise InvalidStateError(f"the latents of call {missing[0]} are missing, which call {state.call} depends on")
    latents_PE = values[rows_NR.size :].reshape(len(sent), num_elements)
    places = [state.samples.index(q) for q in samples]
    places += [len(state.samples) + state.outputs.index(q) for q in outputs]
    latents_PE = latents_PE[places].astype(np.float32)  # a copy, which does not keep the frame
    if not np.isfinite(latents_PE).all():
        raise InvalidStateError("its latents are not finite")
    return BegunImage(state.call, samples, outputs, torch.from_numpy(latents_PE))


def _columns(samples: Sequence[int], outputs: Sequence[int], window: int) -> list[int]:
    """Return the columns of a history with this window, as `sampling/tables.py` lays them out."""
    return [q % window for q in samples] + [window + q % window for q in outputs]


def _rows(table: SamplerTable) -> NDArray[np.float32]:
    """Return what determines the calls of a table, [N, 11]."""
    return np.column_stack([table.coefficients, table.input_scale, table.timesteps]).astype("<f4")
