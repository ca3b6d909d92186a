"""The routes of jobs in /openapi.json."""

from typing import Any

from noria.errors import InvalidField, JobNotFound, JobsUnavailable
from noria.frontend.jobs import JobBody, JobList
from noria.frontend.openapi_parts import json_of, operation, parameter
from noria.jobs.records import Job


def job_paths() -> dict[str, Any]:
    """Each path with its operations."""
    unknown = [JobNotFound, JobsUnavailable]
    one = [parameter("id", "path")]
    accepting = operation(
        "Have images drawn later",
        "Answered at once with 202; the job survives the end of any process. With an `Idempotency-Key` that was sent before, "
        "200 and the job that it has made.",
        body=JobBody,
        answers=json_of(Job),
    )
    accepting["responses"]["202"] = {"description": "accepted", "content": json_of(Job)}
    return {
        "/v1/jobs": {
            "post": accepting | {"parameters": [parameter("Idempotency-Key", "header")]},
            "get": operation(
                "List jobs",
                "Newest first; `next` is the next page's address.",
                answers=json_of(JobList),
                errors=[InvalidField, JobsUnavailable],
            )
            | {"parameters": [parameter("limit", "query"), parameter("cursor", "query")]},
        },
        "/v1/jobs/{id}": {
            "get": operation("Tell of a job", "As Replicate's predictions.", answers=json_of(Job), errors=unknown)
            | {"parameters": one},
            "delete": operation(
                "Cancel a job",
                "Its images leave the batch; a job that has ended stays.",
                answers=json_of(Job),
                errors=unknown,
            )
            | {"parameters": one},
        },
        "/v1/jobs/{id}/events": {
            "get": operation(
                "Watch a job",
                "Events `status` and `progress` until it has ended, from the one after Last-Event-ID on.",
                answers={"text/event-stream": {}},
                errors=[InvalidField, *unknown],
            )
            | {"parameters": [*one, parameter("Last-Event-ID", "header")]}
        },
        "/v1/jobs/{id}/images/{index}": {
            "get": operation(
                "Fetch an image of a job",
                "Until the job's time to live is over.",
                answers={f"image/{name}": {} for name in ("png", "webp", "jpeg")},
                errors=unknown,
            )
            | {"parameters": [*one, parameter("index", "path")]}
        },
    }
