"""Costs of a device, in seconds and money: from a file of costs that an engine has saved, or from a table."""

import pathlib
import re
from typing import Annotated, Any

import msgspec

from noria.config.engine import MAX_AUTO_SLOTS
from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.types import BatchKey
from noria_bench.simulator.workload import SimulateError, read_json

Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Pixels = Annotated[int, msgspec.Meta(ge=1, le=16_384)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Price = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds by rows of a call, or by images, for one size; as an engine saves it."""

    width_px: Pixels
    height_px: Pixels
    seconds: dict[Count, Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]]
    stage: int = 0  # above 0: of a refiner; not simulated
    reference_px: int = 0  # above 0: with reference images; not simulated


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device: a table, or the file of costs of an engine, which has some of the fields."""

    steps: list[Curve]
    decodes: list[Curve] = []
    text_encode_s: Seconds = 0.0
    key: dict[str, str] = {}  # in an engine's file: its settings
    image_encodes: list[Curve] = []  # in an engine's file: of start images; not simulated
    name: str = "device"
    slots: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    max_rows: Count = 64
    decode_batch: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    # In a measured run: how much longer its calls took than without other work. All its seconds have it as a factor.
    slowdown: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    front_end_s: Seconds = 0.0  # time for each request, outside the engine: reading it, image files, transport
    cold_start_s: Seconds = 60.0
    price_per_hour: Price = 1.0
    spot_price_per_hour: Price | None = None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The width and height of the images whose costs it has; others are estimated from these by their area."""
        return [(each.width_px, each.height_px) for each in self.steps if _is_plain(each)]

    def costs(self) -> CostModel:
        """Return its cost model, for the model without a name: requests of any model cost the same."""
        model = CostModel(self.max_rows, _curves(self.steps), _curves(self.decodes), {ModelKey(): self.text_encode_s})
        model.refresh_knees()
        return model


def _curves(curves: list[Curve]) -> dict[BatchKey, CostCurve]:
    return {
        BatchKey(each.width_px, each.height_px): CostCurve(dict(each.seconds)) for each in curves if _is_plain(each)
    }


def _is_plain(curve: Curve) -> bool:
    return not curve.stage and not curve.reference_px


EXAMPLE = Device(
    name="example",
    steps=[Curve(512, 512, {1: 0.025, 2: 0.027, 4: 0.037, 8: 0.062, 16: 0.115, 32: 0.22})],
    decodes=[Curve(512, 512, {1: 0.03, 4: 0.1})],
    text_encode_s=0.004,
    cold_start_s=90.0,
    price_per_hour=2.0,
    spot_price_per_hour=0.9,
)
"""Round numbers of no particular device, as in the documents, so that the command can be tried."""


def read_device(file: pathlib.Path) -> Device:
    """Read the costs of a device. Raises SimulateError."""
    expected = (
        ". It is one that an engine has saved (costs in its cache folder), or JSON with steps, decodes, text_encode_s, "
        "slots, cold_start_s and price_per_hour"
    )
    device = read_json(file, Device, " is no file of costs", expected)
    if device.key:
        device = _with_settings(device, file)
    return check_device(device, str(file))


def _with_settings(device: Device, file: pathlib.Path) -> Device:
    """Return the device of an engine's file, with what its key says of the engine; its slots are those of `auto`."""
    key = {"slots": str(MAX_AUTO_SLOTS)} | device.key
    try:
        settings: dict[str, Any] = {"slots": int(key["slots"]), "decode_batch": int(key["decode_batch"])}
        buckets = [int(rows) for rows in re.findall(r"\d+", key["buckets"])]
        settings |= {"max_rows": max(buckets, default=2 * settings["slots"]), "name": key.get("device", device.name)}
        return msgspec.convert(msgspec.structs.asdict(device) | settings, Device)
    except (KeyError, ValueError) as error:
        raise SimulateError(f"{file}: its key has not the settings of an engine of this version: {error}") from error


def check_device(device: Device, name: str) -> Device:
    """Return the device. Raises SimulateError, which has the `name`, if its costs cannot be used."""
    for curve in (*device.steps, *device.decodes):
        if not curve.seconds:
            raise SimulateError(f"{name} has no seconds of {curve.width_px}x{curve.height_px}")
    if not device.sizes:
        raise SimulateError(f"{name} has no steps; at least one size must be measured")
    return device
