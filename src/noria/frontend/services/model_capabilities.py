"""What may be asked of a model here: the least, the most and the default of every setting, and the schedulers with a word on each.

Pure. The same `admission.limits` that are enforced are what is offered, so that a form made of an offer sends nothing that is refused.
"""

from msgspec import Struct

from noria.config import FrontendConfig
from noria.frontend.services.admission import limits
from noria.images import schedulers
from noria.protocol.model_spec import ModelSpec


class Bounds(Struct, frozen=True):
    """The values that a setting may have, from `min` to `max` in steps of `multiple`; `default` is null where one is drawn, or none is."""

    min: float
    max: float
    multiple: int
    default: float | None


class SchedulerInfo(Struct, frozen=True):
    """A scheduler that the model can be sampled with."""

    name: str
    description: str


class ModelCapabilities(Struct, frozen=True):
    """A model as forms and clients need it; the names of `settings` are the fields of `POST /t2i`."""

    version: str  # the model's fingerprint
    pipeline: str  # its diffusers class
    settings: dict[str, Bounds]
    default_scheduler: str
    schedulers: list[SchedulerInfo]
    max_prompt_chars: int


def capabilities_of(spec: ModelSpec, config: FrontendConfig) -> ModelCapabilities:
    """What may be asked of `spec` behind a front end with this `config`."""
    return ModelCapabilities(
        version=spec.fingerprint,
        pipeline=spec.pipeline,
        settings={
            field: Bounds(allowed.min, allowed.max, allowed.multiple, allowed.default)
            for field, allowed in limits(spec, config).items()
        },
        default_scheduler=spec.default_scheduler,
        schedulers=[SchedulerInfo(name, schedulers.find(name).description) for name in spec.schedulers],
        max_prompt_chars=config.max_prompt_chars,
    )
