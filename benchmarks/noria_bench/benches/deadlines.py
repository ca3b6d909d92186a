"""`noria bench deadlines`: which requests meet their deadlines at 50 to 150 % of capacity, by scheduling policy.

Calibration comes first: how long each kind of request takes alone (deadlines are multiples of it), and how much mixed
work Noria sustains (loads are shares of it, also for the reference server). Then each load is sent to each target: the
same trace, a fresh server each time. The targets of one load run one after the other, so that a noisy machine affects
them equally.

Yields plans; `suite` carries them out, and `reports.deadlines` makes the tables. Documented in
docs/benchmarks/deadlines.md.
"""

import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec

from noria.config import Config
from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.benches import suite
from noria_bench.benches.deadline_options import DeadlineOptions, DeadlineTarget
from noria_bench.benches.suite import RunPlan, log_status
from noria_bench.load import capacity
from noria_bench.load.capacity import SoloCost
from noria_bench.load.load_generators import LoadGenerator, bodies_of_every_kind
from noria_bench.load.workload import MIXES, Mix, generate_trace
from noria_bench.measurement import batch_invariance
from noria_bench.measurement.run_metrics import prediction_summary
from noria_bench.measurement.runs import Traffic
from noria_bench.reports import writer
from noria_bench.targets.catalog import TARGETS, Target
from noria_bench.targets.server import running_target

NORIA, REFERENCE = TARGETS["noria"], TARGETS["reference-batched"]
# Each capacity is measured under this long a load.
_CAPACITY_S = 24.0
# How long 8 users keep Noria busy to judge its predictions.
_STEADY_S = 40.0
# Requests of the mix before each run: samplers are compiled, and memory grows to what load needs.
_NUM_WARM_UP_REQUESTS = 48
# After the last deadline of a trace, until a request without an answer counts as unanswered.
_GRACE_S = 2.0


def main(config: Config, options: DeadlineOptions, folder: pathlib.Path) -> int:
    """Measure, write the runs and their report into `folder`, print the report; returns the exit status."""
    return suite.main(config, folder, functools.partial(deadline_runs, options), writer.write_report)


def deadline_runs(options: DeadlineOptions, config: Config, spec: DiffusionModelSpec) -> Iterator[RunPlan]:
    """Calibrate, then one run for each load and target.

    Raises:
        RuntimeError: a server that is calibrated did not start, or finished nothing.

    """
    mix = MIXES[options.mix](spec)
    calibration, solo_costs = calibrate(options, mix, config, spec)
    for load in options.loads:
        generator = load_generator(options, mix, spec, solo_costs, load, calibration["capacity"]["noria"]["rows_per_s"])
        log_status(f"deadlines: {len(generator.arrivals)} arrivals in {options.seconds:.0f} s at {load} % of capacity")
        for target in options.targets:
            yield RunPlan(
                "deadlines",
                REFERENCE if target == "reference" else NORIA,
                generator,
                _config_of(target, config),
                variant=f"{load} %" if target == "reference" else f"{load} % {target}",
                calibration=calibration,
            )


def load_generator(
    options: DeadlineOptions,
    mix: Mix,
    spec: DiffusionModelSpec,
    solo_costs: tuple[SoloCost, ...],
    load_percent: int,
    capacity_rows_per_s: float,
) -> LoadGenerator:
    """The trace of one load, the same for every target; each request has a deadline."""
    rows_per_s = capacity_rows_per_s * load_percent / 100
    arrivals = generate_trace(
        mix,
        spec,
        lambda template: capacity.solo_s(solo_costs, template),
        rows_per_s=rows_per_s,
        seconds=options.seconds,
        arrivals=options.arrivals,
        seed=options.seed,
    )
    traffic = Traffic(
        "open",
        options.seconds,
        options.mix,
        arrivals=options.arrivals,
        rows_per_s=rows_per_s,
        load_percent=load_percent,
        seed=options.seed,
    )
    warm_up = itertools.islice(mix.templates(options.seed + 1), _NUM_WARM_UP_REQUESTS)
    bodies = [*bodies_of_every_kind(mix, spec), *(template.body for template in warm_up)]
    return LoadGenerator(traffic, arrivals, bodies, grace_s=_GRACE_S)


def calibrate(
    options: DeadlineOptions, mix: Mix, config: Config, spec: DiffusionModelSpec
) -> tuple[dict[str, Any], tuple[SoloCost, ...]]:
    """Return the measurements made before the runs, JSON-ready, and the time that each kind of request takes alone.

    The JSON has `solo`, `capacity` (by server), `max_channel_differences` (of 255: one seed alone and among 32
    requests) and `steady_predictions` (the `prediction_summary` of 8 users in a closed loop).
    """
    noria = _config_of("least-slack", config)
    capacities: dict[str, Any] = {}
    with running_target(NORIA, spec, noria) as server:
        url = f"http://127.0.0.1:{server.port}{NORIA.path}"
        log_status("deadlines: measuring what requests take alone")
        solo_costs = capacity.measure_solo(url, mix, spec)
        log_status("deadlines: measuring Noria's capacity")
        capacities["noria"] = _measure_capacity(server.port, NORIA, mix, spec, options.seed)
        log_status("deadlines: measuring predictions at a steady load")
        errors = capacity.measure_prediction_errors(server.port, NORIA.path, mix, _STEADY_S, options.seed + 2)
        differences = {"default": batch_invariance.max_channel_differences(url, spec)}
    log_status("deadlines: generating the same seeds alone and among 32 requests")
    buckets = (2 * batch_invariance.IN_FLIGHT,)
    single_bucket = msgspec.structs.replace(noria, engine=msgspec.structs.replace(noria.engine, buckets=buckets))
    with running_target(NORIA, spec, single_bucket) as server:
        url = f"http://127.0.0.1:{server.port}{NORIA.path}"
        differences["single_bucket"] = batch_invariance.max_channel_differences(url, spec)
    if "reference" in options.targets:
        log_status("deadlines: measuring the reference server's capacity")
        with running_target(REFERENCE, spec, config) as server:
            capacities["reference"] = _measure_capacity(server.port, REFERENCE, mix, spec, options.seed)
    calibration = {
        "solo": [msgspec.to_builtins(cost) for cost in solo_costs],
        "capacity": capacities,
        "max_channel_differences": differences,
        "steady_predictions": prediction_summary(errors),
    }
    return calibration, solo_costs


def _measure_capacity(port: int, target: Target, mix: Mix, spec: DiffusionModelSpec, seed: int) -> Any:
    return msgspec.to_builtins(capacity.measure_capacity(port, target.path, mix, spec, _CAPACITY_S, seed))


def _config_of(target: DeadlineTarget, config: Config) -> Config:
    if target == "reference":
        return config
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, policy=target))
