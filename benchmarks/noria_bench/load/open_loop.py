"""The open-loop client: sends every request of a trace when it is due, whatever became of the others. A process of its own.

`python -m noria_bench.load.open_loop < job.json` writes one JSON line for each request as its fate is known, so that a run that is cut
short is not lost. There is no limit on connections and nothing is sent twice. A request counts as unanswered when its answer has
not come `Job.grace_s` after the last deadline of the trace: by then nothing can be in time any more. Where nobody has a deadline,
`grace_s` counts from the last intended start. It ends when all is answered.
"""

import asyncio
import base64
import contextlib
import hashlib
import pathlib
import sys
from collections.abc import Callable

import httpx
import msgspec

from noria.protocol.process_signals import die_with_parent
from noria_bench.load import closed_loop
from noria_bench.load.reply_sampler import ReplySampler
from noria_bench.load.workload import Arrival
from noria_bench.measurement.run_metrics import RequestRecord

_START_S = 0.2  # for the tasks of a long trace to come up


class OpenLoopConfig(msgspec.Struct, frozen=True):
    """What to send, and where."""

    url: str
    arrivals: tuple[Arrival, ...]
    grace_s: float = 2.0
    sample_folder: str | None = None  # folder for a sample of the replies


async def run_open_loop(config: OpenLoopConfig, on_record: Callable[[RequestRecord], None]) -> None:
    """Send `job.arrivals`; `tell` hears of each one's end."""
    loop = asyncio.get_running_loop()
    start_s = loop.time() + _START_S
    end_s = max((a.intended_s + (a.deadline_s or 0.0) for a in config.arrivals), default=0.0) + config.grace_s
    sampler = None if config.sample_folder is None else ReplySampler(pathlib.Path(config.sample_folder))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        tasks = [
            asyncio.create_task(_send(client, config.url, arrival, start_s, on_record, sampler))
            for arrival in config.arrivals
        ]
        if not tasks:
            return
        done, pending = await asyncio.wait(tasks, timeout=start_s + end_s - loop.time())
        for task in pending:
            task.cancel()
        await asyncio.gather(*done)  # an error of ours is raised
        await asyncio.gather(*pending, return_exceptions=True)


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
    except httpx.RequestError:  # the connection broke, or what came cannot be unpacked
        record = msgspec.structs.replace(record, done_s=loop.time() - start_s)
    finally:  # also when the run is over before the answer
        on_record(record)


def _response_fields(answer: httpx.Response) -> dict[str, object]:
    """The fields of a record that an answer fills."""
    fields: dict[str, object] = {"status": answer.status_code}
    if answer.status_code != 200:
        return fields
    timing = answer.headers.get("server-timing", "")
    fields["predicted_s"], fields["queue_s"] = closed_loop.predicted_s(timing), closed_loop.queue_s(timing)
    fields["batch_size"] = closed_loop.batch_size(answer.headers)
    with contextlib.suppress(KeyError, TypeError, ValueError):  # no images: whoever looks at the sample finds out
        fields["digest"] = hashlib.sha256(b"".join(image_files(answer))).hexdigest()[:16]
    return fields


def image_files(answer: httpx.Response) -> list[bytes]:
    """The files of an answer of `/t2i`, whether it is one file or JSON."""
    if answer.headers["content-type"].startswith("image/"):
        return [answer.content]
    return [base64.b64decode(image["b64_json"]) for image in answer.json()["images"]]


def main() -> None:
    """Read the job, do it, write the records; end with who has started it."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=OpenLoopConfig)

    def write_record(record: RequestRecord) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
        sys.stdout.buffer.flush()

    asyncio.run(run_open_loop(config, write_record))


if __name__ == "__main__":
    main()
