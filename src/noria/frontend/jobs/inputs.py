"""The `input` of jobs of images: a body of the route that its `endpoint` names."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from noria.errors import BodyTooLarge, InvalidField, UnreadableImage, short_repr
from noria.errors.problems import Problems
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.http.body import apply_headers, decode
from noria.frontend.http.operations import JsonObject, Served
from noria.frontend.protocols.openai.images import IGNORED_FIELDS, GenerationsRequestBody, admit_generation
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest
from noria.jobs.records import WantedEvent
from noria.jobs.webhooks.url_check import MAX_URL_CHARS
from noria.protocol.diffusion import DiffusionPayload
from noria.protocol.request import ImageRequestBody

BodyT = TypeVar("BodyT", ImageRequestBody, GenerationsRequestBody)

ENDPOINTS = ("/t2i", "/v1/images/generations")


class JobRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/jobs`."""

    input: dict[str, Any]
    webhook: str | None = None
    webhook_events_filter: list[WantedEvent] | None = None


JOB_FIELDS = {
    "input": 'a body of `POST /t2i`, or, with `"endpoint": "/v1/images/generations"` in it, of that route; '
    "without a seed, a random one is added",
    "webhook": "URL to POST the job to when it starts and when it has ended, signed as in Standard Webhooks",
    "webhook_events_filter": "which of the events `start` and `completed` to send; default: both. Of Replicate's, "
    "`output` and `logs` never come",
}
"""The descriptions of the fields of a `JobRequestBody`."""


def describe_job(schemas: dict[str, JsonObject], _: Served) -> None:
    """Add what the types of the body do not say; the schemas of the images' bodies must be complete."""
    properties = schemas[JobRequestBody.__name__]["properties"]
    properties["webhook"] |= {"format": "uri", "maxLength": MAX_URL_CHARS}
    properties["input"]["anyOf"] = [
        _input_schema(schemas[ImageRequestBody.__name__], ENDPOINTS[0], required=[]),
        _input_schema(schemas[GenerationsRequestBody.__name__], ENDPOINTS[1], required=["endpoint"]),
    ]


def _input_schema(schema: JsonObject, endpoint: str, required: list[str]) -> JsonObject:
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


def images_in(job_input: Mapping[str, Any]) -> list[str]:
    """Return the files in base64 of an input."""
    controls = job_input.get("controls")
    holders = [each for each in controls if isinstance(each, dict)] if isinstance(controls, list) else []
    references = job_input.get("reference_images")
    found = [job_input.get("image"), job_input.get("mask"), *(each.get("image") for each in holders)]
    found += references if isinstance(references, list) else []
    adapter = job_input.get("ip_adapter")
    found += [adapter.get("image")] if isinstance(adapter, dict) else []
    return [image for image in found if isinstance(image, str)]


@dataclasses.dataclass
class JobImages:
    """The files in base64 of the input of a job, which are long."""

    start: dict[str, str] = dataclasses.field(default_factory=dict)  # `image` and `mask`
    controls: dict[int, str] = dataclasses.field(default_factory=dict)  # by their number
    references: list[str] = dataclasses.field(default_factory=list)
    ip_adapter: str | None = None

    def put_back(self, body: BodyT) -> BodyT:
        """Return a body with its files, which are dropped here."""
        body = msgspec.structs.replace(
            body,
            **self.start,
            controls=tuple(
                msgspec.structs.replace(control, image=self.controls.get(k)) for k, control in enumerate(body.controls)
            ),
            reference_images=tuple(self.references) or body.reference_images,
            ip_adapter=body.ip_adapter and msgspec.structs.replace(body.ip_adapter, image=self.ip_adapter),
        )
        self.clear()
        return body

    def clear(self) -> None:
        """Drop the files."""
        self.start.clear()
        self.controls.clear()
        self.references.clear()
        self.ip_adapter = None


