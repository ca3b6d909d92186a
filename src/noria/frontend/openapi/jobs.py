"""The routes of jobs in /openapi.json."""

from typing import Any

from noria.errors import InvalidField, JobNotFound, JobsUnavailable
from noria.frontend.openapi.operations import json_content, operation, parameter
from noria.frontend.routes.jobs import JobList, JobRequestBody
from noria.jobs.records import Job


def job_paths() -> dict[str, Any]:
    """Each path with its operations."""
    job_errors = [JobNotFound, JobsUnavailable]
    id_parameters = [parameter("id", "path")]
    submit_operation = operation(
        "Have images drawn later",
        "Answered at once with 202; the job survives the end of any process. With an `Idempotency-Key` that was sent before, "
        "200 and the job that it has made.",
        body=JobRequestBody,
        content=json_content(Job),
    )
    submit_operation["responses"]["202"] = {"description": "accepted", "content": json_content(Job)}
    return {
        "/v1/jobs": {
            "post": submit_operation | {"parameters": [parameter("Idempotency-Key", "header")]},
            "get": operation(
                "List jobs",
                "Newest first; `next` is the next page's address.",
                content=json_content(JobList),
                errors=[InvalidField, JobsUnavailable],
            )
            | {"parameters": [parameter("limit", "query"), parameter("cursor", "query")]},
        },
        "/v1/jobs/{id}": {
            "get": operation(
                "Tell of a job", "As Replicate's predictions.", content=json_content(Job), errors=job_errors
            )
            | {"parameters": id_parameters},
            "delete": operation(
                "Cancel a job",
                "Its images leave the batch; a job that has ended stays.",
                content=json_content(Job),
                errors=job_errors,
            )
            | {"parameters": id_parameters},
        },
        "/v1/jobs/{id}/events": {
            "get": operation(
                "Watch a job",
                "Events `status` and `progress` until it has ended, from the one after Last-Event-ID on.",
                content={"text/event-stream": {}},
                errors=[InvalidField, *job_errors],
            )
            | {"parameters": [*id_parameters, parameter("Last-Event-ID", "header")]}
        },
        "/v1/jobs/{id}/images/{index}": {
            "get": operation(
                "Fetch an image of a job",
                "Until the job's time to live is over.",
                content={f"image/{name}": {} for name in ("png", "webp", "jpeg")},
                errors=job_errors,
            )
            | {"parameters": [*id_parameters, parameter("index", "path")]}
        },
    }
