"""The figures of a result of `noria bench encoders`: medians over rounds, paired ratios, and the goals. Pure."""

import math
import statistics
from collections.abc import Iterable

from noria_bench.encoders.options import CORPORA, Corpus
from noria_bench.encoders.results import EncodersResult, Load, Measurement
from noria_bench.reports.goals import Goal
from noria_bench.reports.table import format_number, format_ratio

# The reference article's ratios of ClearML Serving with 8 workers over Triton's ensemble with 1 tokenizer: its title,
# and "608 % increase" over the one without dynamic batching. Victor Sonck, "Increase Hugging Face model throughput by
# 193% using ClearML", 18 January 2023.
REFERENCE_RATIOS = {"triton-1-batching": 2.93, "triton-1": 7.08}

# Noria's goals on mixed texts: the target, what it is compared with, and the least ratio of requests per second.
_MIN_RATIOS = (
    ("noria", "triton-1-batching", 2.4),
    ("noria-bfloat16", "triton-1-batching", 4.0),
    ("noria", "triton-best", 1.3),
    ("noria-bfloat16", "triton-best", 2.1),
    ("noria", "raw", 0.92),
)
# On a GPU: Noria at its best over Triton at its best.
_MIN_GPU_RATIO = 1.2
_NORIAS = ("noria", "noria-8")
_TRITONS = ("triton-1", "triton-1-batching", "triton-n", "triton-n-batching", "triton-best")


def targets_of(result: EncodersResult) -> list[str]:
    """The measured targets, in the order of the first round."""
    return list(dict.fromkeys(run.target for run in result.runs))


def loads_of(result: EncodersResult) -> list[Load]:
    """All loads of servers, in their order."""
    return list(
        dict.fromkeys(each.load for run in result.runs for each in run.measurements if each.load.client != "none")
    )


def measured(result: EncodersResult, target: str, load: Load) -> list[Measurement]:
    """The measurements of a target under a load, one for each round."""
    return [each for run in result.runs if run.target == target for each in run.measurements if each.load == load]


def median(values: Iterable[float | None]) -> float:
    """The median of what was measured, where None counts as infinite; NaN without values."""
    found = [math.inf if value is None else value for value in values]
    return statistics.median(found) if found else math.nan


def best_rates(result: EncodersResult, target: str, corpus: Corpus) -> dict[int, float]:
    """The most requests per second that a target had in a closed loop, by round."""
    rates: dict[int, float] = {}
    for run in result.runs:
        found = [
            each.requests_per_s
            for each in run.measurements
            if (each.load.corpus, each.load.loop) == (corpus, "closed") and each.load.client != "wrk"
        ]
        if run.target == target and found:
            rates[run.round] = max(found)
    return rates


def paired_ratios(result: EncodersResult, target: str, other: str, corpus: Corpus) -> list[float]:
    """The ratio of the best rates of two targets, in each round that has both."""
    mine, others = best_rates(result, target, corpus), best_rates(result, other, corpus)
    return [mine[number] / others[number] for number in sorted(mine.keys() & others.keys()) if others[number]]


def goals_of(result: EncodersResult) -> list[Goal]:
    """Noria's goals, as far as they were measured."""
    ratios = (
        [_ratio_goal(result, *goal) for goal in _MIN_RATIOS]
        if result.device == "cpu"
        else [_best_goal(result, corpus) for corpus in CORPORA]
    )
    return [*ratios, _p99_goal(result), _lone_goal(result), _answers_goal(result)]


def _ratio_goal(result: EncodersResult, target: str, other: str, least: float) -> Goal:
    ratios = paired_ratios(result, target, other, "mixed")
    claim = f"{target} over {other}, mixed texts, requests per second: at least {least:g}"
    if not ratios:
        return Goal(f"{claim}; not measured.", None)
    each = ", ".join(format_ratio(ratio) for ratio in ratios)
    return Goal(f"{claim}; {format_ratio(median(ratios))} (rounds: {each}).", median(ratios) >= least)


def _best_goal(result: EncodersResult, corpus: Corpus) -> Goal:
    """The best of Noria's targets over the best of Triton's, by the median of their rounds."""
    words = "one sentence" if corpus == "fixed" else "mixed texts"
    claim = f"noria at its best over Triton at its best, {words}, requests per second: at least {_MIN_GPU_RATIO:g}"
    rates = {name: median(best_rates(result, name, corpus).values()) for name in (*_NORIAS, *_TRITONS)}
    mine, theirs = (
        max((name for name in names if rates[name] > 0), key=rates.__getitem__, default=None)
        for names in (_NORIAS, _TRITONS)
    )
    if mine is None or theirs is None:
        return Goal(f"{claim}; not measured.", None)
    ratio = rates[mine] / rates[theirs]
    return Goal(f"{claim}; {format_ratio(ratio)} ({mine} over {theirs}).", ratio >= _MIN_GPU_RATIO)


def _p99_goal(result: EncodersResult) -> Goal:
    claim = "noria's p99 is lower than each Triton's under every load of mixed texts"
    worse, num = list[str](), 0
    for load in loads_of(result):
        mine = median(each.p99_ms for each in measured(result, "noria", load))
        for other in _TRITONS:
            theirs = measured(result, other, load)
            if load.corpus != "mixed" or load.client == "wrk" or not theirs or math.isnan(mine):
                continue
            num += 1
            if not mine < (right := median(each.p99_ms for each in theirs)):
                worse.append(f"{load_title(load)}: {format_number(mine)} ms, {other} {format_number(right)} ms")
    if not num:
        return Goal(f"{claim}; not measured.", None)
    return Goal(
        f"{claim}; in {num - len(worse)} of {num} comparisons{': not with ' * bool(worse)}{'; '.join(worse)}.",
        not worse,
    )


def _lone_goal(result: EncodersResult) -> Goal:
    claim = "a lone request of mixed texts takes noria no longer than Triton, median"
    load = Load("mixed", "closed", "own", 1)
    mine = median(each.p50_ms for each in measured(result, "noria", load))
    theirs = {
        name: median(each.p50_ms for each in found) for name in _TRITONS if (found := measured(result, name, load))
    }
    if not theirs or math.isnan(mine):
        return Goal(f"{claim}; not measured.", None)
    name = min(theirs, key=lambda name: theirs[name])
    text = f"{claim}; {format_number(mine, 1)} ms, {name} {format_number(theirs[name], 1)} ms."
    return Goal(text, mine <= theirs[name])


def _answers_goal(result: EncodersResult) -> Goal:
    claim = "no request to noria fails, and no answer is wrong"
    found = [
        each for run in result.runs if run.target.startswith("noria") for each in (run.check, *run.measurements) if each
    ]
    if not found:
        return Goal(f"{claim}; not measured.", None)
    failed, wrong, compared = (
        sum(getattr(each, name) for each in found) for name in ("num_failed", "num_wrong", "num_compared")
    )
    return Goal(f"{claim}; {failed} failed, {wrong} of {compared} compared are wrong.", not failed and not wrong)


def load_title(load: Load) -> str:
    """A load in words."""
    corpus = "one sentence" if load.corpus == "fixed" else "mixed texts"
    if load.loop == "open":
        return f"{corpus}, open loop, {load.rate:.0f}/s ({load.percent} % of the raw loop)"
    plural = "s" * (load.connections != 1)
    client = "the bench’s client" if load.client == "own" else load.client
    return f"{corpus}, {load.connections} connection{plural}, {client}"
