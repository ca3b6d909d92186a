"""Merging the files of dead processes keeps all values; the files are written by prometheus_client itself."""

import fcntl
import os
import random
import resource
import struct
import threading

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from noria.observe.metrics.dead_processes import merge_dead_processes
from noria.observe.metrics.multiprocess import MultiprocessReader

DEAD_PID = 2**22 + 1  # the lowest process id that Linux never assigns


@pytest.fixture
def count(tmp_path):
    """A function that counts `values`, by name and label, in a file of process `pid`."""

    def write(pid, values, kind="counter"):
        file = MmapedDict(str(tmp_path / f"{kind}_{pid}.db"))
        for (name, label), value in values.items():
            previous, _ = file.read_value(mmap_key(name, f"{name}_total", ["a"], [label], "Help."))
            file.write_value(mmap_key(name, f"{name}_total", ["a"], [label], "Help."), previous + value, 0.0)
        file.close()

    return write


def expected_lines(folder):
    collector = MultiProcessCollector(CollectorRegistry(), str(folder))
    return sorted(generate_latest(collector).decode().splitlines())


def counts(reader):
    lines = [line.split(" ") for line in reader.text(None).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def files(folder):
    return sorted(path.name for path in folder.glob("*.db"))


def test_merging_dead_processes_changes_no_exported_value(count, tmp_path):
    reader, own_pid = MultiprocessReader(str(tmp_path)), os.getpid()
    count(own_pid, {("noria_x", "1"): 5, ("noria_y", "é"): 1})
    for index in range(50):
        count(DEAD_PID + index, {("noria_x", "1"): 2, ("noria_x", f"{index % 3 + 2}"): 1, ("noria_z", "1"): 0.5})
        if index % 7 == 0:
            before = expected_lines(tmp_path)
            merge_dead_processes(str(tmp_path))
            for each in (reader, MultiprocessReader(str(tmp_path))):
                assert sorted(each.text(None).splitlines()) == before == expected_lines(tmp_path)
    merge_dead_processes(str(tmp_path))
    assert counts(reader)['noria_x_total{a="1"}'] == 105
    assert counts(reader)['noria_z_total{a="1"}'] == 25
    assert len(files(tmp_path)) == 2
    assert f"counter_{own_pid}.db" in files(tmp_path)


def test_histograms_and_counters_are_merged_separately_and_gauges_left(tmp_path):
    for name, key in (
        ("histogram", ["noria_s", "noria_s_sum", {}, "Help."]),
        ("counter", ["noria_x", "noria_x_total", {}, "Help."]),
        ("gauge_livesum", ["noria_g", "noria_g", {}, "Help."]),
    ):
        file = MmapedDict(str(tmp_path / f"{name}_{DEAD_PID}.db"))
        file.write_value(mmap_key(key[0], key[1], [], [], key[3]), 2.0, 0.0)
        file.close()
    before = MultiprocessReader(str(tmp_path)).text(None)
    merge_dead_processes(str(tmp_path))
    assert MultiprocessReader(str(tmp_path)).text(None) == before
    assert files(tmp_path) == ["counter_ended-1.db", f"gauge_livesum_{DEAD_PID}.db", "histogram_ended-1.db"]


def test_without_dead_processes_nothing_is_written(count, tmp_path):
    count(os.getpid(), {("noria_x", "1"): 1})
    count(DEAD_PID, {("noria_x", "1"): 1})
    for _ in range(3):
        merge_dead_processes(str(tmp_path))
        assert files(tmp_path) == sorted([f"counter_{os.getpid()}.db", "counter_ended-1.db"])


def test_a_reused_process_id_is_another_process(count, tmp_path):
    reader = MultiprocessReader(str(tmp_path))
    count(DEAD_PID, {("noria_x", "1"): 1, ("noria_y", "1"): 10})
    assert counts(reader) == {'noria_x_total{a="1"}': 1, 'noria_y_total{a="1"}': 10}
    merge_dead_processes(str(tmp_path))
    count(DEAD_PID, {("noria_y", "1"): 200, ("noria_x", "1"): 3000})  # the same number of bytes
    assert counts(reader) == {'noria_x_total{a="1"}': 3001, 'noria_y_total{a="1"}': 210}
    merge_dead_processes(str(tmp_path))
    assert counts(reader) == {'noria_x_total{a="1"}': 3001, 'noria_y_total{a="1"}': 210}


def test_rounding_never_decreases_a_sum(count, tmp_path):
    rng, reader, pids, previous = random.Random(7), MultiprocessReader(str(tmp_path)), [os.getpid()], {}
    for index in range(300):
        for pid in pids:
            count(pid, {("noria_x", str(label)): rng.choice((0.1, 1e-9, 1e6)) * rng.random() for label in range(6)})
        for _ in range(2):
            now = counts(reader)
            assert {key: (value, now[key]) for key, value in previous.items() if now[key] < value} == {}
            previous = now
            merge_dead_processes(str(tmp_path))
        pids = [os.getpid(), os.getppid(), DEAD_PID + index]
    assert len(files(tmp_path)) == 3


def test_infinity_is_kept(count, tmp_path):
    count(DEAD_PID, {("noria_x", "1"): float("inf")})
    count(DEAD_PID + 1, {("noria_x", "1"): 1.5})
    merge_dead_processes(str(tmp_path))
    assert MultiprocessReader(str(tmp_path)).text(None).endswith('{a="1"} +Inf\n')


def test_no_files_are_replaced_while_a_scrape_reads(count, tmp_path):
    count(DEAD_PID, {("noria_x", "1"): 1})
    with (tmp_path / "ended.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        merge_dead_processes(str(tmp_path))
        assert files(tmp_path) == [f"counter_{DEAD_PID}.db"]
    merge_dead_processes(str(tmp_path))
    assert files(tmp_path) == ["counter_ended-1.db"]
    assert not list(tmp_path.glob("*.draft"))


def test_concurrent_scrapes_see_every_count_once(count, tmp_path):
    count(DEAD_PID, {("noria_x", "1"): 1})
    done, wrong = threading.Event(), []

    def scrape():
        reader, min_count = MultiprocessReader(str(tmp_path)), 1.0
        while not done.is_set():
            found = counts(reader)['noria_x_total{a="1"}']
            if not min_count <= found <= 100:
                wrong.append((min_count, found))
            min_count = found

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for index in range(1, 100):
            count(DEAD_PID + index, {("noria_x", "1"): 1})
            merge_dead_processes(str(tmp_path))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    merge_dead_processes(str(tmp_path))
    assert counts(MultiprocessReader(str(tmp_path))) == {'noria_x_total{a="1"}': 100}
    assert len(files(tmp_path)) == 1


def test_on_a_full_disk_nothing_changes(count, tmp_path):
    count(DEAD_PID, {("noria_x", "1"): 1})
    merge_dead_processes(str(tmp_path))
    count(DEAD_PID + 1, {("noria_x", "1"): 1})
    before, limits = MultiprocessReader(str(tmp_path)).text(None), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            merge_dead_processes(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == [f"counter_{DEAD_PID + 1}.db", "counter_ended-1.db"]
    assert MultiprocessReader(str(tmp_path)).text(None) == before
    assert not list(tmp_path.glob("*.draft"))


def test_the_valid_part_of_a_broken_file_counts(count, tmp_path):
    count(DEAD_PID, {("noria_x", "1"): 1, ("noria_y", "1"): 1})
    count(DEAD_PID + 1, {("noria_z", "1"): 1})
    path = tmp_path / f"counter_{DEAD_PID}.db"
    path.write_bytes(path.read_bytes().replace(b'["noria_y"', b'!"noria_y"!'[:10]))
    (tmp_path / f"counter_{DEAD_PID + 2}.db").write_bytes(b"")
    (tmp_path / f"counter_{DEAD_PID + 3}.db").write_bytes(struct.pack("i4x", 2**30).ljust(65_536, b"\0"))
    before = counts(MultiprocessReader(str(tmp_path)))
    assert before == {'noria_x_total{a="1"}': 1, 'noria_z_total{a="1"}': 1}
    merge_dead_processes(str(tmp_path))
    assert files(tmp_path) == ["counter_ended-1.db"]
    assert counts(MultiprocessReader(str(tmp_path))) == before
