"""Images that the safety classifier of their model has refused: they have no pixels."""

from collections.abc import Sequence

from msgspec import UNSET

from noria.errors import ImageRefused
from noria.frontend.engines.results import RawImage
from noria.frontend.services.images.generation_types import ImageFacts
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations


def divide(images: Sequence[RawImage]) -> tuple[list[ImageFacts], list[ImageFacts]]:
    """Return the facts of the images that have pixels, and of those that are refused."""
    facts = [
        ImageFacts(index, image.seed, UNSET if image.safety_score is None else round(image.safety_score, 6))
        for index, image in enumerate(images)
    ]
    divided: tuple[list[ImageFacts], list[ImageFacts]] = [], []
    for image, each in zip(images, facts, strict=True):
        divided[image.is_refused].append(each)
    return divided


def record_refusals(model: str, refused: Sequence[ImageFacts], num_images: int, log_record: RequestLogRecord) -> None:
    """Count refused images, and log their number. Raises ImageRefused: they are all images of the request."""
    declarations.IMAGES_REFUSED.labels(model).inc(len(refused))
    log_record.add(num_refused=len(refused))
    if len(refused) == num_images:
        raise refusal(model, refused)


def refusal(model: str, refused: Sequence[ImageFacts]) -> ImageRefused:
    """Return the error for refused images of a model."""
    scores = ", ".join(f"{each.safety_score:.2f}" for each in refused)
    what = "the image was" if len(refused) == 1 else f"{len(refused)} images were"
    return ImageRefused(
        f"{what} refused by the safety classifier of {model} (safety score {scores}). Change the prompt or the seed."
    )
