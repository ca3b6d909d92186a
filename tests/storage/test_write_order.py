"""Writers that yield begin when no other is wanted, in all processes; they never write two at once."""

import subprocess
import sys
import threading
import time

import pytest
import sqlalchemy as sa

from noria.registry.schema import models, open_registry_database
from noria.storage.database import write_transaction
from noria.storage.write_order import WriteOrder
from waiting import wait_until

HOLD = """
import pathlib, sys
from noria.storage.write_order import WriteOrder
with WriteOrder(pathlib.Path(sys.argv[1])).turn(yields=sys.argv[2] == "yields"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """Holds a turn in another process until it is ended: held(how) returns what ends it."""
    started = []

    def hold(how):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "db"), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process.communicate

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def in_thread(order, *, yields):
    begun = threading.Event()

    def run():
        with order.turn(yields=yields):
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, begun


@pytest.mark.parametrize(
    ("other", "yields", "waits"),
    [("first", False, False), ("first", True, True), ("yields", False, False), ("yields", True, True)],
)
def test_only_writers_that_yield_wait(tmp_path, held, other, yields, waits):
    order = WriteOrder(tmp_path / "db")
    end = held(other)
    thread, begun = in_thread(order, yields=yields)
    assert begun.wait(0.3 if waits else 30) is not waits
    end()
    assert begun.wait(30)
    thread.join(30)


@pytest.mark.parametrize("other", ["first", "yields"])
def test_a_process_that_is_stopped_while_it_writes_stops_no_other_for_good(tmp_path, held, monkeypatch, other):
    monkeypatch.setattr("noria.storage.write_order._TIMEOUT_S", 0.3)
    order = WriteOrder(tmp_path / "db")
    end = held(other)
    with pytest.raises(TimeoutError, match=r"keeps .*writers locked; `lslocks` names it"), order.turn(yields=True):
        pass
    with order.turn(yields=False):
        pass
    end()
    with order.turn(yields=True):
        pass


def test_a_loop_of_writers_that_yield_delays_another_by_one_transaction_at_most(tmp_path):
    engine = open_registry_database("auto", tmp_path)
    is_over, num_written = threading.Event(), [0] * 4

    def write(number):
        while not is_over.is_set():
            with write_transaction(engine, yields=True) as connection:
                connection.execute(models.insert().values(name=f"{number}-{num_written[number]}"))
                time.sleep(0.05)
            num_written[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(num_written))
    waits = []
    for number in range(10):
        began = time.monotonic()
        with write_transaction(engine) as connection:
            connection.execute(models.insert().values(name=f"first-{number}"))
        waits.append(time.monotonic() - began)
    is_over.set()
    for thread in threads:
        thread.join(30)
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(models)) == sum(num_written) + 10
    engine.dispose()
    assert sorted(waits)[5] < 0.25, waits  # the longest of ten may be the machine's
