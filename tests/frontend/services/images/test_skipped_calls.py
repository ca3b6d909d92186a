"""Admission of `calls`, the share of the model's calls that are made."""

import math

import msgspec
import pytest

from noria.config import FrontendConfig
from noria.errors import InvalidField
from noria.frontend.services.images.request_validation import NO_IMAGES, validate
from noria.images import scheduler_names
from noria.images.start_image import RequestImageFacts, StartImageFacts
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.models.adapters.refiner_folders import RefinerFolders
from noria.protocol.diffusion import Refinement
from noria.protocol.request import ImageRequestBody


class AnyRefiner(RefinerFolders):
    """Has each refiner."""

    def complete(self, asked, _):
        return asked


def payload_of(spec, images=NO_IMAGES, **fields):
    body = ImageRequestBody("p", **({"scheduler": "ddim", "inference_steps": 28} | fields))
    folders = AdapterFolders(refiners=AnyRefiner(()))
    return validate(body, spec, FrontendConfig(), "id", lambda: 0, folders=folders, images=images).payload


@pytest.mark.parametrize(
    ("share", "num_steps", "num_calls"),
    [
        (0.5, 28, 14),
        (0.5, 25, 13),
        (1 / 3, 28, 10),
        (0.33, 16, 6),
        (0.42, 12, 6),
        (0.55, 20, 11),
        (0.999, 28, 28),
        (1.0, 28, None),
    ],
)
def test_a_share_is_rounded_up_to_calls(spec, share, num_steps, num_calls):
    payload = payload_of(spec, calls=share, inference_steps=num_steps)
    assert payload.num_calls == num_calls
    assert payload.num_steps == (num_calls or num_steps)


def test_of_a_start_image_the_share_is_of_the_steps_that_are_made(spec):
    images = RequestImageFacts(start=StartImageFacts(64, 64, "0" * 12, None))
    payload = payload_of(spec, images, calls=0.5, inference_steps=40, strength=0.5)
    assert (payload.num_calls, payload.num_steps) == (10, 10)
    with pytest.raises(InvalidField, match=r"there are 11 steps; .* Use more inference_steps or strength, or leave"):
        payload_of(spec, images, calls=0.5, inference_steps=22, strength=0.5)


@pytest.mark.parametrize(("num_steps", "smallest"), [(12, 0.42), (13, 0.39), (14, 0.36), (15, 0.34)])
def test_fewer_than_six_calls_are_rejected_with_the_smallest_share(spec, num_steps, smallest):
    assert payload_of(spec, calls=smallest, inference_steps=num_steps).num_calls == 6
    message = rf"it leaves 5 calls, .* with {num_steps} steps allowed are {smallest} to 1\.0\. Use more calls, or leave"
    with pytest.raises(InvalidField, match=message):
        payload_of(spec, calls=smallest - 0.01, inference_steps=num_steps)
    default = msgspec.structs.replace(spec, default_calls=smallest - 0.01)
    assert payload_of(default, inference_steps=num_steps).calls == 1.0


RESCALING = {"guidance_rescale": 0.7}


@pytest.mark.parametrize(
    ("fields", "of_model", "message"),
    [
        ({"calls": 0.32}, {}, r"calls is 0\.32; allowed are 0\.33 to 1\.0"),
        ({"calls": 1.5}, {}, r"calls is 1\.5; allowed are 0\.33 to 1\.0"),
        ({"calls": math.nan}, {}, r"calls is nan; allowed are"),
        ({"scheduler": "euler-a"}, {}, "'euler-a' can be skipped: it draws noise at each call.*use one of ddim, euler"),
        ({"scheduler": "heun"}, {}, "'heun' can be skipped: it makes two calls a step"),
        ({"scheduler": "pndm"}, {}, "'pndm' can be skipped: it extrapolates from four calls already"),
        ({"inference_steps": 11}, {}, "there are 11 steps; of fewer than 12 none can be skipped. Use more"),
        ({"refiner": Refinement()}, {}, "with a refiner no calls can be skipped"),
        ({"guidance_scale": 5.0}, RESCALING, "rescales its guided outputs .* none can be extrapolated"),
    ],
)
def test_what_does_not_fit_is_rejected_with_the_reason(spec, fields, of_model, message):
    schedulers = tuple(choice.name for choice in scheduler_names.choices_of_family("diffusion"))
    spec = msgspec.structs.replace(spec, schedulers=schedulers, **of_model)
    with pytest.raises(InvalidField, match=message) as caught:
        payload_of(spec, **({"calls": 0.5} | fields))
    assert caught.value.field == "calls"
    # As a default of the model it is left out where it does not fit.
    default = msgspec.structs.replace(spec, default_calls=0.5)
    fields = {name: value for name, value in fields.items() if name != "calls"}
    assert payload_of(default, **fields).calls == (1.0 if fields else 0.5)


def test_unguided_outputs_are_not_rescaled(spec):
    spec = msgspec.structs.replace(spec, **RESCALING)
    assert payload_of(spec, calls=0.5, guidance_scale=1.0).num_calls == 14
