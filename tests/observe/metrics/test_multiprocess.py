"""The values of several processes: the output equals that of prometheus_client's own collector, line by line."""

import json
import os
import struct
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from noria.observe.metrics.exemplars import Exemplars
from noria.observe.metrics.multiprocess import MultiprocessReader

COUNTING_SCRIPT = """
import sys
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
registry = CollectorRegistry()
counter = Counter("noria_things", 'Things; "so" called\\nand \\\\.', ["name", "kind"], registry=registry)
plain = Counter("noria_plain", "One.", registry=registry)
slots = Gauge("noria_slots", "Slots.", multiprocess_mode="livesum", registry=registry)
backlog = Gauge("noria_backlog", "Backlog.", ["a"], multiprocess_mode="livemax", registry=registry)
seconds = Histogram("noria_seconds", "Time.", ["path"], buckets=(0.1, 1, 1e7), registry=registry)
unlabelled = Histogram("noria_unlabelled", "Unlabelled.", buckets=(1, 2), registry=registry)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class CountingProcess:
    """A process that executes lines of `COUNTING_SCRIPT`'s metrics."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-c", COUNTING_SCRIPT],
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run_line(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start_process(tmp_path):
    processes = []

    def start():
        processes.append(CountingProcess(tmp_path))
        processes[-1].run_line("pass")  # prometheus_client cannot read a file that is being created
        return processes[-1]

    yield start
    for process in processes:
        process.end()


def expected_lines(folder, write):
    collector = MultiProcessCollector(CollectorRegistry(), str(folder))
    return sorted(write(collector).decode().removesuffix("# EOF\n").splitlines())


def values(samples):
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}


def assert_same_as_prometheus_client(reader, folder):
    assert sorted(reader.text(None).splitlines()) == expected_lines(folder, generate_latest)
    assert sorted(reader.text(Exemplars()).splitlines()) == expected_lines(folder, generate_openmetrics)
    families = MultiProcessCollector(CollectorRegistry(), str(folder)).collect()
    expected = [sample for family in families for sample in family.samples]
    assert values(reader.samples()) == values(expected)


def test_the_output_equals_prometheus_clients_over_several_scrapes(start_process, tmp_path):
    reader, first, second = MultiprocessReader(str(tmp_path)), start_process(), start_process()
    assert_same_as_prometheus_client(reader, tmp_path)
    first.run_line("plain.inc(); slots.set(8); seconds.labels('/a').observe(0.05)")
    assert_same_as_prometheus_client(reader, tmp_path)
    second.run_line("plain.inc(2.5); slots.set(16); backlog.labels('x').set(3); seconds.labels('/a').observe(5)")
    first.run_line("backlog.labels('x').set(7); backlog.labels('y').set(-1.5)")
    assert_same_as_prometheus_client(reader, tmp_path)
    second.run_line("counter.labels('é \\\"\\\\ \\n', 'k').inc(12345678); seconds.labels('/b').observe(1e9)")
    first.run_line("counter.labels('b', 'k').inc(1e21); unlabelled.observe(1.5); plain.inc(float('inf'))")
    assert_same_as_prometheus_client(reader, tmp_path)


def test_gauges_of_ended_processes_are_removed_and_counters_kept(start_process, tmp_path):
    reader, first, second = MultiprocessReader(str(tmp_path)), start_process(), start_process()
    first.run_line("plain.inc(3); slots.set(8); backlog.labels('x').set(9)")
    second.run_line("plain.inc(4); slots.set(16); backlog.labels('x').set(1)")
    assert_same_as_prometheus_client(reader, tmp_path)
    first.end()
    mark_process_dead(first.process.pid, str(tmp_path))
    assert_same_as_prometheus_client(reader, tmp_path)
    text = reader.text(None)
    assert "noria_plain_total 7.0\n" in text
    assert "noria_slots 16.0\n" in text
    assert 'noria_backlog{a="x"} 1.0\n' in text


def test_a_file_that_grows_beyond_its_first_size_is_read_further(start_process, tmp_path):
    reader, first = MultiprocessReader(str(tmp_path)), start_process()
    for start in range(0, 600, 200):
        first.run_line(f"[seconds.labels('/' + str(k)).observe(k) for k in range({start}, {start + 200})]")
        assert_same_as_prometheus_client(reader, tmp_path)


def test_a_file_that_is_being_created_is_ignored(start_process, tmp_path):
    reader, first = MultiprocessReader(str(tmp_path)), start_process()
    first.run_line("plain.inc(3)")
    for name, content in (("counter_1.db", b""), ("gauge_livesum_1.db", b""), ("counter_2.db", b"\0" * 65_536)):
        (tmp_path / name).write_bytes(content)
    assert "noria_plain_total 3.0\n" in reader.text(None)


