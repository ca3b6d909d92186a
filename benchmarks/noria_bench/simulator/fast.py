"""The fast engine: jumps from one departure to the next, for clusters with many devices. Needs numba.

Between a join and a departure a batch does not change, so j steps take j times the step's duration; an image is two
events. Where the exact engine asks the scheduler, this one assumes its outcome for one size, without deadlines and
priorities: images join in order of arrival, at the next end of a step, and all that run take part in each step. Rows
beyond the knee step in turns. Of several sizes, each takes one step in turn. Devices do not fail or change in number.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from noria.protocol.model_spec import ModelKey
from noria.scheduling.types import BatchKey
from noria_bench.simulator.devices import Device
from noria_bench.simulator.outcome import Outcome
from noria_bench.simulator.workload import Shape, SimulateError

Array = np.ndarray[Any, Any]

DECODE_BATCH = 4  # the default of `engine.decode_batch`


def arrival_times(kind: str, rate: float, duration_s: float, seed: int) -> np.ndarray:
    """Return the times of a Poisson process [N], sorted: `poisson`, or `diurnal` as `workload.diurnal`."""
    rng = np.random.default_rng(seed)
    edges = np.append(np.arange(0.0, duration_s, min(60.0, duration_s / 100)), duration_s)
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    rates = np.full(len(widths), rate)
    if kind == "diurnal":
        rates *= 1.0 - 0.6 * np.cos(2 * np.pi * middles / 86_400.0)
    counts = rng.poisson(rates * widths)
    times: Array = np.repeat(edges[:-1], counts) + rng.random(int(counts.sum())) * np.repeat(widths, counts)
    return np.sort(times)


def simulate_fast(
    device: Device, num_devices: int, times_s: np.ndarray, shapes: Sequence[Shape], kinds: np.ndarray | None = None,
    *, queue_limit: int = 256, num_choices: int = 3, seed: int = 0, start_s: float = 0.0,
) -> Outcome:  # fmt: skip
    """Run a world of `num_devices` like `world.simulate`; request n arrives at `times_s[n]` with `shapes[kinds[n]]`.

    Without `kinds` they are drawn by the shapes' shares. Raises SimulateError.
    """
    if any(shape.deadline_s is not None or shape.priority != "normal" or shape.images != 1 for shape in shapes):
        raise SimulateError("the fast engine knows one image a request, no deadlines and no priorities")
    if kinds is None:
        shares = np.array([shape.share for shape in shapes])
        rng = np.random.default_rng(seed + 1)
        kinds = rng.choice(len(shapes), len(times_s), p=shares / shares.sum()).astype(np.uint8)
    sizes = sorted({(shape.width_px, shape.height_px) for shape in shapes})
    step_s, decode_s = _tables(device, sizes, max(shape.rows for shape in shapes))
    costs = device.costs()
    work = []
    for shape in shapes:
        key = BatchKey(shape.width_px, shape.height_px)
        batch = max(min(costs.rows_limit(key) // shape.rows, device.slots), 1)
        work.append((costs.step_s(key, batch * shape.rows) / batch, costs.decode_s(key, DECODE_BATCH) / DECODE_BATCH))
    latencies, end_s = _jit()(
        times_s,
        kinds,
        np.array([sizes.index((shape.width_px, shape.height_px)) for shape in shapes]),
        np.array([shape.rows for shape in shapes]),
        np.array([shape.steps for shape in shapes]),
        np.array(work),
        step_s,
        decode_s,
        costs.text_encode_s(ModelKey()),
        num_devices,
        device.slots,
        queue_limit,
        min(num_choices, num_devices),
        seed,
    )
    counted = latencies[np.searchsorted(times_s, start_s) :]
    finished = counted[~np.isnan(counted)] + device.front_end_s
    outcome = Outcome(num_images=int(np.sum(~np.isnan(latencies))), device_s=num_devices * end_s, duration_s=end_s)
    outcome.latencies_s.frombytes(finished.astype(np.float64).tobytes())
    if len(finished) < len(counted):
        outcome.unserved["rejected"] = len(counted) - len(finished)
    return outcome


def _tables(device: Device, sizes: Sequence[tuple[int, int]], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the durations of a step [size, rows] and of a decode [size, images]."""
    costs = device.costs()
    keys = [BatchKey(width_px, height_px) for width_px, height_px in sizes]
    step_s = np.zeros((len(keys), device.slots * rows + 1))
    for number, key in enumerate(keys):
        limit = costs.rows_limit(key)
        for count in range(1, step_s.shape[1]):
            step_s[number, count] = costs.step_s(key, min(count, limit)) * max(count / limit, 1.0)
    decode_s = np.array([[costs.decode_s(key, count) for count in range(DECODE_BATCH + 1)] for key in keys])
    return step_s, decode_s


