"""The open-loop client: sends each request of a trace at its intended time, whether or not others were answered. A
process of its own.

`python -m noria_bench.load.open_loop < config.json` writes one JSON line for each request as it ends, so that an
interrupted run keeps its records. Connections are not limited, and no request is sent twice. A request counts as
unanswered if its answer has not arrived `grace_s` after the last deadline of the trace (without deadlines: after the
last intended start). The client ends when all requests have.
"""

import asyncio
import base64
import contextlib
import hashlib
import pathlib
import sys
from collections.abc import Callable, Sequence

import httpx
import msgspec

from noria.protocol.process_signals import die_with_parent
from noria_bench.load import closed_loop
from noria_bench.load.reply_sampler import ReplySampler
from noria_bench.load.workload import Arrival
from noria_bench.measurement.run_metrics import RequestRecord

# For the tasks of a long trace to start.
_START_S = 0.2


class OpenLoopConfig(msgspec.Struct, frozen=True):
    """What is sent, and where."""

    url: str
    arrivals: tuple[Arrival, ...]
    grace_s: float = 2.0
    sample_folder: str | None = None  # for some of the replies


async def run_open_loop(config: OpenLoopConfig, on_record: Callable[[RequestRecord], None]) -> None:
    """Send `config.arrivals`; `on_record` is called at the end of each request."""
    loop = asyncio.get_running_loop()
    start_s = loop.time() + _START_S
    sampler = None if config.sample_folder is None else ReplySampler(pathlib.Path(config.sample_folder))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        tasks = [
            asyncio.create_task(_send(client, config.url, arrival, start_s, on_record, sampler))
            for arrival in config.arrivals
        ]
        if not tasks:
            return
        done, pending = await asyncio.wait(
            tasks, timeout=start_s + end_s(config.arrivals, config.grace_s) - loop.time()
        )
        for task in pending:
            task.cancel()
        # Raises errors of this program.
        await asyncio.gather(*done)
        await asyncio.gather(*pending, return_exceptions=True)


def end_s(arrivals: Sequence[Arrival], grace_s: float) -> float:
    """Seconds from the trace's start until requests without an answer count as unanswered."""
    return max((each.intended_s + (each.deadline_s or 0.0) for each in arrivals), default=0.0) + grace_s


async def _send(
    client: httpx.AsyncClient,
    url: str,
    arrival: Arrival,
    start_s: float,
    on_record: Callable[[RequestRecord], None],
    sampler: ReplySampler | None,
) -> None:
    loop, text = asyncio.get_running_loop(), msgspec.json.encode(arrival.body)
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
        num_images=arrival.template.n,
    )
    try:
        answer = await client.post(url, content=text, headers=closed_loop.HEADERS)
        record = msgspec.structs.replace(record, done_s=loop.time() - start_s, **_response_fields(answer))
        if sampler is not None and answer.status_code == 200:
            sampler.offer(arrival.number, answer.content, answer.headers.get("content-type", ""))
    # The connection broke, or the body cannot be decompressed.
    except httpx.RequestError:
        record = msgspec.structs.replace(record, done_s=loop.time() - start_s)
    # Also when the task is cancelled at the end of the run.
    finally:
        on_record(record)


def _response_fields(answer: httpx.Response) -> dict[str, object]:
    """The fields of a record that come from the answer."""
    fields: dict[str, object] = {"status": answer.status_code}
    if answer.status_code != 200:
        return fields
    timing = answer.headers.get("server-timing", "")
    fields["predicted_s"], fields["queue_s"] = closed_loop.predicted_s(timing), closed_loop.queue_s(timing)
    fields["batch_size"] = closed_loop.batch_size(answer.headers)
    # A body without images is found by the check of the sampled replies.
    with contextlib.suppress(KeyError, TypeError, ValueError):
        fields["digest"] = hashlib.sha256(b"".join(image_files(answer))).hexdigest()[:16]
    return fields


def image_files(answer: httpx.Response) -> list[bytes]:
    """The image files of an answer of `/t2i`, which is one file, or JSON."""
    if answer.headers["content-type"].startswith("image/"):
        return [answer.content]
    return [base64.b64decode(image["b64_json"]) for image in answer.json()["images"]]


def main() -> None:
    """Read the config from stdin, send the requests, write the records to stdout. The process ends with its parent."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=OpenLoopConfig)

    def write_record(record: RequestRecord) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
        sys.stdout.buffer.flush()

    asyncio.run(run_open_loop(config, write_record))


if __name__ == "__main__":
    main()
