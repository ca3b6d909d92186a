"""How well a faster form of a text encoder keeps the results of float32, measured on lines of documents.

The measurement is kept beside the export of the model. A form below the floor is rejected.
"""

import itertools
import logging
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from noria.engine.resources.fidelity import Fidelity, read_fidelity, write_fidelity
from noria.errors import ModelError
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import (
    FloatArray,
    Row,
    Session,
    TokenRow,
    compute,
    has_images,
    sample_images,
)
from noria.protocol.text import Activation, EncoderModelSpec

_log = logging.getLogger(__name__)

_NUM_IMAGES = 16
_CORPUS = pathlib.Path(__file__).with_name("corpus.txt")


def check_fidelity(
    spec: EncoderModelSpec,
    session: Session,
    load_float32: Callable[[], Session],
    floor: float,
    file: pathlib.Path,
) -> Fidelity:
    """Return the fidelity of `session`, which is in `file`, or else measured now and kept there.

    Raises ModelError: it is below `floor`.
    """
    fidelity = read_fidelity(file)
    if fidelity is None:
        fidelity = measure_fidelity(spec, load_float32(), session, corpus_rows(spec))
        write_fidelity(file, fidelity)
        _log.info("%s compared with float32: fidelity %s", spec.name, fidelity)
    if not fidelity.min >= floor:  # NaN is rejected, too
        raise ModelError(
            f"{spec.name} in this precision differs too much from float32: fidelity {fidelity}; "
            f"engine.encoder_min_fidelity is {floor:g}. Use engine.encoder_precision float32, or allow less."
        )
    return fidelity


def corpus_rows(spec: EncoderModelSpec) -> list[Row]:
    """The lines of the corpus as the model sees them; for a model that ranks, each with the line after it.

    For an image tower they are made-up images.
    """
    if has_images(spec.inputs):
        return [*sample_images(spec, _NUM_IMAGES)]
    lines = _CORPUS.read_text(encoding="utf-8").splitlines()
    pairs = list(itertools.pairwise(lines))
    texts = HuggingFaceTokenizer(spec).encode(pairs if spec.task == "reranking" else lines)
    num = len(spec.adapters) + 1
    return [TokenRow.of(text)._replace(adapter=index % num) for index, text in enumerate(texts)]


def measure_fidelity(spec: EncoderModelSpec, reference: Session, session: Session, rows: Sequence[Row]) -> Fidelity:
    """Compute `rows` with both sessions, and compare the results."""
    return compare(spec, compute(reference, rows), compute(session, rows))


def compare(spec: EncoderModelSpec, right: Sequence[FloatArray], got: Sequence[FloatArray]) -> Fidelity:
    """Compare the results of each text, or token if they are of tokens.

    For embeddings it is the cosine. For labels it is 1 - the largest difference of a score: a logit has no direction.
    """
    values = [_likeness(spec, *results) for results in zip(right, got, strict=True)]
    return Fidelity(float(np.min(values)), float(np.mean(values)), len(values))


def _likeness(spec: EncoderModelSpec, right: FloatArray, got: FloatArray) -> float:
    if spec.task in ("embedding", "sparse_embedding"):
        norms = np.linalg.norm(right) * np.linalg.norm(got)
        return float(right.ravel() @ got.ravel() / norms) if norms else float(np.array_equal(right, got))
    if spec.task == "token_embedding":
        norms = np.linalg.norm(right, axis=1) * np.linalg.norm(got, axis=1)
        return float(((right * got).sum(1) / norms).min())
    return 1.0 - float(np.abs(_scores(right, spec.activation) - _scores(got, spec.activation)).max())


def _scores(logits: FloatArray, activation: Activation) -> FloatArray:
    """Scores of logits; of those without an activation, too, the sigmoid is compared, since they have no scale."""
    if activation == "softmax":
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        softmax: FloatArray = powers / powers.sum(-1, keepdims=True)
        return softmax
    sigmoid: FloatArray = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    return sigmoid
