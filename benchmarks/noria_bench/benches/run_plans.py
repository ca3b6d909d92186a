"""The runs of the benches that compare targets: the reference article's scenarios, mixed arrivals and sweeps."""

import itertools
from collections.abc import Iterator

import msgspec

from noria.config import Config
from noria.models.adapters.lora_folders import LoraFolders
from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.benches import scenarios, suite_options, sweeps
from noria_bench.benches.suite import RunPlan, log_status
from noria_bench.benches.suite_options import SuiteOptions
from noria_bench.load import capacity
from noria_bench.load.load_generators import LoadGenerator, bodies_of_every_kind
from noria_bench.load.workload import (
    Arrival,
    Arrivals,
    Mix,
    generate_trace,
    mixed,
    mixed_loras,
    mixed_settings,
    mixed_sizes,
    mixed_start_images,
    uniform,
)
from noria_bench.measurement.runs import Traffic
from noria_bench.targets.catalog import TARGETS
from noria_bench.targets.server import running_target

# How long requests arrive in a run of `mixed`, unless an option says otherwise.
MIXED_S = 60.0
_CAPACITY_S = 24.0
# For the slowest endpoints to answer what is in flight at the end.
_SCENARIO_GRACE_S = 60.0
# Different requests of a closed loop; then they repeat.
_NUM_CLOSED_REQUESTS = 4096
_NUM_LORAS = 4


def scenario_runs(name: str, options: SuiteOptions, config: Config, spec: DiffusionModelSpec) -> Iterator[RunPlan]:
    """`scenario1` or `scenario2` on each target."""
    load = scenario_load_generator(name, options.duration_s(scenarios.DEFAULT_S), options.seed, spec)
    for target in options.targets:
        yield RunPlan(name, target, load, config)


def scenario_load_generator(name: str, seconds: float, seed: int, spec: DiffusionModelSpec) -> LoadGenerator:
    """Return the load of a scenario of the reference article, scaled to `seconds`."""
    traffic, mix = scenarios.scaled_traffic(name, seconds, seed), scenarios.scenario_mix(spec)
    # Two for each user: the second time, all that a batch needs is loaded.
    warm_up = itertools.islice(mix.templates(seed + 1), 2 * scenarios.NUM_USERS[name])
    return LoadGenerator(
        traffic, closed_arrivals(mix, seed, spec), [template.body for template in warm_up], _SCENARIO_GRACE_S
    )


def mixed_runs(options: SuiteOptions, config: Config, spec: DiffusionModelSpec) -> Iterator[RunPlan]:
    """Mixed requests, the same for every target: in a closed loop if there are users, otherwise in an open loop.

    An open loop without a rate measures Noria's capacity first, of which each load is a share.
    """
    if options.num_users is not None:
        yield from _closed_runs(options, options.num_users, config, spec)
        return
    rates: dict[int | None, float] = {None: options.rows_per_s or 0.0}
    if options.rows_per_s is None:
        capacity_per_s = capacity_rows_per_s(config, spec, options.seed)
        rates = {percent: capacity_per_s * percent / 100 for percent in options.load_percents}
    arrival_kinds: tuple[Arrivals, ...] = ("poisson", "bursty") if options.arrivals == "both" else (options.arrivals,)
    for kind, (percent, rows_per_s) in itertools.product(arrival_kinds, rates.items()):
        load = open_load_generator(kind, rows_per_s, options.duration_s(MIXED_S), options.seed, spec, percent)
        log_status(f"{len(load.arrivals)} {kind} arrivals in {load.traffic.seconds:.0f} s, {rows_per_s:.1f} rows/s")
        variant = kind if len(rates) == 1 else f"{kind}, {percent} %"
        for target in options.targets:
            yield RunPlan("mixed", target, load, config, variant=variant)


