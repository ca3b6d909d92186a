"""The style of plots: colour, line and marker of each target and policy, matplotlib's settings, and saving."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can distinguish; line styles and markers for print.
STYLES: dict[str, dict[str, str]] = {
    "noria": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "reference-stream-async": {"color": "#E69F00", "linestyle": "--", "marker": "<"},
    "reference-response-async": {"color": "#E69F00", "linestyle": "-", "marker": ">"},
    "reference-stream-sync": {"color": "#CC79A7", "linestyle": "--", "marker": "v"},
    "reference-response-sync": {"color": "#CC79A7", "linestyle": "-", "marker": "^"},
    "reference-batched": {"color": "#D55E00", "linestyle": "-", "marker": "D"},
    "litserve": {"color": "#009E73", "linestyle": "-", "marker": "s"},
    "bentoml": {"color": "#56B4E9", "linestyle": "-", "marker": "P"},
    "ray": {"color": "#000000", "linestyle": ":", "marker": "X"},
    # Targets that encode texts.
    "noria-8": {"color": "#0072B2", "linestyle": "-.", "marker": "p"},
    "infinity": {"color": "#F0E442", "linestyle": "-", "marker": "*"},
    "noria-bfloat16": {"color": "#0072B2", "linestyle": "--", "marker": "o"},
    "raw": {"color": "#000000", "linestyle": "-", "marker": ""},
    "raw-bfloat16": {"color": "#000000", "linestyle": "--", "marker": ""},
    "fastapi": {"color": "#E69F00", "linestyle": "-", "marker": "v"},
    "triton-1": {"color": "#D55E00", "linestyle": ":", "marker": "^"},
    "triton-1-batching": {"color": "#D55E00", "linestyle": "--", "marker": "D"},
    "triton-n": {"color": "#CC79A7", "linestyle": ":", "marker": "^"},
    "triton-n-batching": {"color": "#CC79A7", "linestyle": "--", "marker": "D"},
    "triton-best": {"color": "#D55E00", "linestyle": "-", "marker": "X"},
    # Policies of Noria, in the deadlines bench.
    "fair": {"color": "#CC79A7", "linestyle": ":", "marker": "D"},
    "least-slack": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "shortest-first": {"color": "#009E73", "linestyle": "--", "marker": "s"},
    "fcfs": {"color": "#E69F00", "linestyle": "-.", "marker": "^"},
}
# For any other target.
DEFAULT_STYLE = {"color": "#666666", "linestyle": "-.", "marker": "h"}
FAILED_COLOUR = "#B00020"
WAITING_COLOUR = "#C8C8C8"


def style_of(target: str) -> dict[str, str]:
    """Colour, line style and marker of a target or policy."""
    return STYLES.get(target, DEFAULT_STYLE)


@contextlib.contextmanager
def report_style() -> Iterator[None]:
    """Plots inside share one style, and are reproducible: the same runs give the same bytes."""
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
        "text.parse_math": False,  # a dollar sign in a variant's name is no formula
        "figure.facecolor": "white",
    }
    with mpl.rc_context(rc_params):
        yield


def save_figure(figure: Any, file: pathlib.Path) -> pathlib.Path:
    """Write the figure as SVG and release it; returns `file`."""
    from matplotlib import pyplot

    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file