def test_unused_space_after_the_entries_is_not_read(start_process, tmp_path):
    """A scrape reads the few kB in use of each file, not all 64."""
    reader, first = MultiprocessReader(str(tmp_path)), start_process()
    first.run_line("plain.inc(3)")
    os.truncate(tmp_path / f"counter_{first.process.pid}.db", 2**40)  # sparse: takes no disk space
    assert "noria_plain_total 3.0\n" in reader.text(None)


def test_exemplars_follow_their_buckets(start_process, tmp_path):
    first, exemplars = start_process(), Exemplars()
    first.run_line("seconds.labels('/a').observe(0.5)")
    bucket = "noria_seconds_bucket", frozenset({("path", "/a"), ("le", "1.0")})
    exemplars.record(bucket, {"request_id": 'a"b'}, 0.5, 123.25)
    lines = MultiprocessReader(str(tmp_path)).text(exemplars).splitlines()
    assert 'noria_seconds_bucket{le="1.0",path="/a"} 1.0 # {request_id="a\\"b"} 0.5 123.25' in lines
    assert sum(" # " in line for line in lines if not line.startswith("#")) == 1


def entry(*key, value=1.0):
    """An entry in prometheus_client's format: the key's length, the padded key, value and time."""
    encoded = json.dumps(key).encode()
    return padded(encoded) + struct.pack("dd", value, 0.0)


def padded(encoded):
    return struct.pack("i", len(encoded)) + encoded + b" " * (8 - (len(encoded) + 4) % 8)


def write(path, *entries, used=None):
    content = struct.pack("i4x", 8 + sum(map(len, entries)) if used is None else used) + b"".join(entries)
    path.write_bytes(content.ljust(65_536, b"\0"))


A, B, C = (entry(f"noria_{name}", f"noria_{name}_total", {}, "Help.", value=1.0) for name in "abc")


@pytest.mark.parametrize(
    "broken",
    [
        bytes(len(B)),  # counted in `used` before it is there
        padded(b'["noria_b"]'.ljust(60)) + bytes(16),
        padded(b"\xff" * 60) + bytes(16),
        struct.pack("i", -5) + bytes(60),
        struct.pack("i", 2**30) + bytes(60),
    ],
    ids=["zeros", "another-key", "no-text", "negative", "endless"],
)
@pytest.mark.parametrize("kind", ["counter", "gauge_livesum"])
def test_an_invalid_entry_is_read_once_it_is_valid(tmp_path, kind, broken):
    reader, path = MultiprocessReader(str(tmp_path)), tmp_path / f"{kind}_1.db"
    write(path, A, broken, C)
    for _ in range(3):
        assert counts(reader) == {"noria_a_total": 1.0}
    write(path, A, B, C)
    for _ in range(3):
        assert counts(reader) == {"noria_a_total": 1.0, "noria_b_total": 1.0, "noria_c_total": 1.0}


def test_a_histogram_whose_sum_is_not_written_has_its_other_lines(tmp_path):
    buckets = [
        entry("noria_s", "noria_s_bucket", {"le": bound}, "Help.", value=value)
        for bound, value in (("1.0", 2), ("+Inf", 3), ("0.5", 4))
    ]
    write(tmp_path / "counter_1.db", A)
    write(tmp_path / "histogram_1.db", *buckets)
    reader = MultiprocessReader(str(tmp_path))
    assert_same_as_prometheus_client(reader, tmp_path)
    assert 'noria_s_bucket{le="+Inf"} 9.0\nnoria_s_count 9.0\n' in reader.text(None)


@pytest.mark.parametrize(("used", "found"), [(2**31 - 1, {"noria_a_total": 1.0}), (-1, {})])
def test_an_invalid_length_is_ignored(tmp_path, used, found):
    reader, path = MultiprocessReader(str(tmp_path)), tmp_path / "counter_1.db"
    write(path, A, used=used)
    assert counts(reader) == found
    write(path, A, B)
    assert counts(reader) == {"noria_a_total": 1.0, "noria_b_total": 1.0}


def test_a_file_that_became_shorter_is_a_new_one(tmp_path):
    reader, path = MultiprocessReader(str(tmp_path)), tmp_path / "counter_1.db"
    write(path, A, B, C)
    assert len(counts(reader)) == 3
    write(path, B, A)
    assert counts(reader) == {"noria_a_total": 1.0, "noria_b_total": 1.0}


def counts(reader):
    lines = [line.split(" ") for line in reader.text(None).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}