def take_images(job_input: dict[str, Any]) -> JobImages:
    """Remove and return the files in an input; start images and masks are only those of `/t2i`."""
    names = ("image", "mask") if job_input.get("endpoint", ENDPOINTS[0]) == ENDPOINTS[0] else ()
    start = {name: job_input.pop(name) for name in names if isinstance(job_input.get(name), str)}
    controls, references = job_input.get("controls"), job_input.get("reference_images")
    adapter = job_input.get("ip_adapter")
    are_files = isinstance(references, list) and all(isinstance(each, str) for each in references)
    return JobImages(
        start,
        {
            k: control.pop("image")
            for k, control in enumerate(controls if isinstance(controls, list) else ())
            if isinstance(control, dict) and isinstance(control.get("image"), str)
        },
        job_input.pop("reference_images") if are_files else [],
        adapter.pop("image") if isinstance(adapter, dict) and isinstance(adapter.get("image"), str) else None,
    )


def digest_of(body: JobRequestBody) -> str:
    """Return what distinguishes bodies that share an idempotency key."""
    return hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()


def stored_input(sent: Mapping[str, Any], payload: DiffusionPayload) -> dict[str, Any]:
    """Return the `input` of a job without ignored fields, with its seed, and with digests in place of images."""
    stored = {name: value for name, value in sent.items() if name not in IGNORED_FIELDS}
    digests = {"image": payload.image_digest, "mask": payload.mask_digest}
    if payload.controls:
        stored["controls"] = [
            {**of_sent, "image": f"sha256:{control.image_digest}"}
            for of_sent, control in zip(sent["controls"], payload.controls, strict=True)
        ]
    if payload.ip_adapter is not None:
        stored["ip_adapter"] = sent["ip_adapter"] | {"image": f"sha256:{payload.ip_adapter.image_digest}"}
    if payload.reference_images:
        stored["reference_images"] = [f"sha256:{each.digest}" for each in payload.reference_images]
    return stored | {"seed": payload.seed} | {name: f"sha256:{each}" for name, each in digests.items() if each}


async def admit_input(
    generation_service: GenerationService,
    job_input: Mapping[str, Any],
    images: JobImages,
    context: RequestContext,
    job_id: str,
    headers: Mapping[str, str],
) -> AdmittedRequest:
    """Validate the `input` of a job: a body of the route that its `endpoint` names, `/t2i` by default.

    `images` are fields of it apart, because they are long; they are removed.

    Raises NoriaError: as `GenerationService.admit` does; field names begin with `input.`.
    """
    fields = dict(job_input)
    endpoint = fields.pop("endpoint", ENDPOINTS[0])
    if endpoint not in ENDPOINTS:
        raise InvalidField(
            f"input.endpoint is {short_repr(endpoint)}; allowed are {', '.join(ENDPOINTS)}.", field="input.endpoint"
        )
    problems = Problems()
    try:
        if endpoint == ENDPOINTS[0]:
            body = decode(msgspec.json.encode(fields), ImageRequestBody, problems=problems)
            body = images.put_back(apply_headers(_without_streaming(body, problems), headers))
            admitting = generation_service.admit(body, context, job_id=job_id, problems=problems)
            del body
            return await admitting
        generations_body = decode(msgspec.json.encode(fields), GenerationsRequestBody, problems=problems)
        generations_body = images.put_back(_without_streaming(generations_body, problems))
        admitting = admit_generation(generation_service, generations_body, context, headers, problems, job_id=job_id)
        del generations_body
        return await admitting
    except (InvalidField, UnreadableImage, BodyTooLarge) as error:
        if error.field is not None and not error.field.startswith("X-"):  # not a header
            error.field = f"input.{error.field}"
        raise


def _without_streaming(body: BodyT, problems: Problems) -> BodyT:
    """Return `body` without the fields that ask for a stream, which are added to `problems`."""
    for field in ("stream", "partial_images"):
        if got := getattr(body, field):
            message = (
                f"{field} is {msgspec.json.encode(got).decode()}; a job cannot be streamed in the response. "
                f"Leave {field} out and GET the job's `urls.stream`."
            )
            problems.add(InvalidField(message, field=field))
    return msgspec.structs.replace(body, stream=False, partial_images=0)
