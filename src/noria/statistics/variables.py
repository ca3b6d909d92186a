"""The variables that are counted: the built-in ones, those of the configuration, and which endpoints have which.

A variable has one kind, and a scalar one set of edges, wherever it is counted: in Prometheus it is one family,
`noria_stat_NAME`, and windows of several processes and versions can be merged and compared.
"""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from noria.config import StatisticsConfig, VariableConfig, VariableKind
from noria.errors import ConfigError, did_you_mean, short_repr
from noria.statistics.distributions import CategoryCounts, Counts, Histogram, category_name, cell_name, check_edges

MAX_EDGES = 64  # edges of a scalar; each is a series in Prometheus
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")
_RESERVED_ENDS = ("_total", "_bucket", "_sum", "_count", "_created", "_info")  # ends of names, by OpenMetrics


class Variable(Struct, frozen=True):
    """A variable that is counted under one name. Raises ValueError if it is not allowed."""

    name: str
    kind: VariableKind
    edges: tuple[float, ...] = ()  # edges of a scalar
    description: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.endswith(_RESERVED_ENDS):
            raise ValueError(
                f"the name {short_repr(self.name)} is not allowed; a name is 1 to 64 of A-Z a-z 0-9 _, begins with no "
                f"digit, and does not end with {', '.join(_RESERVED_ENDS)}"
            )
        if self.kind != "scalar":
            if self.edges:
                raise ValueError(f"{self.name} is a {self.kind} and has edges; only a scalar has")
            return
        try:
            check_edges(self.edges)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        if len(self.edges) > MAX_EDGES:
            raise ValueError(f"{self.name} has {len(self.edges)} edges; at most {MAX_EDGES} are allowed")

    @property
    def has_distribution(self) -> bool:
        """Whether it can be compared with a reference; else only its sum and number are kept."""
        return self.kind in ("scalar", "category")

    def new_counts(self) -> Counts:
        """Return counts of nothing."""
        return CategoryCounts() if self.kind == "category" else Histogram(self.edges or (0.0,))

    def cell(self, value: float | str) -> str | None:
        """Return the name of the cell that a value is in; None: it is in none."""
        if self.kind == "category":
            return category_name(str(value))
        if self.kind == "scalar" and math.isfinite(float(value)):
            return cell_name(self.edges, float(value))
        return None

    def is_alike(self, other: "Variable") -> bool:
        """Whether both are counted alike."""
        return (self.kind, self.edges) == (other.kind, other.edges)


_RATIO_EDGES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95)
_LENGTH_EDGES = (10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 160.0, 240.0, 320.0, 480.0, 640.0, 960.0, 1280.0, 2560.0)
_WORD_EDGES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0)
_NON_LATIN = "Share of letters that are of other scripts than the Latin one, of the first 1000 characters."

