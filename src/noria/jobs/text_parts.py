"""The texts that a job of texts reads while it runs, and the parts in which its results are stored.

Its texts are in the database, in chunks, from its acceptance to its end. The results of each chunk are a part: a file
of little-endian float32, a row for each text. If texts have different numbers of rows, these numbers come first. A part
that is stored is never computed again.
"""

import asyncio
import re
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from noria.errors import JobNotFound, JobsUnavailable
from noria.jobs.database.store import JobStore
from noria.jobs.results import ResultStore
from noria.jobs.thread_offloader import ThreadOffloader

_NAME = re.compile(r"part-(\d+)-(\d+)-(\d+)-(\d+)\.([fr])32")


class TextChunk(Struct, frozen=True):
    """Some texts or pairs of a job, which follow each other."""

    first_line: int  # counts from 1
    texts: list[str | tuple[str, str]]


class TextPart(NamedTuple):
    """The results of a chunk. The name of its file has all that is known of it."""

    number: int  # number of the chunk
    num_texts: int
    num_tokens: int
    num_truncated: int
    is_ragged: bool = False  # whether it begins with the number of rows of each text

    @property
    def name(self) -> str:
        """The name of its file."""
        form = "r" if self.is_ragged else "f"
        return f"part-{self.number:06}-{self.num_texts}-{self.num_tokens}-{self.num_truncated}.{form}32"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the part whose file has this name."""
        found = _NAME.fullmatch(name)
        assert found is not None, name
        number, num_texts, num_tokens, num_truncated = map(int, found.groups()[:-1])
        return cls(number, num_texts, num_tokens, num_truncated, is_ragged=found[5] == "r")


class TextJobFiles:
    """The chunks and parts of jobs."""

    def __init__(self, store: JobStore, results: ResultStore, offload: ThreadOffloader) -> None:
        self._store, self._results, self._offload = store, results, offload

    async def chunk(self, job_id: str, number: int) -> TextChunk:
        """Return a chunk. Raises JobNotFound if the job has ended."""
        raw = await self._offload(self._store.chunk, job_id, number)
        if raw is None:
            raise JobNotFound(f"job {job_id} has ended.")
        return msgspec.json.decode(raw, type=TextChunk)

    async def parts(self, job_id: str) -> list[TextPart]:
        """Return the parts that are stored, in no order."""
        names = await self._offload(self._results.names, job_id)
        return [TextPart.parse(name) for name in names if _NAME.fullmatch(name)]

    async def save_part(self, job_id: str, part: TextPart, content: bytes) -> None:
        """Store a part. When this ends, also if it is cancelled, no thread writes any more. Raises JobsUnavailable."""
        write = asyncio.ensure_future(self._offload(self._results.save_file, job_id, part.name, content))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await asyncio.wait([write])
            write.exception()  # retrieved, else it would be logged
            raise
        except JobsUnavailable:
            raise
        except Exception as error:  # object stores share no base class of errors
            raise JobsUnavailable("the jobs' results folder does not answer; try again later.") from error
