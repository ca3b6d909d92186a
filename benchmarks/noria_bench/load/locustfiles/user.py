"""The reference article's user for Locust: requests an image, waits for it, requests the next.

A Locust file is a subclass and a call of `add_options`. By hand:

    cd benchmarks/noria_bench/load/locustfiles
    NORIA_BENCH_PATH=/t2i/batched locust -f scenario2.py --host http://127.0.0.1:8000

`noria bench` adds `--records FILE`, for a JSON line (a `run_metrics.RequestRecord`) for each request as it ends, so
that an interrupted run keeps its records, and `--sample-folder FOLDER`, for some of the replies.
"""

import itertools
import pathlib
import time
from typing import Any

import gevent
import msgspec
from locust import FastHttpUser, events, task
from locust.env import Environment

from noria.protocol.process_signals import die_with_parent
from noria_bench.benches import scenarios
from noria_bench.benches.scenarios import Scenario
from noria_bench.load import closed_loop
from noria_bench.load.reply_sampler import ReplySampler
from noria_bench.measurement.run_metrics import RequestRecord


class ReferenceUser(FastHttpUser):  # type: ignore[misc]
    """Requests one image after the other, without a pause."""

    abstract = True
    # Locust's default of 60 s would end requests that the article's slowest endpoints still answered.
    network_timeout = connection_timeout = 300.0
    _user_counter = itertools.count()

    def on_start(self) -> None:
        """Take an index, which determines this user's requests."""
        self._user_index, self._request_counter = next(self._user_counter), itertools.count()

    @task  # type: ignore[untyped-decorator]
    def fetch_image(self) -> None:
        """Send one request."""
        options = self.environment.parsed_options
        number = scenarios.request_number(self._user_index, next(self._request_counter), options.num_users or 1)
        self.client.post(
            options.path,
            json=scenarios.request_body(number, options.body_seed),
            headers=closed_loop.HEADERS,
            context={"number": number, "sent": time.monotonic()},
        )


class RequestRecorder:
    """Writes a record of every request to `file`, and some of the replies to `folder`."""

    def __init__(self, file: pathlib.Path, folder: pathlib.Path, rows: float) -> None:
        self._file, self._sampler, self._rows = file.open("ab", buffering=0), ReplySampler(folder), rows
        self._started = time.monotonic()

    def start(self, **_: Any) -> None:
        """The load starts: times count from now."""
        self._started = time.monotonic()

    def record(self, response: Any, exception: Exception | None, context: dict[str, Any], **_: Any) -> None:
        """Write the record of a request that has ended."""
        done_s, sent_s = time.monotonic() - self._started, context["sent"] - self._started
        status = response.status_code if response is not None else 0
        # The connection broke within the body.
        if status == 200 and exception is not None:
            status = 0
        headers = response.headers if status == 200 else {}
        timing = headers.get("server-timing", "")
        record = RequestRecord(
            number=context["number"],
            # In a closed loop, a user intends no request before the previous answer.
            intended_s=sent_s,
            sent_s=sent_s,
            done_s=done_s,
            status=status,
            deadline_s=None,
            deadline_class="",
            rows=self._rows,
            num_images=1,
            predicted_s=closed_loop.predicted_s(timing),
            batch_size=closed_loop.batch_size(headers),
            queue_s=closed_loop.queue_s(timing),
        )
        self._file.write(msgspec.json.encode(record) + b"\n")
        if status == 200:
            self._sampler.offer(record.number, response.content, headers.get("content-type", ""))


def add_options(scenario: Scenario) -> None:
    """Add the bench's options to Locust's command line, with the scenario's users and ramp as defaults."""

    @events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
    def add_arguments(parser: Any) -> None:
        full = scenarios.scaled_traffic(scenario, scenarios.FULL_S, seed=1)
        assert full.spawn_interval_s is not None
        parser.set_defaults(
            num_users=scenario.num_users, spawn_rate=1 / full.spawn_interval_s, run_time=f"{full.seconds:.0f}s"
        )
        parser.add_argument("--path", env_var="NORIA_BENCH_PATH", default="/t2i", help="the route to load")
        parser.add_argument("--body-seed", type=int, default=1, help="seed of the requests")
        parser.add_argument(
            "--records", default="", help="file for a JSON line for each request", include_in_web_ui=False
        )
        parser.add_argument(
            "--sample-folder", default="", help="folder for some of the replies", include_in_web_ui=False
        )
        parser.add_argument(
            "--rows", type=float, default=40.0, help="work of a request, in rows", include_in_web_ui=False
        )

    @events.init.add_listener  # type: ignore[untyped-decorator]
    def attach_recorder(environment: Environment, **_: Any) -> None:
        # Locust's timer of --run-time starts at gevent's cached time, which is older by the time that imports took.
        gevent.get_hub().loop.update_now()
        options = environment.parsed_options
        if options.records:
            die_with_parent()
            recorder = RequestRecorder(pathlib.Path(options.records), pathlib.Path(options.sample_folder), options.rows)
            environment.events.test_start.add_listener(recorder.start)
            environment.events.request.add_listener(recorder.record)
