"""The report of `noria bench encoders`: tables in Markdown, and two plots."""

import functools
import math
import pathlib
from collections.abc import Callable, Iterable

from noria_bench.encoders import summary
from noria_bench.encoders.plots import plot_latency, plot_throughput
from noria_bench.encoders.results import EncodersResult, Load, Measurement, TargetRun
from noria_bench.encoders.summary import best_rates, load_title, loads_of, measured, median, paired_ratios, targets_of
from noria_bench.reports.provenance_text import noria_text
from noria_bench.reports.result_report import heading, write_files
from noria_bench.reports.table import (
    MISSING,
    Table,
    escape_markdown,
    format_number,
    format_rate,
    format_ratio,
    format_share,
)

NOT_REPORTED = "not reported"
_MIN_SHOWN_MS = 0.005  # CPU milliseconds a request


def write_report(result: EncodersResult, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write `report.md` and the plots into `folder`; returns the files."""
    plots = {"latency": plot_latency, "throughput": plot_throughput}
    return write_files(
        folder, markdown(result), **{name: functools.partial(plot, result) for name, plot in plots.items()}
    )


def markdown(result: EncodersResult) -> str:
    """The report, which links plots and Apache Bench's output beside it."""
    parts = heading("encoders", result.failures, complete=result.complete)
    parts += [f"Left out: {escape_markdown(each)}." for each in result.left_out]
    parts += [
        "## Goals",
        "\n".join(f"- **{goal.verdict}.** {escape_markdown(goal.text)}" for goal in summary.goals_of(result)),
    ]
    parts += _section(_overview(result))
    parts.append("![Throughput by connections](plots/throughput.svg)\n\n![Latency under load](plots/latency.svg)")
    parts += _section(_reference(result))
    for load in loads_of(result):
        if load.client != "wrk":
            parts += _section(_load_table(result, load))
    parts += [
        text
        for table in (_processes(result), _clients(result), _sweep(result))
        if table.rows
        for text in _section(table)
    ]
    return "\n\n".join([*parts, "## Conditions", *_conditions(result)]) + "\n"


def _section(table: Table) -> list[str]:
    return [f"## {escape_markdown(table.title)}", table.without_empty_columns().markdown()]


def _overview(result: EncodersResult) -> Table:
    rows = []
    for target in targets_of(result):
        runs = [run for run in result.runs if run.target == target]
        found = [each for run in runs for each in (run.check, *run.measurements) if each is not None]
        compared, wrong = sum(each.num_compared for each in found), sum(each.num_wrong for each in found)
        rows.append(
            (
                target,
                *(format_rate(median(best_rates(result, target, corpus).values())) for corpus in ("fixed", "mixed")),
                format_ratio(median(paired_ratios(result, target, "raw", "mixed"))),
                format_ratio(median(paired_ratios(result, "noria", target, "mixed"))),
                str(sum(each.num_failed for each in found)),
                f"{wrong} of {compared}" if compared else MISSING,
                _worst(run.check for run in runs),
                format_number(median(run.seconds_to_ready for run in runs if run.seconds_to_ready is not None), 1),
            )
        )
    columns = ("", "one sentence, RPS", "mixed, RPS", "of the raw loop", "noria over it", "failed", "wrong",
               "largest difference, smallest cosine", "ready, s")  # fmt: skip
    notes = (
        "RPS is the most that any number of connections gave, in a closed loop; figures are medians over rounds, and "
        "ratios medians of the rounds' own. Mixed texts for both ratios.",
    )
    return Table("Overview", columns, tuple(rows), notes)


def _worst(checks: Iterable[Measurement | None]) -> str:
    found = [check for check in checks if check is not None and check.max_difference is not None]
    if not found:
        return MISSING
    return (
        f"{max(each.max_difference or 0.0 for each in found):.0e}, {min(each.min_cosine or 0.0 for each in found):.5f}"
    )


def _reference(result: EncodersResult) -> Table:
    rows = tuple(
        (
            f"over {name}",
            format_ratio(ratio),
            *(
                format_ratio(median(paired_ratios(result, target, name, corpus)))
                for corpus in ("fixed", "mixed")
                for target in ("noria", "noria-bfloat16")
            ),
        )
        for name, ratio in summary.REFERENCE_RATIOS.items()
    )
    columns = ("requests per second", "the article", "noria, one sentence", "noria-bfloat16, one sentence",
               "noria, mixed", "noria-bfloat16, mixed")  # fmt: skip
    note = (
        "The article: ClearML Serving with 8 workers over Triton's ensemble, one sentence, Apache Bench, an RTX 2070 "
        "SUPER and 12 cores (V. Sonck, 18 January 2023). Both of its servers share one Triton; ours share no part."
    )
    return Table("The article's ratios", columns, rows, (note,))


def _load_table(result: EncodersResult, load: Load) -> Table:
    found = [(target, each) for target in targets_of(result) if (each := measured(result, target, load))]

    def typical(name: str, digits: int) -> Callable[[tuple[str, list[Measurement]]], str]:
        return lambda row: format_number(median(getattr(each, name) for each in row[1]), digits)

    title = load_title(load)
    return Table.of(
        title[0].upper() + title[1:],
        found,
        ("", lambda row: row[0]),
        ("RPS", typical("requests_per_s", 2)),
        ("p50, ms", typical("p50_ms", 1)),
        ("p95, ms", typical("p95_ms", 1)),
        ("p99, ms", typical("p99_ms", 1)),
        ("mean batch", lambda row: _reported([each.mean_batch for each in row[1]], 1)),
        ("padding", lambda row: _reported([each.padding for each in row[1]], None)),
        ("CPU ms/request", typical("cpu_ms_per_request", 2)),
        ("failed", lambda row: str(sum(each.num_failed for each in row[1]))),
        ("CPU of others", lambda row: format_share(max(each.other_cpu_share or 0.0 for each in row[1]))),
    )


def _reported(values: list[float | None], digits: int | None) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NOT_REPORTED
    return format_share(median(known)) if digits is None else format_number(median(known), digits)


def _processes(result: EncodersResult) -> Table:
    rows = []
    for load in (load for load in loads_of(result) if load.corpus == "fixed"):
        for target in targets_of(result):
            found = measured(result, target, load)
            names = sorted({name for each in found for name in each.cpu_s_by_process})
            costs = {name: median(each.process_ms_per_request(name) for each in found) for name in names}
            shown = [f"{name} {cost:.2f}" for name, cost in costs.items() if cost >= _MIN_SHOWN_MS]
            if shown:
                rows.append((f"{target}, {load_title(load)}", ", ".join(shown)))
    return Table("CPU milliseconds a request, by process", ("", "processes"), tuple(rows))


def _clients(result: EncodersResult) -> Table:
    rows = []
    for load in (load for load in loads_of(result) if load.client == "wrk"):
        own = Load(load.corpus, "closed", "own", load.connections)
        for target in targets_of(result):
            rates = [
                median(each.requests_per_s for each in measured(result, target, each_load)) for each_load in (own, load)
            ]
            if not any(map(math.isnan, rates)):
                rows.append(
                    (target, *map(format_rate, rates), format_ratio(rates[1] / rates[0] if rates[0] else math.nan))
                )
    columns = ("mixed texts, RPS", "the bench's client", "wrk", "ratio")
    note = (
        "wrk also counts the first seconds, and not the requests in flight at its end. Its percentiles are not used: "
        "it corrects them for users with a fixed rhythm."
    )
    return Table("The clients compared", columns, tuple(rows), (note,))


def _sweep(result: EncodersResult) -> Table:
    rows = tuple((f"{row.target}: {_settings(row.settings)}", format_rate(row.requests_per_s),
                  "chosen" if row.chosen else "") for row in result.sweep)  # fmt: skip
    return Table("Settings that were tried", ("mixed texts", "RPS", ""), rows)


def _settings(settings: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "its defaults"


def _conditions(result: EncodersResult) -> list[str]:
    provenance, machine = result.provenance, result.provenance["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    lines = [
        f"{machine['cores']} cores of {machine['cpu']}, {noria_text(provenance)}, "
        f"{provenance['date']}, load before {machine['load_average_before']:.2f}; Python {provenance['python']}; "
        f"{versions}.",
        f"Command: `{escape_markdown(provenance['command'])}`. Model {result.model['name']}, at most "
        f"{result.model['max_tokens']} tokens, computed by {'torch' if result.backend == 'torch' else 'ONNX Runtime'} "
        f"in {result.precision} on {result.device_name or result.device}; {_threads(result)} in each target; raw loop "
        f"{format_rate(result.raw_texts_per_s or math.nan)} texts/s. One sentence: “{result.corpus['fixed']}”; mixed: "
        f"{result.corpus['num_texts']} texts of 4 to 256 tokens.",
    ]
    fixed_clients = {load.client for load in loads_of(result) if load.corpus == "fixed"}
    if fixed_clients == {"own"}:
        lines.append("Apache Bench is not installed here: the bench's own client sent the one sentence, too.")
    last = {run.target: run for run in result.runs}
    return [
        *lines,
        "\n".join(
            f"- {name}: {_settings(run.settings)}{_framework(run)}" for name, run in last.items() if run.settings
        ),
    ]


def _threads(result: EncodersResult) -> str:
    return f"{result.threads} threads {'compute' if result.device == 'cpu' else 'prepare batches'}"


def _framework(run: TargetRun) -> str:
    names = ("litserve", "bentoml", "infinity_emb", "nvidia-pytriton", "onnxruntime", "tokenizers")
    found = [f"{name} {run.framework_versions[name]}" for name in names if name in run.framework_versions]
    return f" ({', '.join(found)})" if found else ""
