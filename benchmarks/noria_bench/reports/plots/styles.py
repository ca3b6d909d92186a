"""How pictures look: a colour, a line and a marker for each target, and where a picture goes. The only module that knows matplotlib's settings."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

# Okabe and Ito's colours, which the colour-blind tell apart; line styles and markers too, for paper.
STYLES: dict[str, dict[str, str]] = {
    "noria": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "seed-stream-async": {"color": "#E69F00", "linestyle": "--", "marker": "<"},
    "seed-response-async": {"color": "#E69F00", "linestyle": "-", "marker": ">"},
    "seed-stream-sync": {"color": "#CC79A7", "linestyle": "--", "marker": "v"},
    "seed-response-sync": {"color": "#CC79A7", "linestyle": "-", "marker": "^"},
    "seed-batched": {"color": "#D55E00", "linestyle": "-", "marker": "D"},
    "litserve": {"color": "#009E73", "linestyle": "-", "marker": "s"},
    "bentoml": {"color": "#56B4E9", "linestyle": "-", "marker": "P"},
    "ray": {"color": "#000000", "linestyle": ":", "marker": "X"},
}
DEFAULT_STYLE = {"color": "#666666", "linestyle": "-.", "marker": "h"}  # a target that is not in the list
FAILED_COLOUR = "#B00020"
WAITING_COLOUR = "#C8C8C8"


def style_of(target: str) -> dict[str, str]:
    """Its colour, line and marker."""
    return STYLES.get(target, DEFAULT_STYLE)


@contextlib.contextmanager
def report_style() -> Iterator[None]:
    """Everything drawn inside looks like one report, and comes out the same, byte for byte, from the same runs."""
    import matplotlib as mpl

    mpl.use("svg")
    rc_params = {
        "svg.hashsalt": "noria",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "text.parse_math": False,  # a dollar in a variant's name is a dollar
        "figure.facecolor": "white",
    }
    with mpl.rc_context(rc_params):
        yield


def save_figure(figure: Any, file: pathlib.Path) -> pathlib.Path:
    """Write it and forget it."""
    from matplotlib import pyplot

    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file
