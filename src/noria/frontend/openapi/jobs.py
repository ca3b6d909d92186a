"""Jobs in the OpenAPI document: their body and their paths."""

from typing import Any

from noria.errors import InvalidField, JobNotFound, JobsUnavailable
from noria.frontend.openapi.embeddings import MAX_DIMENSIONS
from noria.frontend.openapi.operations import EVENT_STREAM_CONTENT, IMAGE_CONTENT, json_content, operation, parameter
from noria.frontend.routes.jobs.inputs import ENDPOINTS, JobRequestBody
from noria.frontend.routes.jobs.routes import (
    CURSOR_PATTERN,
    DEFAULT_LIMIT,
    IDEMPOTENCY_KEY_PATTERN,
    MAX_LIMIT,
    JobList,
)
from noria.frontend.text_jobs.results import JSONL, NPY
from noria.frontend.text_jobs.routes import MEDIA_TYPES
from noria.jobs.records import WEBHOOK_EVENTS, Job
from noria.jobs.webhooks.url_check import MAX_URL_CHARS
from noria.protocol.text import EncoderModelSpec

DESCRIPTIONS = {
    "input": 'a body of `POST /t2i`, or, with `"endpoint": "/v1/images/generations"` in it, of that route; '
    "without a seed, a random one is added",
    "webhook": "URL to POST the job to when it starts and when it has ended, signed as in Standard Webhooks",
    "webhook_events_filter": "which of the events `start` and `completed` to send; default: both",
}


_IDEMPOTENCY_KEY = parameter("Idempotency-Key", "header", pattern=f"^{IDEMPOTENCY_KEY_PATTERN}$")

# No line is empty.
_LINES = {"schema": {"type": "string", "pattern": r"^[^\r\n]+(\n[^\r\n]+)*\n?$"}}
_TEXTS_CONTENT: dict[str, Any] = {
    media_type: _LINES if line_format == "text" else {} for media_type, line_format in MEDIA_TYPES.items()
}


def _texts_parameters(spec: EncoderModelSpec | None) -> list[dict[str, Any]]:
    """Return the fields of `TextJobOptions`, and a header. Without a `spec`, bounds do not depend on the model."""
    prompts: dict[str, Any] = {} if spec is None else {"enum": [name for name, _ in spec.prompts]}
    return [
        parameter("model", "query"),
        parameter(
            "dimensions", "query", type="integer", minimum=1, maximum=spec.dimensions if spec else MAX_DIMENSIONS
        ),
        parameter("normalize", "query", type="boolean"),
        parameter("truncate", "query", type="boolean"),
        parameter("prompt_name", "query", **prompts),
        parameter("webhook", "query", format="uri", maxLength=MAX_URL_CHARS),
        parameter("webhook_events_filter", "query", type="array", items={"enum": list(WEBHOOK_EVENTS)}),
        _IDEMPOTENCY_KEY,
    ]


def add_to_schemas(schemas: dict[str, Any]) -> None:
    """Add what the body's types do not say; the schemas of the images' bodies must be complete."""
    schemas["JobRequestBody"]["properties"]["webhook"] |= {"format": "uri", "maxLength": MAX_URL_CHARS}
    schemas["JobRequestBody"]["properties"]["input"]["anyOf"] = [
        _job_input(schemas["ImageRequestBody"], ENDPOINTS[0], required=[]),
        _job_input(schemas["GenerationsRequestBody"], ENDPOINTS[1], required=["endpoint"]),
    ]


def paths(embedding_spec: EncoderModelSpec | None) -> dict[str, Any]:
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
        "Its images leave the running batch. A job that has ended is not changed. With `erase=true` the job, its "
        "images and its pending webhooks are deleted at once, whether it has ended or not.",
        content=json_content(Job),
        errors=[InvalidField, *job_errors],
    )
    delete_operation["responses"]["204"] = {"description": "the job is erased"}
    accept_texts = operation(
        "Submit a job of texts",
        "The body has a text in each line: `text/plain`, or `application/jsonl` with a text, a pair of texts, or an "
        "object with `text` in each. The results are a file of float32 for NumPy, and lines of JSON. At most "
        "`jobs.max_job_texts` texts and `jobs.max_job_bytes` bytes.",
        body=_TEXTS_CONTENT,
        content=json_content(Job),
    )
    accept_texts["responses"]["202"] = submit_operation["responses"]["202"]
    return {
        "/v1/jobs": {
            "post": submit_operation | {"parameters": [_IDEMPOTENCY_KEY]},
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
        "/v1/jobs/texts": {"post": accept_texts | {"parameters": _texts_parameters(embedding_spec)}},
        **{
            f"/v1/jobs/{{id}}/results.{each.name}": {
                "get": operation(
                    f"Get the results of a job of texts as {title}",
                    "In the order of the texts. Until the job's time to live is over.",
                    content={each.media_type: {}},
                    errors=job_errors,
                )
                | {"parameters": id_parameters}
            }
            for each, title in ((NPY, "a .npy file"), (JSONL, "lines of JSON"))
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


def _job_input(schema: dict[str, Any], endpoint: str, required: list[str]) -> dict[str, Any]:
    """Return the schema of a job's input, which is the body of `endpoint` without streaming."""
    properties = {
        name: field for name, field in schema["properties"].items() if name not in ("stream", "partial_images")
    }
    conditions = {"allOf": schema["allOf"]} if "allOf" in schema else {}
    return {
        "type": "object",
        "properties": properties | {"endpoint": {"const": endpoint}},
        "required": [*schema["required"], *required],
        "additionalProperties": False,
    } | conditions
