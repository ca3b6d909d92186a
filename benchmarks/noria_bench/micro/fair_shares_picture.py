"""Draws the picture of docs/scheduling.md: the calls of two clients in the order of arrival, by turns, and by width.

    python -m noria_bench.micro.fair_shares_picture docs/images/fair-shares.svg

One client has eight images of ten steps; another one's image of four steps arrives a little later. The scheduler is the
real one, in virtual time, on a device whose calls take 10 ms and 10 ms for each row.
"""

import argparse
import html
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from noria_bench.simulator.devices import Curve, Device
from noria_bench.simulator.workload import Arrival
from noria_bench.simulator.world import Settings, simulate

_DEVICE = Device(steps=[Curve(64, 64, {rows: 0.01 + 0.01 * rows for rows in range(1, 7)})], slots=8, max_rows=6)
_LARGE, _SMALL = ("one client: 8 images of 10 steps", 10, 8), ("another: 1 image of 4 steps (alone: 80 ms)", 4, 1)
_SMALL_AT_S = 0.1
_PANELS = (
    ("In the order of arrival", Settings(_DEVICE, 1, policy="fcfs")),
    ("By turns", Settings(_DEVICE, 1, policy="fair", fair_width_slack=math.inf)),
    ("By turns, and each client's rows by what it would get alone", Settings(_DEVICE, 1, policy="fair")),
)
_COLOURS = {_LARGE[0]: "#56B4E9", _SMALL[0]: "#D55E00"}  # Okabe and Ito's

_WIDTH_PX, _MARGIN_PX, _CELL_PX, _PANEL_PX, _HEAD_PX = 880, 16, 9, 118, 44


@dataclass(frozen=True, slots=True)
class Call:
    """A model call: when it began and ended, and whose its rows are."""

    start_s: float
    end_s: float
    clients: tuple[str, ...]


@dataclass(slots=True)
class Recorder:
    """Records the calls of a simulation, and when each client's requests ended: a `world.RequestSource`."""

    calls: list[Call] = field(default_factory=list)
    ended_s: dict[str, float] = field(default_factory=dict)

    def on_steps(self, requests: Sequence[Arrival], at_s: float) -> None:
        """Record a call."""
        duration_s = _DEVICE.steps[0].seconds[len(requests)]
        self.calls.append(Call(at_s - duration_s, at_s, tuple(sorted(request.client for request in requests))))

    def on_end(self, request: Arrival, latency_s: float | None, at_s: float) -> None:
        """Record an end; no request follows."""
        assert latency_s is not None
        self.ended_s[request.client] = at_s


def record(settings: Settings) -> Recorder:
    """Return the calls of both clients."""
    recorder = Recorder()
    arrivals = [
        Arrival(at_s, "", 64, 64, steps, images, rows=1, client=client)
        for at_s, (client, steps, images) in ((0.0, _LARGE), (_SMALL_AT_S, _SMALL))
    ]
    simulate(settings, arrivals, source=recorder)
    return recorder


def draw() -> str:
    """Return the picture as SVG."""
    found = [(title, record(settings)) for title, settings in _PANELS]
    end_s = max(recorder.calls[-1].end_s for _, recorder in found)
    px_per_s = (_WIDTH_PX - 2 * _MARGIN_PX) / end_s
    height_px = _HEAD_PX + _PANEL_PX * len(found)
    legend = "".join(
        f'<rect x="{_MARGIN_PX + 260 * k}" y="14" width="12" height="12" fill="{colour}"/>'
        f'<text x="{_MARGIN_PX + 260 * k + 18}" y="24">{html.escape(client)}</text>'
        for k, (client, colour) in enumerate(_COLOURS.items())
    )
    panels = "".join(
        f'<g transform="translate({_MARGIN_PX} {_HEAD_PX + _PANEL_PX * k})">{_panel(title, recorder, px_per_s)}</g>'
        for k, (title, recorder) in enumerate(found)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH_PX} {height_px}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">'
        "<title>The calls of two clients in three orders</title>"
        f'<rect width="100%" height="100%" fill="#fff"/>{legend}{panels}</svg>\n'
    )


def _panel(title: str, recorder: Recorder, px_per_s: float) -> str:
    """Return a row of calls, each as wide as it is long and as high as it has rows, above a line with the arrival."""
    ended_s, floor_px = recorder.ended_s, 90
    parts = [
        f'<text y="12" font-weight="600">{html.escape(title)}</text>',
        f'<text x="{_WIDTH_PX - 2 * _MARGIN_PX}" y="12" text-anchor="end">'
        f"the image of {_SMALL[1]} steps takes {1000 * (ended_s[_SMALL[0]] - _SMALL_AT_S):.0f} ms</text>",
    ]
    for call in recorder.calls:
        parts += [
            f'<rect x="{px_per_s * call.start_s:.1f}" y="{floor_px - _CELL_PX * (row + 1)}" '
            f'width="{px_per_s * (call.end_s - call.start_s) - 1.5:.1f}" height="{_CELL_PX - 1}" '
            f'fill="{_COLOURS[client]}"/>'
            for row, client in enumerate(call.clients)
        ]
    x_px = px_per_s * _SMALL_AT_S
    parts.append(
        f'<path d="M{x_px:.1f} {floor_px + 3}l5 9h-10z" fill="{_COLOURS[_SMALL[0]]}"/>'
        f'<text x="{x_px + 9:.1f}" y="{floor_px + 13}" font-size="11">arrives</text>'
    )
    return "".join(parts)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.parse_args().file.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