def _jit() -> Any:
    try:
        import numba
    except ImportError as error:
        raise SimulateError(
            "the fast engine needs numba: pip install 'noria-bench[simulate]', or use --engine exact"
        ) from error
    if "run" not in _COMPILED:
        for function in (_sift, _fill, _next_departure):
            globals()[function.__name__] = numba.njit(cache=True)(function)
        _COMPILED["run"] = numba.njit(cache=True)(_run)
    return _COMPILED["run"]


_COMPILED: dict[str, Any] = {}


def _run(  # noqa: C901, PLR0912, PLR0915 - numba compiles one function best
    times_s: Array,
    kinds: Array,
    size_of: Array,
    rows_of: Array,
    steps_of: Array,
    work_of: Array,
    step_s: Array,
    decode_s: Array,
    text_encode_s: float,
    num_devices: int,
    num_slots: int,
    queue_limit: int,
    num_choices: int,
    seed: int,
) -> tuple[Array, float]:
    np.random.seed(seed)
    num_sizes, num_requests = step_s.shape[0], len(times_s)
    latencies = np.full(num_requests, np.nan, dtype=np.float32)
    followers = np.full(num_requests, -1, dtype=np.int32)  # the next in a device's queue
    boundary = np.zeros(num_devices)  # when the last step ended, or the next one that matters does
    done = np.zeros(num_devices, dtype=np.int64)  # steps until then
    num_running = np.zeros(num_devices, dtype=np.int64)
    rows = np.zeros((num_devices, num_sizes), dtype=np.int64)
    finish_at = np.zeros((num_devices, num_slots), dtype=np.int64)  # by `done`
    images = np.zeros((num_devices, num_slots), dtype=np.int32)
    heads, tails = np.full(num_devices, -1, dtype=np.int32), np.full(num_devices, -1, dtype=np.int32)
    num_queued = np.zeros(num_devices, dtype=np.int64)
    # Work left: `fixed_s` less `call_s` for each step done.
    fixed_s, call_s = np.zeros(num_devices), np.zeros(num_devices)
    departures = np.full(num_devices, np.inf)
    heap, places = np.arange(num_devices), np.arange(num_devices)
    choices = np.zeros(num_choices, dtype=np.int64)
    arriving, end_s = 0, 0.0
    while True:
        device = heap[0]
        at_s = departures[device]
        if arriving < num_requests and times_s[arriving] <= at_s:
            request, at_s = arriving, times_s[arriving]
            arriving += 1
            best_s, device = np.inf, 0
            for choice in range(num_choices):
                other, is_new = 0, False
                while not is_new:
                    other, is_new = np.random.randint(num_devices), True
                    for before in range(choice):
                        is_new = is_new and choices[before] != other
                choices[choice] = other
                left_s = fixed_s[other]
                if num_running[other]:
                    duration_s = 0.0
                    for size in range(num_sizes):
                        duration_s += step_s[size, rows[other, size]]
                    passed = max(math.floor((at_s - boundary[other]) / duration_s), 0)
                    left_s -= call_s[other] * (done[other] + passed)
                if left_s < best_s:
                    best_s, device = left_s, other
            if num_running[device] == num_slots:
                if num_queued[device] >= queue_limit:
                    continue
                kind = kinds[request]
                fixed_s[device] += steps_of[kind] * work_of[kind, 0] + work_of[kind, 1]
                if heads[device] < 0:
                    heads[device] = request
                else:
                    followers[tails[device]] = request
                tails[device] = request
                num_queued[device] += 1
                continue
            kind = kinds[request]
            fixed_s[device] += steps_of[kind] * work_of[kind, 0] + work_of[kind, 1]
            if num_running[device] == 0:
                boundary[device] = max(at_s, boundary[device])
            elif at_s > boundary[device]:
                duration_s = 0.0
                for size in range(num_sizes):
                    duration_s += step_s[size, rows[device, size]]
                first = finish_at[device, 0]
                for slot in range(1, num_running[device]):
                    first = min(first, finish_at[device, slot])
                num_steps = min(math.ceil((at_s - boundary[device]) / duration_s), first - done[device])
                boundary[device] += num_steps * duration_s
                done[device] += num_steps
            heads[device] = request
            tails[device] = request
            num_queued[device] = 1
        elif at_s == np.inf:
            break
        else:
            boundary[device] = at_s
            first = finish_at[device, 0]
            for slot in range(1, num_running[device]):
                first = min(first, finish_at[device, slot])
            done[device] = first
            num_decoded, size_decoded, slot = 0, -1, 0
            departed = np.empty(4, dtype=np.int32)
            while slot < num_running[device] and num_decoded < 4:
                request = images[device, slot]
                kind = kinds[request]
                size = size_of[kind]
                if finish_at[device, slot] == first and (size_decoded < 0 or size == size_decoded):
                    departed[num_decoded] = request
                    num_decoded, size_decoded = num_decoded + 1, size
                    rows[device, size] -= rows_of[kind]
                    call_s[device] -= work_of[kind, 0]
                    fixed_s[device] -= work_of[kind, 0] * finish_at[device, slot] + work_of[kind, 1]
                    last = num_running[device] - 1
                    finish_at[device, slot] = finish_at[device, last]
                    images[device, slot] = images[device, last]
                    num_running[device] = last
                else:
                    slot += 1
            boundary[device] += decode_s[size_decoded, num_decoded]
            end_s = max(end_s, boundary[device])
            for number in range(num_decoded):
                latencies[departed[number]] = boundary[device] - times_s[departed[number]]
        _fill(
            device, num_slots, num_running, heads, followers, num_queued, finish_at, images, rows, fixed_s, call_s,
            boundary, done, kinds, size_of, rows_of, steps_of, work_of, text_encode_s,
        )  # fmt: skip
        departures[device] = _next_departure(device, num_running, rows, finish_at, boundary, done, step_s)
        _sift(places[device], heap, places, departures)
    return latencies, end_s


