"""The settings of statistics: which variables of requests and results are counted, and how."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

VariableKind = Literal["scalar", "category", "value", "counter"]


class VariableConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of `statistics.variables`: a variable that is counted at the endpoints of a pattern."""

    variable: Annotated[str, Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}\Z")]
    endpoint: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+/*?-]{1,128}\Z")] = "*"  # `*` is any characters, `?` is one
    kind: VariableKind | None = None  # None: that of the built-in variable
    edges: Annotated[tuple[float, ...], Meta(max_length=64)] = ()  # a scalar's; empty: those of the built-in variable
    sampling: Annotated[float, Meta(ge=0, le=1)] | None = None  # share of requests; None: `statistics.sampling`


class StatisticsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The distributions of requests and results that are counted."""

    builtin: Annotated[
        tuple[Literal["prompts", "parameters", "images", "texts"], ...],
        Meta(description="built-in variables that are counted at all endpoints, by group: docs/statistics.md"),
    ] = ()
    sampling: Annotated[
        float, Meta(ge=0, le=1, description="share of the requests whose built-in variables are counted")
    ] = 1.0
    window_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="length of a window; 288 are kept, and the last 12 together are compared with the reference",
        ),
    ] = 300.0
    variables: Annotated[
        tuple[VariableConfig, ...],
        Meta(
            description="variables of your own code, and other edges or endpoints of built-in ones, "
            "[[statistics.variables]] tables in the file: docs/statistics.md"
        ),
    ] = ()
