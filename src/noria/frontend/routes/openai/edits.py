"""OpenAI's routes that start from an image: `POST /v1/images/edits`; `/v1/images/variations` is not supported.

The unmodified openai-python client works. The body is a form, whose fields are those of `/v1/images/generations`, a
file `image` and, if only a part of it is to be repainted, a file `mask` that is transparent there; for each of the
`controls` a file `control`, in their order. A model that takes reference images is shown the images, of which it can
take several; the first one is then a start image only with a mask or a strength.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.errors import BodyTooLarge, InvalidField, OperationNotSupported, UnreadableImage
from noria.frontend.access.concurrency_limits import client_id_of
from noria.frontend.http.body import FORM, JsonBodyReader
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.routes.images.forms import read_form
from noria.frontend.routes.openai.images import GenerationsRequestBody, IgnoredText, admit_generation, respond
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest
from noria.images.reference_size import FIELD as REFERENCES


class EditsFields(GenerationsRequestBody, frozen=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/images/edits` beside its files."""

    strength: float | None = None
    input_fidelity: IgnoredText | None = None


class EditRoutes:
    """The routes of OpenAI's API that start from an image."""

    def __init__(self, generation_service: GenerationService, body_reader: JsonBodyReader) -> None:
        self._generation_service, self._body_reader = generation_service, body_reader

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [
            Route("/v1/images/edits", self.edits, methods=["POST"]),
            Route("/v1/images/variations", self.variations, methods=["POST"]),
        ]

    async def edits(self, http: Request) -> Response:
        """Generate images from an image; returns them in base64, or as a stream of events."""
        return await respond(http, self._generation_service, await self._admit(http), "image_edit")

    async def _admit(self, http: Request) -> AdmittedRequest:
        async with self._body_reader.receive(http, FORM) as raw:
            service = self._generation_service
            fields, load_files = await read_form(
                http, service.upload_threads, raw, EditsFields, "transparent", edited_by=service.find_model
            )
            del raw  # it is long, as the files in it are
            admitting = admit_generation(
                self._generation_service,
                fields,
                http.state.api_client,
                http.state.request_id,
                http.headers,
                load_files,
                fields.strength,
                client=client_id_of(http),
            )
            del load_files
            try:
                return await cancel_on_disconnect(http, admitting)
            except (InvalidField, UnreadableImage, BodyTooLarge) as error:
                if error.field != REFERENCES:
                    raise
                raise type(error)(error.message.replace(REFERENCES, "image", 1), field="image") from error

    async def variations(self, _: Request) -> Response:
        """Raise OperationNotSupported."""
        raise OperationNotSupported(
            "variations have no prompt, which the models of this server need; send the image with a prompt to "
            "/v1/images/edits."
        )
