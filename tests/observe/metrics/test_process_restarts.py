"""Counters survive killed processes: two real front ends and an engine, scraped continuously."""

import concurrent.futures
import contextlib
import pathlib
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from noria.testing.server import running_server
from waiting import wait_until

SLOTS = 4

pytestmark = pytest.mark.timeout(900)  # an engine starts twice, on a machine that may be busy


@pytest.fixture
def server():
    with running_server(["bundled", "--processes", "2", "--slots", str(SLOTS)]) as running:
        yield running


def scrape(url):
    """Return kind and value of each series by name and labels; with a new connection, so from any front end."""
    text = httpx.get(f"{url}/metrics", timeout=30, verify=False).raise_for_status().text
    return {
        (sample.name, *sorted(sample.labels.items())): (family.type, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scraper(threading.Thread):
    """Scrapes until `stop`, and records series that decreased or vanished, and the states of the engine."""

    def __init__(self, url):
        super().__init__(name="scraper")
        self._url, self._stop_requested = url, threading.Event()
        self.num_scrapes, self.faults, self.states = 0, [], set()

    def run(self):
        before = {}
        while not self._stop_requested.wait(0.1):
            with contextlib.suppress(httpx.TransportError):  # the front end was killed
                now = scrape(self._url)
                self.faults += decreased_series(before, now)
                self.states.add(now.get(("noria_engine_up", ("engine", "engine-0"))))
                before, self.num_scrapes = now, self.num_scrapes + 1

    def stop(self):
        self._stop_requested.set()
        self.join()


def decreased_series(before, now):
    """Yield counters and histograms that decreased or vanished, except the CPU time of a process that was restarted."""
    for series, (kind, value) in before.items():
        name, *labels = series
        if kind not in ("counter", "histogram"):
            continue
        if name == "noria_process_cpu_seconds_total":
            start = ("noria_process_start_time_seconds", *labels)
            if now.get(start) != before[start]:
                continue
        if series not in now:
            yield f"{series} vanished; it was {value}"
        elif now[series][1] < value:
            yield f"{series} fell from {value} to {now[series][1]}"


def total(url, name, **labels):
    return sum(
        value
        for (found, *own), (_, value) in scrape(url).items()
        if found == name and labels.items() <= dict(own).items()
    )


def eventually(condition):
    """Wait for `condition`; requests may fail meanwhile because a process was killed."""
    wait_until(condition, 400, ignoring=(httpx.TransportError, httpx.HTTPStatusError))


@pytest.mark.slow  # starts an engine twice: 35 s; test_dead_processes.py merges the files of dead processes
def test_no_counter_decreases_when_a_front_end_and_an_engine_are_killed(server):
    url = f"http://127.0.0.1:{server.port}"
    done = threading.Event()

    def generate(number):
        num_generated = 0
        while not done.is_set():
            body = {"prompt": "a red circle", "seed": number, "inference_steps": 3}
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"{url}/t2i", json=body, timeout=120, verify=False)
                assert answer.status_code in (200, 503)
                num_generated += answer.status_code == 200
                if answer.status_code == 503:
                    done.wait(0.5)
        return num_generated

    def answered():
        return total(url, "noria_requests_total", outcome="ok")

    scraper = Scraper(url)
    with concurrent.futures.ThreadPoolExecutor(3) as users:
        futures = [users.submit(generate, number) for number in range(3)]
        try:
            scraper.start()
            eventually(lambda: answered() > 3)
            for role in ("frontend", "engine"):
                victim, before = server.children(role)[0], answered()
                victim.kill()
                eventually(lambda victim=victim: not victim.is_running())
                eventually(
                    lambda before=before: (
                        httpx.get(f"{url}/readyz", verify=False).is_success and answered() > before + 3
                    )
                )
        finally:
            done.set()
            scraper.stop()
        num_generated = sum(each.result() for each in futures)

    assert scraper.faults == []
    assert scraper.num_scrapes > 10
    assert scraper.states == {("gauge", 1.0), ("gauge", 0.0)}  # and never absent
    assert total(url, "noria_engine_starts_total") == 2
    assert total(url, "noria_engine_starts_total", previous_exit="killed") == 1
    starts = sorted(total(url, "noria_frontend_starts_total", process=f"frontend-{k}") for k in range(2))
    assert starts == [1, 2] and total(url, "noria_frontend_starts_total") == 3
    # A front end that is killed while it answers has counted its image, or not: at most one for each user.
    assert answered() == pytest.approx(num_generated, abs=3)
    mapped = [pathlib.Path(each.path) for each in server.children("engine")[0].memory_maps()]
    folder = next(path.parent for path in mapped if path.name.startswith("counter_"))
    # Gauges of the killed processes are gone.
    eventually(
        lambda: (
            total(url, "noria_requests_in_flight")
            == total(url, "noria_slots_used")
            == total(url, "noria_queue_depth")
            == 0
        )
    )
    # The restarted engine continues the series of its name.
    assert total(url, "noria_engine_up") == total(url, "noria_engine_up", engine="engine-0") == 1
    assert total(url, "noria_slots") == total(url, "noria_slots", engine="engine-0") == SLOTS
    # The engine may be killed before it has counted its last image.
    assert total(url, "noria_departures_total", engine="engine-0", outcome="ok") >= num_generated - 1
    # The files of dead processes are merged: above, unless a scrape held the lock each time, or now, without scrapes.
    server.children("frontend")[0].kill()
    wait_until(lambda: list(folder.glob("counter_ended-*.db")) and list(folder.glob("histogram_ended-*.db")))
