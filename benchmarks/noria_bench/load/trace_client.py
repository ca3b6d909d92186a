"""Sends the requests of a trace and records their outcomes. A process of its own.

An open loop sends each request at its intended time, whether earlier ones were answered or not. A closed loop has
users, who may arrive one by one: each sends the next request of the trace when its previous one is answered.

`python -m noria_bench.load.trace_client < config.json` writes one JSON line for each request as it ends, so that an
interrupted run keeps its records. Connections are not limited, and no request is sent twice. A request counts as
unanswered if its answer has not arrived `grace_s` after the last deadline of the trace (without deadlines: after the
last intended start; in a closed loop: after the users' last). The client ends when all requests have.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpx
import msgspec

from noria.protocol.process_signals import die_with_parent
from noria_bench.load import closed_loop
from noria_bench.load.protocols import decode_reply, encode_request
from noria_bench.load.reply_sampler import ReplySampler
from noria_bench.load.workload import Arrival
from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.targets.catalog import Protocol

_ENGINE_STAGES = ("queue", "image_encode", "text_encode", "denoise", "decode")
# For the tasks of a long trace to start.
_START_S = 0.2


class TraceConfig(msgspec.Struct, frozen=True):
    """The requests to send, and the server that receives them."""

    url: str
    arrivals: tuple[Arrival, ...]
    grace_s: float = 2.0
    sample_folder: str | None = None  # for some of the replies
    # Users of a closed loop, which sends `arrivals` again and again; None: an open loop.
    num_users: int | None = None
    # During which users send requests; 0 in an open loop.
    users_s: float = 0.0
    # Between the first requests of two users.
    spawn_interval_s: float = 0.0
    protocol: Protocol = "t2i"

    @property
    def end_s(self) -> float:
        """Seconds from the trace's start until requests without an answer count as unanswered."""
        last_s = max((each.intended_s + (each.deadline_s or 0.0) for each in self.arrivals), default=0.0)
        return last_s + self.users_s + self.grace_s


async def run_trace(config: TraceConfig, on_record: Callable[[RequestRecord], None]) -> None:
    """Send `config.arrivals`; `on_record` is called at the end of each request."""
    loop = asyncio.get_running_loop()
    start_s = loop.time() + _START_S
    sampler = None if config.sample_folder is None else ReplySampler(pathlib.Path(config.sample_folder))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        send = functools.partial(_send, client, config, start_s=start_s, on_record=on_record, sampler=sampler)
        if config.num_users is None:
            tasks = [asyncio.create_task(send(arrival)) for arrival in config.arrivals]
        else:
            numbered = enumerate(itertools.cycle(config.arrivals))
            starts_s = [user * config.spawn_interval_s for user in range(config.num_users)]
            users = [_send_in_turn(send, numbered, start_s, first_s, config.users_s) for first_s in starts_s]
            tasks = [asyncio.create_task(user) for user in users]
        if not tasks:
            return
        done, pending = await asyncio.wait(tasks, timeout=start_s + config.end_s - loop.time())
        for task in pending:
            task.cancel()
        # Raises errors of this program.
        await asyncio.gather(*done)
        await asyncio.gather(*pending, return_exceptions=True)


async def _send_in_turn(
    send: Callable[[Arrival], Awaitable[None]],
    numbered: Iterator[tuple[int, Arrival]],
    start_s: float,
    first_s: float,
    seconds: float,
) -> None:
    """A user, who arrives at `first_s`: sends one request after the other, each when the previous one is answered."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(start_s + first_s - loop.time())
    while (now_s := loop.time() - start_s) < seconds:
        number, arrival = next(numbered)
        await send(msgspec.structs.replace(arrival, number=number, intended_s=now_s))


async def _send(
    client: httpx.AsyncClient,
    config: TraceConfig,
    arrival: Arrival,
    *,
    start_s: float,
    on_record: Callable[[RequestRecord], None],
    sampler: ReplySampler | None,
) -> None:
    loop, template = asyncio.get_running_loop(), arrival.template
    request = encode_request(config.protocol, arrival.body)
    await asyncio.sleep(start_s + arrival.intended_s - loop.time())
    record = RequestRecord(
        number=arrival.number,
        intended_s=arrival.intended_s,
        sent_s=loop.time() - start_s,
        done_s=None,
        status=0,
        deadline_s=arrival.deadline_s,
        deadline_class=arrival.deadline_class,
        rows=arrival.rows,
        num_images=template.n,
        width_px=template.width,
        height_px=template.height,
        num_calls=template.num_calls,
        call_rows=2 if template.guided else 1,
    )
    try:
        answer = await client.post(config.url, content=request, headers=closed_loop.HEADERS)
        done_s = loop.time() - start_s
        headers, content = decode_reply(config.protocol, answer.headers, answer.content)
        fields = _response_fields(answer.status_code, headers, content)
        record = msgspec.structs.replace(record, done_s=done_s, **fields)
        if sampler is not None and answer.status_code == 200:
            sampler.offer(arrival.number, content, headers.get("content-type", ""))
    # The connection broke, or the body cannot be decompressed.
    except httpx.RequestError:
        record = msgspec.structs.replace(record, done_s=loop.time() - start_s)
    # Also when the task is cancelled at the end of the run.
    finally:
        on_record(record)


def _response_fields(status: int, headers: Mapping[str, str], content: bytes) -> dict[str, Any]:
    """The fields of a record that come from the answer."""
    fields: dict[str, Any] = {"status": status}
    if status != 200:
        return fields
    seconds = closed_loop.stage_seconds(headers.get("server-timing", ""))
    stages = [seconds[name] for name in _ENGINE_STAGES if name in seconds]
    size = headers.get("x-batch-size") or headers.get("x-noria-mean-batch")  # Noria's is the mean over the steps
    fields["predicted_s"], fields["queue_s"] = seconds.get("predicted") or None, seconds.get("queue")
    fields["engine_s"] = sum(stages) if len(stages) > 1 else None  # others report their queue alone
    fields["batch_size"] = float(size) if size else None
    # A body without images is found by the check of the sampled replies.
    with contextlib.suppress(KeyError, TypeError, ValueError):
        fields["digest"] = hashlib.sha256(b"".join(image_files(headers, content))).hexdigest()[:16]
    return fields


def image_files(headers: Mapping[str, str], content: bytes) -> list[bytes]:
    """The image files of an answer of `/t2i`, which is one file, or JSON."""
    if headers["content-type"].startswith("image/"):
        return [content]
    return [base64.b64decode(image["b64_json"]) for image in msgspec.json.decode(content)["images"]]


def main() -> None:
    """Read the config from stdin, send the requests, write the records to stdout. The process ends with its parent."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=TraceConfig)

    def write_record(record: RequestRecord) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
        sys.stdout.buffer.flush()

    asyncio.run(run_trace(config, write_record))


if __name__ == "__main__":
    main()