def _closed_runs(options: SuiteOptions, num_users: int, config: Config, spec: DiffusionModelSpec) -> Iterator[RunPlan]:
    """On each target uniform requests, and what differs in one way from them, which shows what mixing costs it."""
    users = f"{num_users} users"
    mixes = {
        "settings": (users, "mixed-settings", mixed_settings(spec)),
        "uniform": (f"{users}, uniform", "uniform", uniform(spec)),
        "sizes": (f"{users}, sizes", "mixed-sizes", mixed_sizes(spec)),
        "start-images": (f"{users}, start images", "mixed-start-images", mixed_start_images(spec)),
    }
    if loras := tuple(LoraFolders.of(config.engine).files(spec.name)):
        mixes["loras"] = f"{users}, LoRAs", "mixed-loras", mixed_loras(spec, loras[:_NUM_LORAS])
    elif "loras" in options.mixes:
        log_status(f"{spec.name} has no LoRA: no run mixes them")
    seconds = options.duration_s(MIXED_S)
    loads = {
        variant: closed_load_generator(name, mix, num_users, seconds, options.seed, spec)
        for key, (variant, name, mix) in mixes.items()
        if key in options.mixes
    }
    for target in options.targets:
        for variant, load in loads.items():
            yield RunPlan("mixed", target, load, config, variant=variant)


def sweep_runs(name: str, options: SuiteOptions, config: Config, spec: DiffusionModelSpec) -> Iterator[RunPlan]:
    """Yield the runs of a sweep, or of `all` but the frameworks': each variant under scenario 2's eight users."""
    load = scenario_load_generator("scenario2", options.duration_s(sweeps.DEFAULT_SECONDS), options.seed, spec)
    for sweep in suite_options.SWEEPS if name == "all" else (name,):
        for variant in sweeps.variants(sweep, full=options.full):
            engine = msgspec.structs.replace(config.engine, **variant.engine)
            yield RunPlan(
                f"sweep-{sweep}",
                TARGETS[variant.target],
                load,
                msgspec.structs.replace(config, engine=engine),
                variant.settings,
                variant.name,
            )


def open_load_generator(
    kind: Arrivals,
    rows_per_s: float,
    seconds: float,
    seed: int,
    spec: DiffusionModelSpec,
    load_percent: int | None = None,
) -> LoadGenerator:
    """Mixed requests without deadlines; `rows_per_s` of work arrive for `seconds`."""
    mix = mixed(spec)
    arrivals = generate_trace(mix, spec, None, rows_per_s=rows_per_s, seconds=seconds, arrivals=kind, seed=seed)
    traffic = Traffic(
        "open", seconds, "mixed", arrivals=kind, rows_per_s=rows_per_s, load_percent=load_percent, seed=seed
    )
    return LoadGenerator(traffic, arrivals, bodies_of_every_kind(mix, spec), grace_s=seconds)


def closed_load_generator(
    mix_name: str, mix: Mix, num_users: int, seconds: float, seed: int, spec: DiffusionModelSpec
) -> LoadGenerator:
    """Users who for `seconds` each send the next request of one sequence when their previous one is answered."""
    # A full batch of each kind.
    warm_up_bodies = [body for body in bodies_of_every_kind(mix, spec) for _ in range(num_users)]
    traffic = Traffic("closed", seconds, mix_name, num_users=num_users, seed=seed)
    return LoadGenerator(traffic, closed_arrivals(mix, seed, spec), warm_up_bodies, grace_s=seconds)


def closed_arrivals(mix: Mix, seed: int, spec: DiffusionModelSpec) -> tuple[Arrival, ...]:
    """The sequence of requests from which users take the next one."""
    templates = itertools.islice(mix.templates(seed), _NUM_CLOSED_REQUESTS)
    return tuple(
        Arrival(number, 0.0, None, "", template.rows(spec), template) for number, template in enumerate(templates)
    )


def capacity_rows_per_s(config: Config, spec: DiffusionModelSpec, seed: int) -> float:
    """The mixed work that Noria finishes per second while 32 users keep it busy."""
    noria = TARGETS["noria"]
    log_status(f"measuring Noria's capacity for {_CAPACITY_S:.0f} s")
    with running_target(noria, spec, config) as server:
        found = capacity.measure_capacity(server.port, noria.path, mixed(spec), spec, _CAPACITY_S, seed)
    log_status(f"Noria's capacity is {found.rows_per_s:.1f} rows/s, {found.requests_per_s:.2f} requests/s")
    return found.rows_per_s
