"""What dead processes had counted is in few files, and counts as before: in files as prometheus_client itself writes them."""

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

from noria.observe.ended import fold_ended
from noria.observe.merged import Merged

DEAD = 2**22 + 1  # the least process id that Linux gives to none


@pytest.fixture
def count(tmp_path):
    """Has process `pid` count `values`, by name and label, in a file of `kind`."""

    def write(pid, values, kind="counter"):
        file = MmapedDict(str(tmp_path / f"{kind}_{pid}.db"))
        for (name, label), value in values.items():
            before, _ = file.read_value(mmap_key(name, f"{name}_total", ["a"], [label], "Help."))
            file.write_value(mmap_key(name, f"{name}_total", ["a"], [label], "Help."), before + value, 0.0)
        file.close()

    return write


def theirs(folder):
    collector = MultiProcessCollector(CollectorRegistry(), str(folder))
    return sorted(generate_latest(collector).decode().splitlines())


def counts(merged):
    lines = [line.split(" ") for line in merged.text(None).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def files(folder):
    return sorted(path.name for path in folder.glob("*.db"))


def test_folding_changes_nothing_of_what_is_said(count, tmp_path):
    merged, living = Merged(str(tmp_path)), os.getpid()
    count(living, {("noria_x", "1"): 5, ("noria_y", "é"): 1})
    for life in range(50):
        count(DEAD + life, {("noria_x", "1"): 2, ("noria_x", f"{life % 3 + 2}"): 1, ("noria_z", "1"): 0.5})
        if life % 7 == 0:
            before = theirs(tmp_path)
            fold_ended(str(tmp_path))
            for each in (merged, Merged(str(tmp_path))):
                assert sorted(each.text(None).splitlines()) == before == theirs(tmp_path)
    fold_ended(str(tmp_path))
    assert counts(merged)['noria_x_total{a="1"}'] == 105
    assert counts(merged)['noria_z_total{a="1"}'] == 25
    assert len(files(tmp_path)) == 2
    assert f"counter_{living}.db" in files(tmp_path)


def test_histograms_and_counters_are_folded_apart_and_gauges_left(tmp_path):
    for name, key in (
        ("histogram", ["noria_s", "noria_s_sum", {}, "Help."]),
        ("counter", ["noria_x", "noria_x_total", {}, "Help."]),
        ("gauge_livesum", ["noria_g", "noria_g", {}, "Help."]),
    ):
        file = MmapedDict(str(tmp_path / f"{name}_{DEAD}.db"))
        file.write_value(mmap_key(key[0], key[1], [], [], key[3]), 2.0, 0.0)
        file.close()
    before = Merged(str(tmp_path)).text(None)
    fold_ended(str(tmp_path))
    assert Merged(str(tmp_path)).text(None) == before
    assert files(tmp_path) == ["counter_ended-1.db", f"gauge_livesum_{DEAD}.db", "histogram_ended-1.db"]


def test_with_nobody_dead_nothing_is_written(count, tmp_path):
    count(os.getpid(), {("noria_x", "1"): 1})
    count(DEAD, {("noria_x", "1"): 1})
    for _ in range(3):
        fold_ended(str(tmp_path))
        assert files(tmp_path) == sorted([f"counter_{os.getpid()}.db", "counter_ended-1.db"])


def test_a_process_id_that_comes_again_is_another_process(count, tmp_path):
    merged = Merged(str(tmp_path))
    count(DEAD, {("noria_x", "1"): 1, ("noria_y", "1"): 10})
    assert counts(merged) == {'noria_x_total{a="1"}': 1, 'noria_y_total{a="1"}': 10}
    fold_ended(str(tmp_path))
    count(DEAD, {("noria_y", "1"): 200, ("noria_x", "1"): 3000})  # as many bytes as before
    assert counts(merged) == {'noria_x_total{a="1"}': 3001, 'noria_y_total{a="1"}': 210}
    fold_ended(str(tmp_path))
    assert counts(merged) == {'noria_x_total{a="1"}': 3001, 'noria_y_total{a="1"}': 210}


def test_no_sum_falls_by_how_it_is_rounded(count, tmp_path):
    chance, merged, pids, shown = random.Random(7), Merged(str(tmp_path)), [os.getpid()], {}
    for life in range(300):
        for pid in pids:
            count(
                pid, {("noria_x", str(label)): chance.choice((0.1, 1e-9, 1e6)) * chance.random() for label in range(6)}
            )
        for _ in range(2):
            now = counts(merged)
            assert {key: (value, now[key]) for key, value in shown.items() if now[key] < value} == {}
            shown = now
            fold_ended(str(tmp_path))
        pids = [os.getpid(), os.getppid(), DEAD + life]
    assert len(files(tmp_path)) == 3


def test_infinity_stays(count, tmp_path):
    count(DEAD, {("noria_x", "1"): float("inf")})
    count(DEAD + 1, {("noria_x", "1"): 1.5})
    fold_ended(str(tmp_path))
    assert Merged(str(tmp_path)).text(None).endswith('{a="1"} +Inf\n')


def test_while_a_scrape_is_read_nothing_is_exchanged(count, tmp_path):
    count(DEAD, {("noria_x", "1"): 1})
    with (tmp_path / "ended.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        fold_ended(str(tmp_path))
        assert files(tmp_path) == [f"counter_{DEAD}.db"]
    fold_ended(str(tmp_path))
    assert files(tmp_path) == ["counter_ended-1.db"]
    assert not list(tmp_path.glob("*.draft"))


def test_whoever_scrapes_meanwhile_sees_everything_once(count, tmp_path):
    count(DEAD, {("noria_x", "1"): 1})
    done, wrong = threading.Event(), []

    def scrape():
        merged, least = Merged(str(tmp_path)), 1.0
        while not done.is_set():
            found = counts(merged)['noria_x_total{a="1"}']
            if not least <= found <= 400:
                wrong.append((least, found))
            least = found

    scraping = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in scraping:
        thread.start()
    try:
        for life in range(1, 400):
            count(DEAD + life, {("noria_x", "1"): 1})
            fold_ended(str(tmp_path))
    finally:
        done.set()
        for thread in scraping:
            thread.join()
    assert wrong == []
    fold_ended(str(tmp_path))
    assert counts(Merged(str(tmp_path))) == {'noria_x_total{a="1"}': 400}
    assert len(files(tmp_path)) == 1


def test_on_a_full_disk_all_stays_as_it_is(count, tmp_path):
    count(DEAD, {("noria_x", "1"): 1})
    fold_ended(str(tmp_path))
    count(DEAD + 1, {("noria_x", "1"): 1})
    before, limits = Merged(str(tmp_path)).text(None), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fold_ended(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == [f"counter_{DEAD + 1}.db", "counter_ended-1.db"]
    assert Merged(str(tmp_path)).text(None) == before
    assert not list(tmp_path.glob("*.draft"))


def test_of_a_file_that_is_broken_counts_what_can_be_read(count, tmp_path):
    count(DEAD, {("noria_x", "1"): 1, ("noria_y", "1"): 1})
    count(DEAD + 1, {("noria_z", "1"): 1})
    path = tmp_path / f"counter_{DEAD}.db"
    path.write_bytes(path.read_bytes().replace(b'["noria_y"', b'!"noria_y"!'[:10]))
    (tmp_path / f"counter_{DEAD + 2}.db").write_bytes(b"")
    (tmp_path / f"counter_{DEAD + 3}.db").write_bytes(struct.pack("i4x", 2**30).ljust(65_536, b"\0"))
    before = counts(Merged(str(tmp_path)))
    assert before == {'noria_x_total{a="1"}': 1, 'noria_z_total{a="1"}': 1}
    fold_ended(str(tmp_path))
    assert files(tmp_path) == ["counter_ended-1.db"]
    assert counts(Merged(str(tmp_path))) == before
