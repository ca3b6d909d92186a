"""Messages that a fake engine sends for a request that it computes, with the bytes beside them, from flat images."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from noria.protocol.diffusion import DiffusionPayload
from noria.protocol.messages import Finished, FromEngine, ImageDone, Preview, Progress, Timings
from noria.protocol.request import EngineRequest, ImageRequest
from noria.protocol.text import EncoderModelSpec, TextPayload, TextResult, TextTimings
from noria.testing.fake_encoder import fake_vector

Reply = tuple[FromEngine, bytes | None]
Colour = Callable[[int], tuple[int, int, int]]  # RGB of the image of a seed

_PREVIEW_WIDTH_PX, _PREVIEW_HEIGHT_PX = 4, 3
_SAFETY_THRESHOLD = 0.5
_MAX_WORDS = 75  # words of a prompt; as CLIP's tokens, without its first and last


def progress_replies(request: ImageRequest, num_images: int, colour: Colour) -> Iterator[Reply]:
    """Yield the progress of a request, if it is streamed, and the previews of its images."""
    attempt_id, payload = request.attempt_id, request.payload
    if request.stream_progress:
        for call in range(1, payload.num_steps + 1):
            yield Progress(attempt_id, None, call, payload.num_steps, 0.0, 0.1), None
    for number in range(num_images * payload.partial_images):
        preview = Preview(attempt_id, number % num_images, number, _PREVIEW_WIDTH_PX, _PREVIEW_HEIGHT_PX)
        yield preview, bytes(colour(payload.seed)) * (_PREVIEW_WIDTH_PX * _PREVIEW_HEIGHT_PX)


def image_replies(
    request: ImageRequest,
    data: memoryview | None,
    num_images: int,
    colour: Colour,
    denoise_s: float,
    safety_scores: Mapping[int, float] = MappingProxyType({}),
) -> Iterator[Reply]:
    """Yield the images of a request, whose frame is `data`, the last one first, and its end.

    Those of seeds with a safety score have it; from 0.5 they are refused.
    """
    attempt_id, payload = request.attempt_id, request.payload
    num_cut = max(0, len(payload.prompt.split()) - _MAX_WORDS)
    for index in reversed(range(num_images)):  # images may come in any order
        seed = payload.seed + index
        score = safety_scores.get(seed)
        is_refused = score is not None and score >= _SAFETY_THRESHOLD
        done = ImageDone(attempt_id, index, seed, *payload.result_px, num_cut, score, is_refused)
        yield done, None if is_refused else _draw(payload, data, colour(seed))
    timings = Timings(queue_s=0.001, text_encode_s=0.002, denoise_s=denoise_s, decode_s=0.004)
    yield Finished(attempt_id, timings, payload.num_steps, mean_batch=2.5), None


def text_reply(request: EngineRequest[TextPayload], spec: EncoderModelSpec, data: memoryview | None = None) -> Reply:
    """Return `fake_vector` of each text, or of each token if results are of tokens; not normalized.

    A sparse embedding has each token of the text, and how often it is there. The vector of an image, whose pixels are
    in `data`, is that of its values.
    """
    payload = request.payload
    ids, start, vectors = np.frombuffer(payload.token_ids, f"<u{payload.id_bytes}"), 0, []
    lengths = payload.lengths if not spec.task.startswith("token_") else [1] * len(ids)
    counts: tuple[int, ...] = ()
    for place, length in enumerate(lengths):
        if place in payload.image_places:
            assert data is not None
            pixels = np.frombuffer(data, np.uint8).reshape(len(payload.image_places), -1)
            vectors.append(
                fake_vector(pixels[payload.image_places.index(place)], spec.dimensions)[: payload.dimensions]
            )
            continue
        own = ids[start : start + length]
        start += length
        if spec.task == "sparse_embedding":
            vectors += [np.array(pair, np.float32) for pair in zip(*np.unique(own, return_counts=True), strict=True)]
            counts += (len(np.unique(own)),)
        else:
            vectors.append(fake_vector(own, spec.dimensions)[: payload.dimensions])
    values = np.stack(vectors)
    timings, result = TextTimings(queue_s=0.001, infer_s=0.002), TextResult(len(values), values.shape[1], counts)
    return Finished(request.attempt_id, timings, 1, 2.5, predicted_s=0.5, result=result), values.tobytes()


def _draw(payload: DiffusionPayload, data: memoryview | None, colour: tuple[int, int, int]) -> bytes:
    """Return the pixels of an image: all in `colour`, but for those that the mask of its start image keeps."""
    width, height = payload.result_px
    pixels = np.full((height, width, 3), colour, np.uint8)
    if payload.has_mask:
        assert data is not None
        frame = np.frombuffer(data, np.uint8)
        start, mask = frame[: pixels.size], frame[pixels.size : pixels.size // 3 * 4]
        start, mask = start.reshape(pixels.shape), mask.reshape(pixels.shape[:2])
        pixels = np.where(mask[..., None], pixels, start)
    return pixels.tobytes()