BUILT_IN: dict[str, tuple[Variable, ...]] = {
    "prompts": (
        Variable("prompt_chars", "scalar", _LENGTH_EDGES, "Characters of a prompt."),
        Variable("prompt_words", "scalar", _WORD_EDGES, "Words of a prompt, as spaces divide it."),
        Variable("prompt_non_latin_ratio", "scalar", _RATIO_EDGES, _NON_LATIN),
    ),
    "parameters": (
        Variable(
            "inference_steps",
            "scalar",
            (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0),
            "Steps of a request of images.",
        ),
        Variable(
            "guidance_scale",
            "scalar",
            (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0),
            "Guidance of a request of images.",
        ),
        Variable("image_size", "category", (), "Size of a request's images, as `WIDTHxHEIGHT`."),
        Variable("scheduler", "category", (), "Scheduler of a request of images."),
    ),
    "images": (
        Variable(
            "image_brightness",
            "scalar",
            (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
            "Mean luma of a generated image, from 0 to 1.",
        ),
        Variable(
            "image_contrast",
            "scalar",
            (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4),
            "Standard deviation of the luma of a generated image, from 0 to 0.5.",
        ),
        Variable(
            "image_entropy",
            "scalar",
            (1.0, 2.0, 3.0, 4.0, 5.0, 5.5, 6.0, 6.5, 7.0, 7.25, 7.5, 7.75),
            "Entropy of the luma of a generated image, from 0 to 8 bits.",
        ),
        Variable(
            "image_safety_score",
            "scalar",
            (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
            "Safety score of a generated image, refused ones included, of a model with a safety classifier.",
        ),
    ),
    "texts": (
        Variable("text_chars", "scalar", _LENGTH_EDGES, "Characters of a text."),
        Variable(
            "text_tokens",
            "scalar",
            (4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 511.0, 1024.0, 4096.0),
            "Tokens of a text, special ones included, after it was cut.",
        ),
        Variable("text_unknown_ratio", "scalar", _RATIO_EDGES, "Share of a text's tokens that are the unknown one."),
        Variable("text_non_latin_ratio", "scalar", _RATIO_EDGES, _NON_LATIN),
        Variable(
            "embedding_norm",
            "scalar",
            (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0),
            "Length of an embedding that is not normalized; of others it is 1 and not counted.",
        ),
        Variable("text_label", "category", (), "The likeliest label of a text that is classified."),
    ),
}
"""The built-in variables, by group."""

BUILT_IN_VARIABLES = {variable.name: variable for group in BUILT_IN.values() for variable in group}


class Declarations:
    """The variables of a configuration. Raises ConfigError: they contradict each other, or are not allowed."""

    def __init__(self, config: StatisticsConfig) -> None:
        self.variables: dict[str, Variable] = {}  # by name
        self._rules: list[tuple[str, str, float]] = []  # pattern of endpoints, variable, sampling; the first one holds
        for declared in config.variables:
            variable = _variable_of(declared)
            self._add(variable)
            sampling = config.sampling if declared.sampling is None else declared.sampling
            sampling = 1.0 if variable.kind == "counter" else sampling
            self._rules.append((declared.endpoint, declared.variable, sampling))
        for group in config.builtin:
            for variable in BUILT_IN[group]:
                self.variables.setdefault(variable.name, variable)
                self._rules.append(("*", variable.name, config.sampling))

    def _add(self, variable: Variable) -> None:
        known = self.variables.setdefault(variable.name, variable)
        if not known.is_alike(variable):
            raise ConfigError(
                f"statistics.variables: {variable.name} is declared as {_describe(known)} and as {_describe(variable)}."
                " A variable is counted alike at all endpoints; give one of them another name."
            )

    def sampling_at(self, endpoint: str) -> dict[str, float]:
        """Return the share of requests of which each variable is counted, by name, at an endpoint."""
        found: dict[str, float] = {}
        for pattern, name, sampling in self._rules:
            if name not in found and fnmatch.fnmatchcase(endpoint, pattern):
                found[name] = sampling
        return {name: sampling for name, sampling in found.items() if sampling > 0}


def _variable_of(declared: VariableConfig) -> Variable:
    built_in = BUILT_IN_VARIABLES.get(declared.variable)
    if built_in is None and declared.kind is None:
        raise ConfigError(
            f"statistics.variables: {short_repr(declared.variable)} has no kind, and is no built-in variable."
            f"{did_you_mean(declared.variable, BUILT_IN_VARIABLES)} Give kind: scalar (with edges), category, value or "
            f"counter. Built in are {', '.join(BUILT_IN_VARIABLES)}."
        )
    kind = declared.kind or (built_in.kind if built_in is not None else "scalar")
    if built_in is not None and kind != built_in.kind:
        raise ConfigError(
            f"statistics.variables: {declared.variable} has the kind {kind}; it is built in, as a {built_in.kind}. "
            "Leave kind out."
        )
    edges = declared.edges or (built_in.edges if built_in is not None else ())
    try:
        variable = Variable(declared.variable, kind, edges, "" if built_in is None else built_in.description)
    except ValueError as error:
        raise ConfigError(f"statistics.variables: {error}.") from error
    if kind == "counter" and declared.sampling not in (None, 1.0):
        raise ConfigError(
            f"statistics.variables: {declared.variable} is a counter with the sampling {declared.sampling:g}; a "
            "counter counts every request. Leave sampling out."
        )
    return variable


def _describe(variable: Variable) -> str:
    return f"{variable.kind} with the edges {short_repr(variable.edges)}" if variable.edges else variable.kind


def code_variables(declared: Mapping[str, object]) -> dict[str, Variable]:
    """Return the variables that a class declares in `statistics`: edges of a scalar, or the word of another kind.

    Raises ValueError: one is not allowed.
    """
    variables = {}
    for name, how in declared.items():
        if how in ("category", "value", "counter"):
            variable = Variable(name, how)
        elif isinstance(how, Sequence) and all(isinstance(edge, int | float) for edge in how):
            variable = Variable(name, "scalar", tuple(map(float, how)))
        else:
            raise ValueError(
                f"statistics[{name!r}] is {short_repr(how)}; allowed are edges, which are ascending numbers, "
                "'category', 'value' and 'counter'"
            )
        if (built_in := BUILT_IN_VARIABLES.get(name)) is not None and not built_in.is_alike(variable):
            raise ValueError(f"{name} is a built-in variable; give yours another name")
        variables[name] = variable
    return variables
