"""The values of the built-in variables of a request, its images and its texts."""

import math
from collections.abc import Callable, Collection, Container, Iterator, Sequence

from noria.frontend.engines.results import RawImage
from noria.frontend.services.images.image_writer import count_luma
from noria.models.encoder.tokenizers.tokens import TextInput, TokenizedText
from noria.protocol.diffusion import DiffusionPayload
from noria.protocol.text import EncoderModelSpec
from noria.statistics.values import Values, luma_values, prompt_values, text_values
from noria.statistics.variables import BUILT_IN

SAFETY_SCORE = "image_safety_score"
_OF_PIXELS = frozenset(variable.name for variable in BUILT_IN["images"]) - {SAFETY_SCORE}
_MAX_TEXTS = 16  # texts of one request that are counted; if it has more, so many, evenly spread


def request_values(payload: DiffusionPayload, wanted: Container[str]) -> Values:
    """Return the values of a request of images."""
    parameters: Values = [
        ("inference_steps", payload.inference_steps),
        ("guidance_scale", payload.guidance_scale),
        ("image_size", f"{payload.width}x{payload.height}"),
        ("scheduler", payload.scheduler),
    ]
    return [*prompt_values(payload.prompt, wanted), *(each for each in parameters if each[0] in wanted)]


def image_values(images: Sequence[RawImage], wanted: Container[str]) -> Values:
    """Return the values of the pixels of images; to be called in a thread."""
    if not any(name in wanted for name in _OF_PIXELS):
        return []
    return [value for image in images for value in luma_values(count_luma(image), wanted)]


def safety_values(images: Sequence[RawImage], wanted: Container[str]) -> Values:
    """Return the safety scores of images, refused ones included."""
    scores = [image.safety_score for image in images if SAFETY_SCORE in wanted]
    return [(SAFETY_SCORE, score) for score in scores if score is not None]


def encoding_values(
    spec: EncoderModelSpec,
    inputs: Sequence[TextInput],
    texts: Sequence[TokenizedText],
    row_of: "Callable[[int], memoryview[float]]",
    wanted: Collection[str],
    *,
    is_normalized: bool,
) -> Values:
    """Return the values of a request of texts: of 16 of them, if it has more.

    `inputs` are empty if the client has tokenized the texts; `row_of` returns a row of an embedding or of labels.
    """
    values: Values = []
    for index in _spread(len(texts)):
        text = texts[index]
        if inputs:
            given = inputs[index]
            values += text_values(given if isinstance(given, str) else " ".join(given), wanted)
            if "text_unknown_ratio" in wanted:
                values.append(("text_unknown_ratio", text.num_unknown / text.num_tokens))
        if "text_tokens" in wanted and text.token_ids:  # not of an image
            values.append(("text_tokens", text.num_tokens))
        if spec.task == "embedding" and "embedding_norm" in wanted and not is_normalized:
            values.append(("embedding_norm", math.hypot(*row_of(index))))
        if spec.task == "classification" and "text_label" in wanted:
            row = list(row_of(index))
            values.append(("text_label", spec.labels[row.index(max(row))]))
    return values


def _spread(num: int) -> Iterator[int]:
    """Yield all indices, or 16 of them, evenly spread."""
    kept = min(num, _MAX_TEXTS)
    return (index * num // kept for index in range(kept))
