"""The report of `make gpu`: figures and ratios of all parts, the goals, and what is missing.

It reads the results of several folders, since a rented device rarely has time for all parts.
"""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from noria_bench.encoders.options import CORPORA, Corpus
from noria_bench.encoders.results import FILE_NAME, EncodersResult, read_result
from noria_bench.encoders.summary import best_rates, median, targets_of
from noria_bench.gpu.parts import Part
from noria_bench.gpu.session import PartResult, describe, read_session
from noria_bench.measurement.runs import BenchRun, read_runs
from noria_bench.micro.packed_texts import PackingResult
from noria_bench.reports.goals import Goal
from noria_bench.reports.run_summary import RunSummary, finite_ratio, summarise_run
from noria_bench.reports.table import MISSING, Table, escape_markdown, format_number, format_rate, format_ratio

UNIFORM, MIXED = "8 users, uniform", "8 users"
_BATCHED = "reference-batched"
_UNBATCHED = tuple(f"reference-{name}" for name in ("stream-async", "response-async", "stream-sync", "response-sync"))
# Noria over the reference article's server and over Triton, requests per second of SD1.5 at 512 × 512.
_MIN_RATIOS = {"unbatched": 5.0, "batched": 1.0, "batched, mixed": 2.5, "triton": 1.0, "texts over triton": 1.2}


@dataclass
class Results:
    """The content of the folders; of runs measured twice, the later one."""

    parts: dict[str, PartResult] = field(default_factory=dict)
    runs: dict[tuple[str, str, str], BenchRun] = field(default_factory=dict)  # by bench, variant and target
    encoders: dict[str, EncodersResult] = field(default_factory=dict)  # by part
    packing: PackingResult | None = None

    def image_figure(self, bench: str, variant: str, targets: Iterable[str]) -> "Figure":
        """The most requests per second of the targets."""
        figures = []
        for target in targets:
            run = self.runs.get((bench, variant, target))
            if run is not None and run.complete:
                summary = summarise_run(run)
                device = run.provenance["machine"].get("gpu", "CPU")
                figures.append(Figure(summary.requests_per_s, device, summary.num_failures))
        return max(figures, default=NOT_MEASURED)

    def text_figure(self, corpus: Corpus, prefix: str) -> "Figure":
        """The most texts per second of the targets whose names begin with `prefix`."""
        figures = []
        for result in self.encoders.values():
            for target in targets_of(result):
                rate = median(best_rates(result, target, corpus).values())
                if target.startswith(prefix) and not math.isnan(rate):
                    figures.append(Figure(rate, result.device_name or "CPU", _num_bad(result, target)))
        return max(figures, default=NOT_MEASURED)


@dataclass(frozen=True, order=True)
class Figure:
    """Requests per second, where they were measured, and how many answers were wrong or missing."""

    rate: float
    device: str = ""
    num_bad: int = 0


NOT_MEASURED = Figure(0.0)


def _num_bad(result: EncodersResult, target: str) -> int:
    found = [each for run in result.runs if run.target == target for each in (run.check, *run.measurements) if each]
    return sum(each.num_failed + each.num_wrong for each in found)


def read_results(folders: Sequence[pathlib.Path]) -> Results:
    """Read the folders in turn. Raises ValueError, naming the file, for one that cannot be read."""
    found = Results()
    for folder in folders:
        session = read_session(folder)
        if session is not None:
            found.parts |= {part.name: part for part in session.parts}
        for bench in ("scenario2", "mixed"):
            for run in read_runs(folder / bench) if (folder / bench).is_dir() else []:
                found.runs[bench, run.variant, run.target] = run
        for file in sorted(folder.glob(f"encoders-*/{FILE_NAME}")):
            found.encoders[file.parent.name] = read_result(file)
        if (file := folder / "encoders-packed.json").exists():
            found.packing = msgspec.json.decode(file.read_bytes(), type=PackingResult)
    return found


def goals_of(found: Results) -> list[Goal]:
    """The goals, as far as they were measured."""
    tritons = [f"triton-{delay}ms" for delay in (0, 50, 500)]
    scenario2, uniform, mixed = ("scenario2", ""), ("mixed", UNIFORM), ("mixed", MIXED)

    def images(traffic: tuple[str, str], others: Sequence[str], words: str, goal: str) -> Goal:
        ours, theirs = found.image_figure(*traffic, ["noria"]), found.image_figure(*traffic, others)
        return _goal(words, ours, theirs, _MIN_RATIOS[goal])

    def texts(corpus: Corpus, words: str) -> Goal:
        ours, theirs = found.text_figure(corpus, "noria"), found.text_figure(corpus, "triton")
        return _goal(f"{words}: noria over the best measured Triton", ours, theirs, _MIN_RATIOS["texts over triton"])

    return [
        images(scenario2, _UNBATCHED, "scenario 2: noria over the article’s best unbatched endpoint", "unbatched"),
        images(scenario2, [_BATCHED], "scenario 2: noria over the article’s batching", "batched"),
        images(scenario2, tritons, "scenario 2: noria over the best measured Triton", "triton"),
        images(uniform, [_BATCHED], "equal settings: noria over the article’s batching", "batched"),
        images(mixed, [_BATCHED], "mixed settings: noria over the article’s batching", "batched, mixed"),
        images(mixed, tritons, "mixed settings: noria over Triton", "triton"),
        texts("fixed", "one sentence"),
        texts("mixed", "mixed texts"),
    ]


