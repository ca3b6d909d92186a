"""What a device costs, in seconds and money: from a file of costs that an engine has saved, or from a table."""

import math
import pathlib

import msgspec

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.types import BatchKey
from noria_bench.simulator.workload import SimulateError


class Curve(msgspec.Struct, frozen=True):
    """Seconds by rows of a call, or by images, for one size; as an engine saves it."""

    width_px: int
    height_px: int
    seconds: dict[int, float]
    stage: int = 0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of device: a line of the table, or the file of costs of an engine, which has only the first three."""

    steps: list[Curve]
    decodes: list[Curve] = []
    text_encode_s: float = 0.0
    name: str = "device"
    slots: int = 8
    max_rows: int = 64
    decode_batch: int = 4
    slowdown: float = (
        1.0  # of a measured run: how much longer its calls took than without other work; a factor in all seconds
    )
    front_end_s: float = 0.0  # of each request, outside the engine: reading it, image files, transport
    cold_start_s: float = 60.0
    price_per_hour: float = 1.0
    spot_price_per_hour: float | None = None

    def costs(self) -> CostModel:
        """Return its cost model, for the model without a name: requests of any model cost the same."""
        model = CostModel(
            self.max_rows,
            {_key(curve): CostCurve(dict(curve.seconds)) for curve in self.steps},
            {_key(curve): CostCurve(dict(curve.seconds)) for curve in self.decodes},
            {ModelKey(): self.text_encode_s},
        )
        model.refresh_knees()
        return model


def _key(curve: Curve) -> BatchKey:
    return BatchKey(curve.width_px, curve.height_px)


EXAMPLE = Device(
    name="example",
    steps=[Curve(512, 512, {1: 0.025, 2: 0.027, 4: 0.037, 8: 0.062, 16: 0.115, 32: 0.22})],
    decodes=[Curve(512, 512, {1: 0.03, 4: 0.1})],
    text_encode_s=0.004,
)
"""Round numbers of no particular device, so that the command can be tried."""


def read_device(file: pathlib.Path) -> Device:
    """Read the costs of a device. Raises SimulateError."""
    try:
        return check_device(msgspec.json.decode(file.read_bytes(), type=Device), str(file))
    except OSError as error:
        raise SimulateError(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SimulateError(
            f"{file} is no file of costs: {error}. It is one that an engine has saved (costs in its cache folder), or "
            "JSON with steps, decodes, text_encode_s, slots, cold_start_s and price_per_hour"
        ) from error


def check_device(device: Device, name: str) -> Device:
    """Return the device. Raises SimulateError, which has the `name`, if its costs cannot be used."""
    for curve in (*device.steps, *device.decodes):
        if not curve.seconds or not all(
            count > 0 and math.isfinite(seconds) and seconds > 0.0 for count, seconds in curve.seconds.items()
        ):
            raise SimulateError(f"{name}: seconds of {curve.width_px}x{curve.height_px} must be positive, by count")
    if not device.steps:
        raise SimulateError(f"{name} has no steps; at least one size must be measured")
    return device
