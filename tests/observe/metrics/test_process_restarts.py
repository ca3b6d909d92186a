"""What has been counted stays counted, whoever is killed: real processes, two front ends and an engine, scraped all the while."""

import concurrent.futures
import contextlib
import pathlib
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from noria_bench.targets.server import running_server
from waiting import wait_until

SLOTS = 4

pytestmark = pytest.mark.timeout(900)  # two starts of an engine, on a machine that may be busy


@pytest.fixture
def server():
    with running_server(["bundled", "--processes", "2", "--slots", str(SLOTS)]) as running:
        yield running


def scrape(url):
    """Each series' value, by name and labels, and the kind of its metric; over a connection of its own, so by any front end."""
    text = httpx.get(f"{url}/metrics", timeout=30, verify=False).raise_for_status().text
    return {
        (sample.name, *sorted(sample.labels.items())): (family.type, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scraper(threading.Thread):
    """Scrapes again and again until `stop`, and notes what fell or vanished between two scrapes, and what the engine's state was."""

    def __init__(self, url):
        super().__init__(name="scraper")
        self._url, self._stop_requested = url, threading.Event()
        self.num_scrapes, self.faults, self.states = 0, [], set()

    def run(self):
        before = {}
        while not self._stop_requested.wait(0.1):
            with contextlib.suppress(httpx.TransportError):  # the front end that was asked was killed
                now = scrape(self._url)
                self.faults += decreased_series(before, now)
                self.states.add(now.get(("noria_engine_up", ("engine", "engine-0"))))
                before, self.num_scrapes = now, self.num_scrapes + 1

    def stop(self):
        self._stop_requested.set()
        self.join()


def decreased_series(before, now):
    """Counters and histograms that fell or vanished; a process's own CPU time may, where its start is another."""
    for series, (kind, value) in before.items():
        name, *labels = series
        if kind not in ("counter", "histogram"):
            continue
        if name == "noria_process_cpu_seconds_total":
            start = ("noria_process_start_time_seconds", *labels)
            if now.get(start) != before[start]:
                continue
        if series not in now:
            yield f"{series} is gone; it was {value}"
        elif now[series][1] < value:
            yield f"{series} fell from {value} to {now[series][1]}"


def total(url, name, **labels):
    return sum(
        value
        for (found, *own), (_, value) in scrape(url).items()
        if found == name and labels.items() <= dict(own).items()
    )


def eventually(condition):
    """Waits until it is so, whoever is dead meanwhile."""
    wait_until(condition, 400, ignoring=(httpx.TransportError, httpx.HTTPStatusError))


@pytest.mark.parametrize("kind", ["counter", "histogram"])
def test_what_falls_or_vanishes_is_noticed(kind):
    series = ("noria_x_total", ("model", "a"))
    assert list(decreased_series({series: (kind, 2.0)}, {series: (kind, 2.0)})) == []
    assert (
        len(
            [
                *decreased_series({series: (kind, 2.0)}, {series: (kind, 1.0)}),
                *decreased_series({series: (kind, 2.0)}, {}),
            ]
        )
        == 2
    )


def test_no_counter_falls_when_a_front_end_and_an_engine_are_killed(server):
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
    assert scraper.states == {("gauge", 1.0), ("gauge", 0.0)}  # and never untold
    assert total(url, "noria_engine_starts_total") == 2
    assert total(url, "noria_engine_starts_total", previous_end="killed") == 1
    starts = sorted(total(url, "noria_frontend_starts_total", process=f"frontend-{k}") for k in range(2))
    assert starts == [1, 2] and total(url, "noria_frontend_starts_total") == 3
    # A front end that is killed while it answers has counted its image, or not: at most one for each user.
    assert answered() == pytest.approx(num_generated, abs=3)
    mapped = [pathlib.Path(each.path) for each in server.children("engine")[0].memory_maps()]
    folder = next(path.parent for path in mapped if path.name.startswith("counter_"))
    # What the dead held is held no longer: of each only the living tell.
    eventually(
        lambda: total(url, "noria_inflight") == total(url, "noria_slots_used") == total(url, "noria_queue_depth") == 0
    )
    # The engine's next life went on under its name.
    assert total(url, "noria_engine_up") == total(url, "noria_engine_up", engine="engine-0") == 1
    assert total(url, "noria_slots") == total(url, "noria_slots", engine="engine-0") == SLOTS
    assert (
        total(url, "noria_leaves_total", engine="engine-0", outcome="ok") >= num_generated - 1
    )  # killed before it had counted the last
    # What the dead had counted is folded: at the ends above, unless a scrape was in the way each time, at the latest when nobody scrapes.
    server.children("frontend")[0].kill()
    wait_until(lambda: list(folder.glob("counter_ended-*.db")) and list(folder.glob("histogram_ended-*.db")))