def _goal(words: str, ours: Figure, theirs: Figure, least: float) -> Goal:
    claim = f"{words}, requests per second: at least {least:g}"
    if not ours.rate or not theirs.rate:
        return Goal(f"{claim}; not measured.", None)
    found = f"{claim}; {format_rate(ours.rate)} / {format_rate(theirs.rate)} = {format_ratio(ours.rate / theirs.rate)}"
    if ours.device != theirs.device:
        return Goal(f"{found}, on an {ours.device} and an {theirs.device}: no comparison.", None)
    if ours.num_bad or theirs.num_bad:
        return Goal(f"{found}; {ours.num_bad} and {theirs.num_bad} answers failed or were wrong.", None)
    return Goal(f"{found}.", ours.rate >= least * theirs.rate)


def markdown(found: Results, parts: Sequence[Part], content: str, *, small: bool) -> str:
    """The report."""
    heading = "# GPU session" + (", small, on a CPU: it shows that all parts work, and is no result" if small else "")
    lines = [f"- **{goal.verdict}.** {goal.text}" for goal in goals_of(found)]
    sections = [heading, "## Goals", "\n".join(lines)]
    for bench, variant, title in (
        ("scenario2", "", "Scenario 2: eight users who arrive one by one, equal settings"),
        ("mixed", UNIFORM, "Eight users, equal settings"),
        ("mixed", MIXED, "Eight users, mixed settings"),
    ):
        rows = {target: run for (name, of, target), run in found.runs.items() if (name, of) == (bench, variant)}
        if rows:
            sections += _section(_image_table(title, rows))
    sections += [part for name, result in found.encoders.items() for part in _section(_text_table(name, result))]
    if found.packing is not None:
        sections += _section(_packing_table(found.packing))
    sections += _section(_part_table(found.parts, parts, content, small=small))
    return "\n\n".join(sections) + "\n"


def _section(table: Table) -> list[str]:
    return [f"## {table.title}", table.without_empty_columns().markdown()]


def _image_table(title: str, runs: Mapping[str, BenchRun]) -> Table:
    summaries = {target: summarise_run(run) for target, run in runs.items()}
    noria = summaries.get("noria")

    def noria_over(each: RunSummary) -> str:
        return format_ratio(finite_ratio(math.nan if noria is None else noria.requests_per_s, each.requests_per_s))

    return Table.of(
        title,
        summaries.items(),
        ("", lambda each: each[0]),
        ("RPS", lambda each: format_rate(each[1].requests_per_s)),
        ("noria over it", lambda each: noria_over(each[1])),
        ("p50, s", lambda each: format_number(each[1].p50_ms / 1000, 2)),
        ("p99, s", lambda each: format_number(each[1].p99_ms / 1000, 2)),
        ("mean batch", lambda each: format_number(each[1].mean_batch, 1)),
        ("failed", lambda each: str(each[1].num_http_failures + each[1].num_unanswered)),
        ("wrong", lambda each: f"{each[1].num_wrong} of {each[1].num_compared}"),
        ("GPU busy", lambda each: format_number(100 * each[1].gpu_utilisation)),
        ("device", lambda each: runs[each[0]].provenance["machine"].get("gpu", MISSING)),
    )


def _text_table(name: str, result: EncodersResult) -> Table:
    rows = tuple(
        (
            target,
            *(format_rate(median(best_rates(result, target, corpus).values())) for corpus in CORPORA),
            str(_num_bad(result, target)),
            result.device_name or "CPU",
        )
        for target in targets_of(result)
    )
    columns = ("texts a second", "one sentence", "mixed", "failed or wrong", "device")
    return Table(f"{name.capitalize().replace('-', ', ')}", columns, rows, tuple(result.failures))


def _packing_table(result: PackingResult) -> Table:
    return Table.of(
        "Packed texts",
        result.times.items(),
        ("texts of a batch", lambda each: str(each[0])),
        ("padded, tokens/s", lambda each: format_rate(each[1].num_tokens / each[1].padded_s)),
        ("packed", lambda each: format_rate(each[1].num_tokens / each[1].packed_s)),
        ("packed over padded", lambda each: format_ratio(each[1].padded_s / each[1].packed_s)),
        ("alone", lambda each: format_ratio(each[1].lone_padded_s / each[1].lone_packed_s)),
        ("fidelity", lambda each: format_number(each[1].fidelity, 5)),
        ("device", lambda _: result.device),
    )


def _part_table(results: Mapping[str, PartResult], parts: Sequence[Part], content: str, *, small: bool) -> Table:
    rows = []
    for part in parts:
        result = results.get(part.name)
        if result is None:
            rows.append((part.name, "missing", MISSING, MISSING))
            continue
        is_current = (result.content, result.small) == (content, small)
        of_other = "" if is_current else "; missing for this code: it was measured with other code, or at another size"
        rows.append((part.name, escape_markdown(describe(result) + of_other), result.gpu, result.date))
    return Table("Parts", ("", "outcome", "device", "date"), tuple(rows))


def write_report(
    folders: Sequence[pathlib.Path], out: pathlib.Path, parts: Sequence[Part], content: str, *, small: bool
) -> str:
    """Write `report.md` into `out`, of all folders; returns it. Raises ValueError if a result cannot be read."""
    text = markdown(read_results(folders), parts, content, small=small)
    (out / "report.md").write_text(text, encoding="utf-8")
    return text
