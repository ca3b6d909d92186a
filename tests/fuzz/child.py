"""Fuzzes one target in this process: `python -m fuzz.child TARGET`, then libFuzzer's arguments."""

import itertools
import pathlib
import resource
import sys
import tempfile
import time

import atheris
import psutil

with atheris.instrument_imports(include=["noria"]):
    from fuzz.targets import TARGETS

MAX_CPU_S = 5.0  # CPU time of all threads; the slowest inputs take 0.1 s
MAX_BYTES_PER_INPUT = 64 * 2**20  # by which the peak of the process may grow
MAX_BYTES_KEPT = 256 * 2**20  # by which the process may grow after the first inputs
NUM_FIRST = 2000


def guarded(run):
    """`run`, which also raises for an input that takes too much time or memory."""
    numbers, process, first_bytes = itertools.count(), psutil.Process(), 0

    def run_guarded(data):
        nonlocal first_bytes
        peak, started = _peak_bytes(), time.process_time()
        run(data)
        seconds, grown = time.process_time() - started, _peak_bytes() - peak
        assert seconds < MAX_CPU_S, f"took {seconds:.1f} s of CPU time"
        assert grown < MAX_BYTES_PER_INPUT, f"took {grown} bytes"
        if (number := next(numbers)) == NUM_FIRST:
            first_bytes = process.memory_info().rss
        elif number > NUM_FIRST and number % 500 == 0:
            kept = process.memory_info().rss - first_bytes
            assert kept < MAX_BYTES_KEPT, f"{number - NUM_FIRST} inputs left {kept} bytes"

    return run_guarded


def _peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    name, *arguments = sys.argv[1:]
    target = TARGETS[name]
    with target.open() as run, tempfile.TemporaryDirectory() as seeds:
        for number, seed in enumerate(target.seeds()):
            run(seed)  # imports what is imported late
            (pathlib.Path(seeds) / str(number)).write_bytes(seed)
        mutator = target.mutator(lambda *args: atheris.Mutate(*args))  # noqa: PLW0108 - Fuzz() replaces it
        more = {} if mutator is None else {"custom_mutator": mutator}
        atheris.Setup([sys.argv[0], *arguments, seeds, f"-max_len={target.max_bytes}"], guarded(run), **more)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
