"""The paths of jobs in the OpenAPI document."""

from typing import Any

from noria.errors import InvalidField, JobNotFound, JobsUnavailable
from noria.frontend.openapi.operations import EVENT_STREAM_CONTENT, IMAGE_CONTENT, json_content, operation, parameter
from noria.frontend.routes.jobs import (
    CURSOR_PATTERN,
    DEFAULT_LIMIT,
    IDEMPOTENCY_KEY_PATTERN,
    MAX_LIMIT,
    JobList,
    JobRequestBody,
)
from noria.jobs.records import Job


def job_paths() -> dict[str, Any]:
    """Return the operations by path."""
    job_errors = [JobNotFound, JobsUnavailable]
    id_parameters = [parameter("id", "path")]
    submit_operation = operation(
        "Submit a job",
        "The response is immediate; the job survives restarts. If the `Idempotency-Key` was sent before, the status is "
        "200 and the response is the job that it created.",
        body=JobRequestBody,
        content=json_content(Job),
    )
    submit_operation["responses"]["202"] = {"description": "accepted", "content": json_content(Job)}
    list_parameters = [
        parameter("limit", "query", type="integer", minimum=1, maximum=MAX_LIMIT, default=DEFAULT_LIMIT),
        parameter("cursor", "query", pattern=f"^{CURSOR_PATTERN}$"),
    ]
    events_operation = operation(
        "Stream the events of a job",
        "Events `status` and `progress`, from the one after Last-Event-ID on, until the job has ended.",
        content=EVENT_STREAM_CONTENT,
        errors=[InvalidField, *job_errors],
    )
    events_operation["responses"]["204"] = {"description": "the job has ended, and has no later events"}
    delete_operation = operation(
        "Cancel or erase a job",
        "Its images leave the running batch. A job that has ended is not changed. With `erase=true` the job, its images "
        "and its pending webhooks are deleted at once, whether it has ended or not.",
        content=json_content(Job),
        errors=[InvalidField, *job_errors],
    )
    delete_operation["responses"]["204"] = {"description": "the job is erased"}
    return {
        "/v1/jobs": {
            "post": submit_operation
            | {"parameters": [parameter("Idempotency-Key", "header", pattern=f"^{IDEMPOTENCY_KEY_PATTERN}$")]},
            "get": operation(
                "List jobs",
                "Newest first; `next` is the URL of the next page.",
                content=json_content(JobList),
                errors=[InvalidField, JobsUnavailable],
            )
            | {"parameters": list_parameters},
        },
        "/v1/jobs/{id}": {
            "get": operation(
                "Get a job", "In the form of Replicate's predictions.", content=json_content(Job), errors=job_errors
            )
            | {"parameters": id_parameters},
            "delete": delete_operation
            | {"parameters": [*id_parameters, parameter("erase", "query", type="boolean", default=False)]},
        },
        "/v1/jobs/{id}/events": {
            "get": events_operation
            | {
                "parameters": [
                    *id_parameters,
                    parameter("Last-Event-ID", "header", type="integer", minimum=0, maximum=10**9 - 1),
                ]
            }
        },
        "/v1/jobs/{id}/images/{index}": {
            "get": operation(
                "Get an image of a job",
                "Until the job's time to live is over.",
                content=IMAGE_CONTENT,
                errors=job_errors,
            )
            | {"parameters": [*id_parameters, parameter("index", "path", type="integer", minimum=0)]}
        },
    }
