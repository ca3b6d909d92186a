"""`noria bench soak`: a server for an hour under mixed traffic, one attack after the other, and random kills.

In the first half, random processes but the supervisor are killed, one every half minute. In the second half none is, so
that the same processes live long, and growth in it is judged (`flatness.py`). Traffic and attacks go on all the time.
"""

import itertools
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from noria.protocol.process_signals import sigterm_interrupts
from noria.testing.server import RunningServer, running_process
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.reports.table import Table, format_number
from noria_bench.soak.attacks import ATTACKS
from noria_bench.soak.flatness import Flatness, flatness
from noria_bench.soak.killer import Killer, ReadinessMonitor
from noria_bench.soak.options import SoakOptions
from noria_bench.soak.plot import plot_soak
from noria_bench.soak.samples import Sampler
from noria_bench.soak.traffic import Visitor, start_visitors

_SAMPLE_INTERVAL_S, _MIN_SAMPLES = 2.0, 40
_ATTACK_S, _REST_S = 15.0, 5.0
_KILL_INTERVAL_S = 30.0
_SEED = 1
_STOP_S = 150.0  # for the last visits
# Jobs are deleted after a minute, so that the database gets full and stays so.
_FLAGS = ("--slots", "4", "--drain-s", "5", "--ttl-s", "60")


def main(options: SoakOptions, folder: pathlib.Path) -> int:
    """Soak, print tables, write soak.json and .svg into `folder`; return 1 on growth or failure."""
    folder.mkdir(parents=True, exist_ok=True)
    with sigterm_interrupts():
        result = measure(60 * options.minutes, folder)
    (folder / "soak.json").write_bytes(msgspec.json.encode(result) + b"\n")
    plot_soak(result, folder / "soak.svg")
    print(tables(result))
    return int(bool(result["faults"]))


def measure(seconds: float, folder: pathlib.Path) -> dict[str, Any]:
    """The results as one JSON-ready document; the server's log is in `folder`."""
    header, log = collect_provenance(), folder / "server.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="noria-soak-") as data:
        command = [sys.executable, "-m", "noria", "serve", "bundled", *_FLAGS, "--data-dir", data]
        with running_process(lambda port: [*command, "--port", str(port)], log=log) as server:
            run = _Run(server, pathlib.Path(data), seconds)
            run.go()
            server.process.send_signal(signal.SIGTERM)
            status = server.process.wait(60)
    return {**header, "bench": "soak", "seconds": seconds, "seed": _SEED, **run.results(status, log)}


class _Run:
    """The clients and observers of one server."""

    def __init__(self, server: RunningServer, data: pathlib.Path, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self._stopped = threading.Event()
        self._sampler = Sampler(server, data, min(_SAMPLE_INTERVAL_S, seconds / _MIN_SAMPLES))
        num_kills = max(1, round(seconds / 2 / _KILL_INTERVAL_S))
        self._killer = Killer(server.process.pid, num_kills, seconds / 2, _SEED)
        self._monitor = ReadinessMonitor(f"http://127.0.0.1:{server.port}")
        self._visitors: Sequence[Visitor] = ()
        self._num_attacks: Counter[str] = Counter()
        self._complete = True

    def go(self) -> None:
        """Run for the whole time, or until Ctrl-C."""
        self._visitors = start_visitors(self._server.port, self._stopped, _SEED)
        until = time.monotonic() + self._seconds
        observers = (self._sampler, self._killer, self._monitor)
        for observer in observers:
            observer.start()
        try:
            for name in itertools.cycle(ATTACKS):
                if time.monotonic() >= until:
                    break
                self._attack(name, until)
        except KeyboardInterrupt:
            self._complete = False
        for observer in observers:
            observer.stop()
        self._stopped.set()
        deadline = time.monotonic() + _STOP_S
        for visitor in self._visitors:
            visitor.join(max(0.0, deadline - time.monotonic()))

    def results(self, status: int, log: pathlib.Path) -> dict[str, Any]:
        """All that was seen, JSON-ready."""
        found = [flatness(name, self._sampler.at_s, values) for name, values in sorted(self._sampler.series.items())]
        judged = [each for each in found if each is not None]
        faults = [f"{each.quantity} grew by {each.growth_per_h:g} an hour" for each in judged if not each.is_flat]
        faults += [fault for visitor in self._visitors for fault in visitor.unexpected]
        faults += [f"{visitor.name} is still waiting" for visitor in self._visitors if visitor.is_alive()]
        if status:
            faults.append(f"the supervisor ended with status {status}")
        if "Traceback" in log.read_text(encoding="utf-8", errors="replace"):
            faults.append(f"a traceback is in {log}")
        return {
            "complete": self._complete,
            "faults": faults,
            "flatness": [msgspec.to_builtins(each) | {"is_flat": each.is_flat} for each in judged],
            "visits": {visitor.name: dict(visitor.outcomes) for visitor in self._visitors},
            "attacks": dict(self._num_attacks),
            "kills": dict(self._killer.killed),
            "killed_at_s": [round(at, 1) for at in self._killer.killed_at_s],
            "outages_s": [round(outage, 1) for outage in self._monitor.outages_s],
            "at_s": self._sampler.at_s,
            "series": self._sampler.series,
        }

    def _attack(self, name: str, until: float) -> None:
        ended = threading.Event()
        attack = threading.Thread(target=ATTACKS[name], args=(self._server.port, ended), daemon=True)
        attack.start()
        self._num_attacks[name] += 1
        time.sleep(max(0.0, min(_ATTACK_S, until - time.monotonic())))
        ended.set()
        attack.join(_STOP_S)
        time.sleep(max(0.0, min(_REST_S, until - time.monotonic())))


def tables(result: Mapping[str, Any]) -> str:
    """Growth and visits as Markdown."""
    growth = Table(
        "Growth in the second half",
        ("quantity", "median", "growth an hour", "allowed an hour", "flat"),
        tuple(
            _growth_row(Flatness(**{key: value for key, value in each.items() if key != "is_flat"}))
            for each in result["flatness"]
        ),
        (),
    )
    visits = Table(
        "Visits",
        ("client", "outcomes"),
        tuple(
            (name, ", ".join(f"{key}: {count}" for key, count in sorted(of.items())))
            for name, of in result["visits"].items()
        ),
        (f"{sum(result['kills'].values())} kills, {sum(result['attacks'].values())} attacks.", *result["faults"]),
    )
    return f"{growth.markdown()}\n\n{visits.markdown()}"


def _growth_row(of: Flatness) -> tuple[str, ...]:
    unit = 2**20 if of.quantity.rpartition(" ")[2] in ("PSS", "RSS", "bytes") else 1
    numbers = (format_number(value / unit, 1) for value in (of.median, of.growth_per_h, of.allowed_per_h))
    return (of.quantity + (", MiB" if unit > 1 else ""), *numbers, "yes" if of.is_flat else "no")
