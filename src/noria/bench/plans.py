"""Which runs each bench is made of, one after the other: the seed article's scenarios, mixed arrivals, sweeps."""

from collections.abc import Iterator

import msgspec

from noria.bench import calibration, scenarios, suite_options, sweeps
from noria.bench.clients import OpenLoad, ScenarioLoad, warm_up_of
from noria.bench.runs import Traffic
from noria.bench.scenarios import SCENARIOS
from noria.bench.server import running_target
from noria.bench.suite import Plan, say
from noria.bench.suite_options import SuiteOptions
from noria.bench.targets.catalog import TARGETS
from noria.bench.workload import Arrivals, mixed, trace
from noria.config import Config
from noria.spec import ModelSpec

MIXED_S = 60.0  # that requests arrive for, where nobody says
_SATURATED_S = 24.0  # as in `contract`


def of_scenario(name: str, options: SuiteOptions, config: Config, spec: ModelSpec) -> Iterator[Plan]:
    """`scenario1` or `scenario2`, on each target."""
    load = scenario_load(name, options.length_s(SCENARIOS[name].seconds), options.seed, spec)
    for target in options.targets:
        yield Plan(name, target, load, config)


def scenario_load(name: str, seconds: float, seed: int, spec: ModelSpec) -> ScenarioLoad:
    """A scenario of the article's in `seconds`."""
    scenario = SCENARIOS[name]
    return ScenarioLoad(scenario, scenarios.traffic(scenario, seconds, seed), scenarios.rows(spec))


def of_mixed(options: SuiteOptions, config: Config, spec: ModelSpec) -> Iterator[Plan]:
    """Open-loop arrivals of mixed requests, the same for every target; first, unless a rate is given, Noria's capacity is measured."""
    rows_per_s = options.rate or capacity_rows_per_s(config, spec, options.seed) * options.load / 100
    kinds: tuple[Arrivals, ...] = ("poisson", "bursty") if options.arrivals == "both" else (options.arrivals,)
    for kind in kinds:
        load = open_load(kind, rows_per_s, options.length_s(MIXED_S), options.seed, spec)
        say(f"{len(load.arrivals)} {kind} arrivals in {load.traffic.seconds:.0f} s, {rows_per_s:.1f} rows/s")
        for target in options.targets:
            yield Plan("mixed", target, load, config, variant=kind)


def of_sweep(name: str, options: SuiteOptions, config: Config, spec: ModelSpec) -> Iterator[Plan]:
    """One sweep, or all: each variant under scenario 2's eight users."""
    load = scenario_load("scenario2", options.length_s(sweeps.SECONDS), options.seed, spec)
    for sweep in suite_options.SWEEPS if name == "all" else (name,):
        for variant in sweeps.variants(sweep, full=options.full):
            engine = msgspec.structs.replace(config.engine, **variant.engine)
            yield Plan(
                f"sweep-{sweep}",
                TARGETS[variant.target],
                load,
                msgspec.structs.replace(config, engine=engine),
                variant.settings,
                variant.name,
            )


def open_load(kind: Arrivals, rows_per_s: float, seconds: float, seed: int, spec: ModelSpec) -> OpenLoad:
    """Mixed requests without deadlines, `rows_per_s` of work arriving for `seconds`."""
    mix = mixed(spec)
    arrivals = trace(mix, spec, None, rows_per_s=rows_per_s, seconds=seconds, arrivals=kind, seed=seed)
    traffic = Traffic("open", seconds, "mixed", arrivals=kind, rows_per_s=rows_per_s, seed=seed)
    return OpenLoad(traffic, arrivals, warm_up_of(mix, spec))


def capacity_rows_per_s(config: Config, spec: ModelSpec, seed: int) -> float:
    """The mixed work that Noria finishes each second while 32 users keep it busy."""
    noria = TARGETS["noria"]
    say(f"measuring Noria's capacity for {_SATURATED_S:.0f} s")
    with running_target(noria, spec, config) as server:
        found = calibration.saturate(server.port, noria.path, mixed(spec), spec, _SATURATED_S, seed)
    say(f"Noria's capacity is {found.rows_per_s:.1f} rows/s, {found.requests_per_s:.2f} requests/s")
    return found.rows_per_s
