"""Dashboard "Statistics": the distributions of requests and results over time, and their drift."""

from noria.dashboards.panels import Dashboard, Panel, Query, row, timeseries
from noria.statistics.variables import BUILT_IN, Variable

_FILTER = 'instance=~"$instance",endpoint=~"$endpoint",version=~"$version"'
_LEGEND = "{{endpoint}} {{version}} {{variable}}"
_TITLES = {"prompts": "Prompts", "parameters": "Parameters", "images": "Images", "texts": "Texts"}


def _by_variable(metric: str, worst: str = "max") -> Query:
    return Query(f"{worst} by (endpoint, version, variable) ({metric}{{{_FILTER}}})", _LEGEND)


def _panel(variable: Variable) -> Panel:
    """Return a heat map of a scalar, or the rates of categories."""
    title = variable.name.replace("_", " ").capitalize()
    if variable.kind == "category":
        expr = f"sum by (category) (rate(noria_stat_{variable.name}_total{{{_FILTER}}}[5m]))"
        return timeseries(title, variable.description, Query(expr, "{{category}}"), unit="ops", stacked=True)
    expr = f"sum by (le) (increase(noria_stat_{variable.name}_bucket{{{_FILTER}}}[5m]))"
    return Panel(title, (Query(expr, "{{le}}"),), variable.description, kind="heatmap")


STATISTICS = Dashboard(
    "noria-statistics",
    "Noria: statistics",
    "Distributions of requests and results over time, and their drift from the reference.",
    (
        row(
            "Drift",
            timeseries(
                "PSI",
                "Population stability index of the last 12 windows and the reference, corrected for sample size. "
                "Above 0.1 the distribution has shifted.",
                _by_variable("noria_drift_psi"),
            ),
            timeseries(
                "Kolmogorov–Smirnov",
                "Largest difference of the cumulative shares of a histogram and its reference.",
                _by_variable("noria_drift_ks"),
            ),
            timeseries(
                "Jensen–Shannon", "Divergence from the reference, from 0 to 1 bit.", _by_variable("noria_drift_js")
            ),
            timeseries(
                "Chi-square and Kolmogorov–Smirnov, p-value",
                "Probability of as large a difference without drift, at one look: by chi-square of categories, by "
                "Kolmogorov–Smirnov of scalars. With many values it is small for differences that do not matter.",
                _by_variable("noria_drift_p_value", "min"),
                unit="percentunit",
            ),
            timeseries(
                "Unseen categories",
                "Share of the values whose categories the reference does not have.",
                _by_variable("noria_drift_unseen_ratio"),
                unit="percentunit",
            ),
            timeseries(
                "Invalid values",
                "Values that are not finite, in five minutes; they are in no histogram.",
                Query(
                    f"sum by (endpoint, variable) (increase(noria_statistics_invalid_total{{{_FILTER}}}[5m])) "
                    "or vector(0)",
                    "{{endpoint}} {{variable}}",
                ),
            ),
        ),
        *(row(_TITLES[group], *map(_panel, variables)) for group, variables in BUILT_IN.items()),
    ),
    labels=("endpoint", "version"),
)
