"""Fuzzes all targets, one after the other, guided by the coverage of Noria's code (atheris, libFuzzer).

    python -m fuzz.run [--minutes M | --inputs N] [--output FILE] [TARGET ...]

Each target runs in a process of its own, which ends with the first defect: an exception, or an input beyond a bound of
CPU time or memory (`child.py`). The input is then in tests/fuzz/corpus/TARGET/, to be committed with the mending, and
so replayed by `make test`. Inputs that reach new code are kept in build/fuzz/TARGET/, where the next run begins. To an
output that exists, the counts are added.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
CORPUS, FOUND = ROOT / "tests" / "fuzz" / "corpus", ROOT / "build" / "fuzz"


def main():
    """Run the targets; returns 1 if a defect was found."""
    from fuzz.targets import TARGETS
    from noria_bench.measurement.provenance import collect_provenance

    parser = argparse.ArgumentParser(prog="python -m fuzz.run")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--minutes", type=float, default=6.0, help="for all targets together (6)")
    amount.add_argument("--inputs", type=int, help="for all targets together")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the results")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (all)")
    arguments = parser.parse_args()
    chosen = arguments.targets or list(TARGETS)
    total_share = sum(TARGETS[name].share for name in chosen)
    output = arguments.output or ROOT / "bench-results" / f"fuzz-{datetime.date.today()}.json"
    result = json.loads(output.read_text()) if output.exists() else {**collect_provenance(), "bench": "fuzz"}
    for name in chosen:
        if arguments.inputs:
            limit = f"-runs={round(arguments.inputs * TARGETS[name].share / total_share)}"
        else:
            limit = f"-max_total_time={round(60 * arguments.minutes / len(chosen))}"
        counts = result.setdefault("targets", {}).setdefault(name, {"inputs": 0, "seconds": 0.0, "defects": 0})
        _add(counts, *_run(name, limit))
        print(
            f"{name:14} {counts['inputs']:>9,} inputs, {counts['inputs'] / counts['seconds']:8,.0f}/s, "
            f"{counts['covered']:,} of coverage, {counts['defects']} defects",
            flush=True,
        )
        result["inputs"] = sum(each["inputs"] for each in result["targets"].values())
        result["defects"] = sum(each["defects"] for each in result["targets"].values())
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['inputs']:,} inputs, {result['defects']} defects: {output}")
    return int(result["defects"] > 0)


def _run(name, limit):
    """Return libFuzzer's log of one target, its seconds and its status."""
    found = FOUND / name
    for folder in (found, CORPUS / name):
        folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fuzz.child", name, str(found), str(CORPUS / name), limit]
    command += ["-print_final_stats=1", "-timeout=120", "-rss_limit_mb=4096", f"-artifact_prefix={CORPUS / name}/"]
    command += [f"-dict={file}" for file in CORPUS.parent.glob(f"{name}.dict")]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:  # libFuzzer exits at once, and cleans nothing up
        child = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": folder, "XDG_CACHE_HOME": folder},
        )
    if child.returncode:
        lines = (child.stdout + child.stderr).splitlines()
        print(*(line for line in lines if not re.match(r"#\d+\t|INFO: ", line)), sep="\n", file=sys.stderr)
    return child.stderr, time.monotonic() - started, child.returncode


def _add(counts, log, seconds, status):
    def last(pattern):
        return int((re.findall(pattern, log) or [0])[-1])

    counts["inputs"] += last(r"stat::number_of_executed_units: (\d+)") or last(r"#(\d+)\t")
    counts["seconds"] = round(counts["seconds"] + seconds, 1)
    counts["defects"] += bool(status)
    counts["covered"] = last(r" cov: (\d+)")
    counts["kept"] = last(r" corp: (\d+)")
    counts["peak_mib"] = max(counts.get("peak_mib", 0), last(r"stat::peak_rss_mb: +(\d+)"))


if __name__ == "__main__":
    sys.exit(main())
