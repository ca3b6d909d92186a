"""The interface of a loaded text encoder, as the executor uses it.

Shapes: B texts, L tokens of each, padding included, D numbers in a row of a result.
"""

from typing import Protocol

import numpy as np


class DoesNotFitMemoryError(Exception):
    """A batch does not fit the device's memory; a smaller one may."""


class EncoderModel(Protocol):
    """A loaded text encoder. Sessions run at the same time, each called by one thread."""

    device: str  # "cpu", or as torch names it
    num_sessions: int

    def run(self, session: int, token_ids_BL: np.ndarray, mask_BL: np.ndarray, type_ids_BL: np.ndarray) -> np.ndarray:
        """Encode a batch in a session, from 0 on; the arguments are int64, the mask is 1 for tokens and 0 for padding.

        Returns pooled embeddings that are not normalized, or logits [B, D], float32; of token classification [B, L, D].

        Raises:
            DoesNotFitMemoryError: the batch is too large.

        """
        ...
