"""OpenAI's routes that start from an image: `POST /v1/images/edits`; `/v1/images/variations` is not supported.

The unmodified openai-python client works. The body is a form, whose fields are those of `/v1/images/generations`, a
file `image` and, if only a part of it is to be repainted, a file `mask` that is transparent there; for each of the
`controls` a file `control`, in their order.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.errors import InvalidField, OperationNotSupported
from noria.frontend.access.concurrency_limits import client_id_of
from noria.frontend.http.body import JsonBodyReader, decode
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.http.multipart import Form, parse_form
from noria.frontend.routes.openai_images import GenerationsRequestBody, IgnoredText, admit_generation, respond
from noria.frontend.services.generation import AdmittedRequest, GenerationService
from noria.images.start_image import ImageFiles

_IMAGE_NAMES = ("image", "image[]")  # openai-python sends the second one for a list
_CONTROL_NAMES = ("control", "control[]")


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
        async with self._body_reader.receive(http, "multipart/form-data") as raw:
            client, content_type = client_id_of(http), http.headers["content-type"]
            parsing = self._generation_service.upload_threads.run(client, parse_form, content_type, raw)
            del raw  # it is long, as the files in it are
            form = await cancel_on_disconnect(http, parsing)
            load_files, fields = [_files(form)].pop, _fields(form)  # the first one keeps the files until it is called
            del form
            admitting = admit_generation(
                self._generation_service,
                fields,
                http.state.api_client,
                http.state.request_id,
                http.headers,
                load_files,
                fields.strength,
                client=client,
            )
            del load_files
            return await cancel_on_disconnect(http, admitting)

    async def variations(self, _: Request) -> Response:
        """Raise OperationNotSupported."""
        raise OperationNotSupported(
            "variations have no prompt, which the models of this server need; send the image with a prompt to "
            "/v1/images/edits."
        )


def _files(form: Form) -> ImageFiles:
    images = [file for name in _IMAGE_NAMES for file in form.files.get(name, [])]
    masks = form.files.get("mask", [])
    known = (*_IMAGE_NAMES, *_CONTROL_NAMES, "mask")
    for name in known:
        if name in form.fields:
            raise InvalidField(f"{name} is a text; send a file.", field=name)
    for name in form.files:
        if name not in known:
            raise InvalidField(f"unknown file {name[:80]!r}. Known are: image, mask, control.", field=name[:80])
    if not images:
        raise InvalidField("image is missing; send a PNG, WebP or JPEG file.", field="image")
    if len(images) > 1:
        raise InvalidField(
            f"image is there {len(images)} times; one is allowed: no model of this server takes several.",
            field="image",
        )
    if len(masks) > 1:
        raise InvalidField(f"mask is there {len(masks)} times; one is allowed.", field="mask")
    controls = tuple(file for name in _CONTROL_NAMES for file in form.files.get(name, []))
    return ImageFiles(images[0], masks[0] if masks else None, "transparent", controls=controls)


def _fields(form: Form) -> EditsFields:
    """Return the fields, whose numbers are texts; an empty text is a field that is left out, except for prompts."""
    fields: dict[str, object] = {
        name: value for name, value in form.fields.items() if value or name in ("prompt", "negative_prompt")
    }
    for name in ("loras", "controls", "refiner"):
        if name in fields:
            try:
                fields[name] = msgspec.json.decode(form.fields[name])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise InvalidField(f"{name} is no JSON: {error}.", field=name) from error
    body = decode(msgspec.json.encode(fields), EditsFields, strict=False)
    if any(control.image is not None for control in body.controls):
        raise InvalidField("controls: send images of controls as files `control` of the form.", field="controls")
    return body
