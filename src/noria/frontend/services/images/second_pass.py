"""Checks the second pass of a request for images, in another size than the first. Pure."""

from collections.abc import Sequence

from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload

FIELD = "second_pass"


def check_second_pass(payload: DiffusionPayload, spec: DiffusionModelSpec, *, has_images: bool) -> None:
    """Check a payload with a second pass, whose numbers the protocol has checked.

    Raises:
        InvalidField: the model, the scheduler or other settings allow none.

    """
    assert payload.second_pass is not None
    excluded: Sequence[tuple[bool, str]] = (
        (not spec.takes_start_images, f"{spec.name} cannot begin with an image, and so makes none"),
        (has_images, "with start images or reference images there is none"),
        (payload.refiner is not None, "with a refiner there is none"),
    )
    for is_excluded, reason in excluded:
        if is_excluded:
            raise InvalidField(f"{FIELD}: {reason}. Leave it out.", field=FIELD)
    scheduler_names.check_start_image(payload.scheduler, spec.schedulers)
    if payload.first_step_of_second_pass == payload.second_pass.inference_steps:
        raise InvalidField(
            f"{FIELD}: its strength {payload.second_pass.strength} leaves none of its "
            f"{payload.second_pass.inference_steps} steps. Use more of either.",
            field=FIELD,
        )
