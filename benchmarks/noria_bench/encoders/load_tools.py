"""Apache Bench and wrk: how they are run, and what they print. Their own output is kept.

wrk's percentiles are not used: it adds the requests that a user with a fixed rhythm would have sent meanwhile, so those
of texts of many lengths would be too long. Its throughput checks that of the bench's own client.
"""

import csv
import json
import math
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping

from noria_bench.encoders.results import Load, Measurement

_TIMEOUT_S = 60
# More than a run can have; ab ends by its time.
_MAX_REQUESTS = 10_000_000
# Arguments: a file with a body in each line, and the number of the first line to send.
_WRK_SCRIPT = """
local requests, at = {}, 0
function init(arguments)
  local headers = {HEADERS}
  for line in io.lines(arguments[1]) do
    requests[#requests + 1] = wrk.format("POST", nil, headers, line)
  end
  at = tonumber(arguments[2]) % #requests
end
function request()
  at = at % #requests + 1
  return requests[at]
end
function done(summary, latency, rates)
  local errors = summary.errors
  print(string.format('\\n{"requests": %d, "us": %d, "status": %d, "broken": %d}', summary.requests, summary.duration,
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
"""


def has(tool: str) -> bool:
    """Whether `ab` or `wrk` is installed."""
    return shutil.which(tool) is not None


def run_ab(
    url: str, body: pathlib.Path, headers: Mapping[str, str], load: Load, seconds: float, output: pathlib.Path
) -> Measurement:
    """Send the same body over and over; its output goes to `output`.

    Raises:
        RuntimeError: it failed.

    """
    percentiles = output.with_suffix(".csv")
    options = {
        "-c": load.connections,
        "-t": math.ceil(seconds),
        "-n": _MAX_REQUESTS,  # -t sets it, so it comes after it
        "-s": _TIMEOUT_S,
        "-p": body,
        "-T": headers["Content-Type"],
        "-e": percentiles,
    }
    words = [str(word) for option in options.items() for word in option]
    others = [word for name, value in headers.items() if name != "Content-Type" for word in ("-H", f"{name}: {value}")]
    text = _run(["ab", "-q", "-l", "-r", *words, *others, url], output)
    return parse_ab(text, percentiles.read_text(encoding="utf-8") if percentiles.exists() else "", load)


def parse_ab(text: str, percentiles: str, load: Load) -> Measurement:
    """Parse the output of ab, and its file of percentiles in milliseconds.

    Raises:
        RuntimeError: there is no number of requests.

    """
    # "Failed requests: 0" only means that all got some answer.
    names = ("Complete requests", "Failed requests", "Non-2xx responses", "Time taken for tests")
    complete, failed, rejected, seconds = (_number(name, text) for name in names)
    if complete is None or not seconds:
        raise RuntimeError(f"ab printed no result: {text.strip()[-300:]!r}")
    num_failed = int((failed or 0) + (rejected or 0))
    num_ok = max(0, int(complete) - num_failed)
    times = {row[0]: float(row[1]) for row in csv.reader(percentiles.splitlines()) if row and row[0].isdecimal()}
    p50_ms, p95_ms, p99_ms = (times.get(name) for name in ("50", "95", "99"))
    return Measurement(load, num_ok / seconds, num_ok, num_failed, p50_ms, p95_ms, p99_ms)


def run_wrk(
    url: str,
    bodies: pathlib.Path,
    headers: Mapping[str, str],
    first: int,
    load: Load,
    seconds: float,
    output: pathlib.Path,
) -> Measurement:
    """Send the lines of `bodies` in turn; its output goes to `output`. Raises RuntimeError if it failed."""
    script = bodies.with_suffix(".lua")
    table = ", ".join(f'["{name}"] = "{value}"' for name, value in headers.items())
    script.write_text(_WRK_SCRIPT.replace("HEADERS", table), encoding="utf-8")
    options = ["-t1", f"-c{load.connections}", f"-d{math.ceil(seconds)}s", f"--timeout={_TIMEOUT_S}s"]
    text = _run(["wrk", *options, "-s", str(script), url, "--", str(bodies), str(first)], output)
    try:
        found = json.loads(text.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"wrk printed no result: {text.strip()[-300:]!r}") from None
    num_ok = found["requests"] - found["status"]
    return Measurement(load, num_ok / (found["us"] / 1e6), num_ok, found["status"] + found["broken"])


def _run(command: list[str], output: pathlib.Path) -> str:
    """Run `command` and return its output, which is also written to `output`."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    output.write_text(done.stdout, encoding="utf-8")
    return done.stdout


def _number(name: str, text: str) -> float | None:
    match = re.search(rf"^{name}: +([\d.]+)", text, re.MULTILINE)
    return float(match[1]) if match else None