def _fill(
    device: int,
    num_slots: int,
    num_running: Array,
    heads: Array,
    followers: Array,
    num_queued: Array,
    finish_at: Array,
    images: Array,
    rows: Array,
    fixed_s: Array,
    call_s: Array,
    boundary: Array,
    done: Array,
    kinds: Array,
    size_of: Array,
    rows_of: Array,
    steps_of: Array,
    work_of: Array,
    text_encode_s: float,
) -> None:
    """Let queued images join."""
    while num_running[device] < num_slots and heads[device] >= 0:
        request = heads[device]
        heads[device] = followers[request]
        num_queued[device] -= 1
        kind, slot = kinds[request], num_running[device]
        finish_at[device, slot] = done[device] + steps_of[kind]
        images[device, slot] = request
        num_running[device] += 1
        rows[device, size_of[kind]] += rows_of[kind]
        call_s[device] += work_of[kind, 0]
        fixed_s[device] += work_of[kind, 0] * done[device]
        boundary[device] += text_encode_s


def _next_departure(
    device: int, num_running: Array, rows: Array, finish_at: Array, boundary: Array, done: Array, step_s: Array
) -> float:
    """Return when the next image of a device is denoised."""
    if num_running[device] == 0:
        return np.inf
    duration_s = 0.0
    for size in range(step_s.shape[0]):
        duration_s += step_s[size, rows[device, size]]
    first = finish_at[device, 0]
    for slot in range(1, num_running[device]):
        first = min(first, finish_at[device, slot])
    return float(boundary[device] + (first - done[device]) * duration_s)


def _sift(place: int, heap: Array, places: Array, keys: Array) -> None:
    """Restore the order of the heap after the key at `place` has changed."""
    device = heap[place]
    while place and keys[heap[(place - 1) // 2]] > keys[device]:
        heap[place] = heap[(place - 1) // 2]
        places[heap[place]] = place
        place = (place - 1) // 2
    while 2 * place + 1 < len(heap):
        child = 2 * place + 1
        if child + 1 < len(heap) and keys[heap[child + 1]] < keys[heap[child]]:
            child += 1
        if keys[heap[child]] >= keys[device]:
            break
        heap[place] = heap[child]
        places[heap[place]] = place
        place = child
    heap[place] = device
    places[device] = place
