"""The line of a request for images: one for each, written when it has ended, however it did.

Who begins a request (the middleware for HTTP, the runner for a job) opens a `Note`, and the studio fills it in while the request is drawn or
refused. A context variable brings the note to the studio, through every task in between. The middleware writes it down; a job's is
written by whoever ends the job (`jobs/completion.py`), drawn or not.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from noria.observe.logs.log_record import fields
from noria.protocol.request import ImageRequest

log = logging.getLogger("noria.requests")

LogPrompts = Literal["off", "hash", "full"]

REQUEST_FIELDS: Mapping[str, str] = {
    "event": "`request`",
    "request_id": "X-Request-Id of the answer; of a job, its id",
    "job_id": "of a job",
    "attempt": "of a job: how many times it was begun; 0 of one that never was",
    "job_status": "of a job: `succeeded`, `failed` or `canceled`, as the API has it",
    "waited_s": "of a job: from its acceptance until it was begun for the last time, or ended without",
    "method": "of HTTP",
    "path": "of HTTP, as it was sent, without its query",
    "status": "the answer's; 499 if nobody was there to read it",
    "seconds": "from the request's head to the end of its answer; of a job, from its acceptance to its end",
    "key": "name of the API key",
    "outcome": "`ok`, or a code of errors.md",
    "error": "the refusal or failure in words",
    "model": "who drew, or should have",
    "model_version": "its fingerprint",
    "n": "images asked for",
    "size": "of each, in pixels",
    "scheduler": "its short name",
    "steps": "asked for",
    "guidance": "guidance scale",
    "seed": "of the first image",
    "priority": "if it is not normal",
    "deadline_s": "the caller's, from the arrival",
    "queue_s": "from the arrival at the engine until the image had its slot",
    "encode_s": "the prompt",
    "denoise_s": "its steps, and its waiting between them",
    "decode_s": "latents to pixels",
    "postprocess_s": "pixels to files",
    "total_s": "queue to files; of what failed, until it did",
    "predicted_s": "what the engine said at its acceptance that queue to decode would take",
    "mean_batch": "images that shared these steps, itself included",
    "steps_run": "model calls of the image: some schedulers make more than the steps asked for",
    "prompt": "with `log_prompts = full`",
    "negative_prompt": "with `log_prompts = full`, if there is one",
    "prompt_sha256": "with `log_prompts = hash`",
    "negative_prompt_sha256": "with `log_prompts = hash`, if there is one",
}
"""Every field of such a line, and what it says; `docs/logs.md` has them."""


@dataclass
class RequestLogRecord:
    """What is to be said of a request, as far as it is known."""

    fields: dict[str, object] = field(
        default_factory=dict
    )  # empty: it is no request for images, or it never got to the studio

    def add(self, **values: object) -> None:
        """More of it; what was said before under the same name is replaced."""
        assert values.keys() <= REQUEST_FIELDS.keys(), values.keys() - REQUEST_FIELDS.keys()
        self.fields |= values

    def write(self, **values: object) -> None:
        """The line itself."""
        self.add(event="request", **values)
        recorded = self.fields
        seconds = recorded.get("total_s", recorded.get("seconds"))
        took = f" after {seconds:.3f} s" if isinstance(seconds, float) else ""
        log.info(
            "request %s%s",
            recorded.get("outcome"),
            took,
            extra=fields(**{name: recorded.get(name) for name in REQUEST_FIELDS}),
        )


_CURRENT_RECORD: ContextVar[RequestLogRecord | None] = ContextVar("noria_request_note", default=None)


def current_log_record() -> RequestLogRecord:
    """The note of the request that is being worked for; one that nobody reads, if there is none."""
    return _CURRENT_RECORD.get() or RequestLogRecord()


@contextlib.contextmanager
def request_log_scope() -> Iterator[RequestLogRecord]:
    """A new note, which everything that is done or begun inside fills in."""
    record = RequestLogRecord()
    token = _CURRENT_RECORD.set(record)
    try:
        yield record
    finally:
        _CURRENT_RECORD.reset(token)


def request_fields(request: ImageRequest, model_version: str, prompts: LogPrompts) -> dict[str, object]:
    """The fields that tell what was asked for; `model_version` is the fingerprint of its model."""
    return {
        "model": request.model,
        "model_version": model_version,
        "n": request.num_images,
        "size": f"{request.width_px}x{request.height_px}",
        "scheduler": request.scheduler,
        "steps": request.num_steps,
        "guidance": request.guidance_scale,
        "seed": request.seed,
        "priority": request.priority if request.priority != "normal" else None,
        "deadline_s": request.deadline_s,
        **prompt_fields("prompt", request.prompt, prompts),
        **prompt_fields("negative_prompt", request.negative_prompt, prompts),
    }


def prompt_fields(name: str, text: str, prompts: LogPrompts) -> dict[str, object]:
    """What may be said of a prompt."""
    match prompts:
        case "full" if text:
            return {name: text}
        case "hash" if text:
            return {f"{name}_sha256": hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()}
    return {}
