"""OpenAI's routes that start from an image: `POST /v1/images/edits`; `/v1/images/variations` is not supported.

The unmodified openai-python client works. The body is a form, whose fields are those of `/v1/images/generations`, a
file `image` and, if only a part of it is to be repainted, a file `mask` that is transparent there; for each of the
`controls` a file `control`, in their order, and for an `ip_adapter` a file `ip_adapter_image`. A model that takes
reference images is shown the images, of which it can take several; the first one is then a start image only with a mask
or a strength.
"""

import contextlib

from starlette.requests import Request
from starlette.responses import Response

from noria.errors import BodyTooLarge, InvalidField, OperationNotSupported, RequestError, UnreadableImage
from noria.errors.problems import Problems, each_part
from noria.frontend.bodies.forms import read_form
from noria.frontend.bodies.image_fields import describe_form
from noria.frontend.http.body import FORM, JSON, JsonBodyReader, deadline_ms_of
from noria.frontend.http.operations import EVENT_STREAM, JsonObject, Operation, Served
from noria.frontend.protocols.openai.images import (
    OPENAI_FIELDS,
    GenerationsRequestBody,
    GenerationsResponse,
    IgnoredText,
    admit_generation,
    describe_openai_settings,
    respond,
)
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest
from noria.images.reference_size import FIELD as REFERENCES


class EditsFields(GenerationsRequestBody, frozen=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/images/edits` beside its files."""

    strength: float | None = None
    input_fidelity: IgnoredText | None = None


def _describe_edits(schemas: dict[str, JsonObject], served: Served) -> None:
    body = schemas[EditsFields.__name__]
    describe_openai_settings(body, served)
    describe_form(body, needs_image=True)


class EditRoutes:
    """The routes of OpenAI's API that start from an image."""

    def __init__(self, generation_service: GenerationService, body_reader: JsonBodyReader) -> None:
        self._generation_service, self._body_reader = generation_service, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        return [
            Operation(
                method="POST",
                path="/v1/images/edits",
                handler=self._edits,
                group="Generate",
                scopes=("generate",),
                summary="Generate images from an image with OpenAI's API",
                description="The body is a form, and the unmodified OpenAI clients work; send Noria's own fields in "
                "`extra_body`.",
                body={FORM: EditsFields},
                fields=OPENAI_FIELDS,
                example={"prompt": "a blue circle above a blue square", "strength": 0.6},
                response={JSON: GenerationsResponse} | EVENT_STREAM,
                describe=_describe_edits,
            ),
            Operation(
                method="POST",
                path="/v1/images/variations",
                handler=self._variations,
                group="Generate",
                scopes=("generate",),
                summary="Not supported",
                description="The models need a prompt.",
                errors=[OperationNotSupported],
            ),
        ]

    async def _edits(self, http: Request) -> Response:
        return await respond(http, self._generation_service, await self._admit(http), "image_edit")

    async def _admit(self, http: Request) -> AdmittedRequest:
        with contextlib.ExitStack() as slots:
            raw = await self._body_reader.receive(http, slots, FORM)
            service, problems = self._generation_service, Problems()
            fields, load_files = await read_form(
                http,
                service.upload_threads,
                raw,
                EditsFields,
                problems,
                "transparent",
                edited_by=lambda body: service.open_model(
                    body.model, http.state.context, deadline_ms_of(body, http.headers)
                ),
            )
            del raw  # it is long, as the files in it are
            admitting = admit_generation(
                self._generation_service,
                fields,
                http.state.context,
                http.headers,
                problems,
                load_files,
                fields.strength,
            )
            del load_files
            try:
                return await admitting
            except (InvalidField, UnreadableImage, BodyTooLarge) as error:
                raise each_part(error, _in_terms_of_edits) from None

    async def _variations(self, _: Request) -> Response:
        raise OperationNotSupported(
            "variations have no prompt, which the models of this server need; send the image with a prompt to "
            "/v1/images/edits."
        )


def _in_terms_of_edits(error: RequestError) -> RequestError:
    """Return `error` with the name of the form's files in place of that of reference images."""
    if error.field != REFERENCES:
        return error
    return type(error)(error.message.replace(REFERENCES, "image", 1), field="image")
