"""AUTOMATIC1111's HTTP API, for its clients: Open WebUI, SillyTavern, webuiapi and others. The routes under /sdapi/v1.

`bodies.py` defines what the fields mean, `tasks.py` which request's progress is returned on a server with many users.
Settings other than the model and the file format are accepted and ignored.
"""

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.errors import BodyTooLarge, InvalidField, RequestError, UnreadableImage
from noria.frontend.access.concurrency_limits import client_id_of
from noria.frontend.http.body import JsonBodyReader, decode_with_ignored
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.http.json_response import json_response
from noria.frontend.http.paths import A1111_ROOT
from noria.frontend.routes.a1111.bodies import (
    Img2Img,
    Txt2Img,
    as_image_body,
    check_body,
    check_image_body,
    check_settings,
    error_in_a1111_terms,
    files_of_image_body,
    find_model_name,
    has_references,
    title,
)
from noria.frontend.routes.a1111.controlnet import (
    UnitSettings,
    check_proportions,
    controls_of,
    error_of_units,
    images_in,
    settings_of,
)
from noria.frontend.routes.a1111.controlnet_routes import ControlNetRoutes
from noria.frontend.routes.a1111.tasks import A1111Tasks
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult
from noria.frontend.services.images.image_writer import preview_as_base64
from noria.frontend.services.images.start_images import LoadFiles
from noria.frontend.services.priority_headers import apply_headers
from noria.images.a1111_metadata import to_infotext
from noria.images.a1111_names import KARRAS, a1111_name, samplers_and_types
from noria.images.metadata import metadata_for
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ControlField

# Clients request these lists when they connect; a server without the features returns them like this. SillyTavern
# requests all of them.
_EMPTY_LISTS: Mapping[str, list[Any]] = {
    "upscalers": [{"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1}],
    "latent-upscale-modes": [],
    "sd-vae": [],
}


class Txt2ImgResponse(Struct, frozen=True):
    """The response of `POST /sdapi/v1/txt2img`: files in base64, the decoded fields, JSON with the settings used."""

    images: list[str]
    parameters: Txt2Img
    info: str


class Img2ImgResponse(Struct, frozen=True):
    """The response of `POST /sdapi/v1/img2img`, as of `txt2img`; the decoded fields are without the images."""

    images: list[str]
    parameters: dict[str, Any]
    info: str


class TaskState(Struct, frozen=True):
    """A1111's state of the oldest running request; all 0 without one."""

    job_count: int = 0  # running requests of this route
    job_no: int = 0
    sampling_step: int = 0
    sampling_steps: int = 0
    job: str = ""
    job_timestamp: str = ""
    skipped: bool = False
    interrupted: bool = False
    stopping_generation: bool = False


class ProgressResponse(Struct, frozen=True):
    """The response of `GET /sdapi/v1/progress`."""

    progress: float  # 0 to 1
    eta_relative: float  # s
    state: TaskState
    current_image: str | None = None
    textinfo: str | None = None


class Options(Struct, frozen=True):
    """The settings of A1111 that have an effect here."""

    sd_model_checkpoint: str | None = None
    samples_format: str | None = None


class A1111Routes:
    """The routes under /sdapi/v1, and the two settings that an API key's clients, or all without keys, share."""

    def __init__(self, generation_service: GenerationService, body_reader: JsonBodyReader) -> None:
        self._generation_service, self._body_reader = generation_service, body_reader
        self._tasks = A1111Tasks(generation_service)
        self._settings: dict[str | None, dict[str, Any]] = {}  # by the API key's name

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [
            Route(f"{A1111_ROOT}/txt2img", self.txt2img, methods=["POST"]),
            Route(f"{A1111_ROOT}/img2img", self.img2img, methods=["POST"]),
            Route(f"{A1111_ROOT}/options", self.options, methods=["GET", "POST"]),
            Route(f"{A1111_ROOT}/sd-models", self.sd_models),
            Route(f"{A1111_ROOT}/samplers", self.samplers),
            Route(f"{A1111_ROOT}/schedulers", self.schedulers),
            Route(f"{A1111_ROOT}/loras", self.loras),
            Route(f"{A1111_ROOT}/progress", self.progress),
            Route(f"{A1111_ROOT}/interrupt", self.interrupt, methods=["POST"]),
            Route(f"{A1111_ROOT}/skip", self.skip, methods=["POST"]),
            *(Route(f"{A1111_ROOT}/{name}", self.empty_list) for name in _EMPTY_LISTS),
            *ControlNetRoutes(self._generation_service.controlnets, self._selected_model).routes,
        ]

    async def txt2img(self, http: Request) -> Response:
        """Generate images; returns them in base64."""
        try:
            admitted, body = await self._admit_text(http)
            result, b64_files = await self._generate(http, admitted, body)
        except (InvalidField, UnreadableImage, BodyTooLarge) as error:  # may come from an engine, too
            raise error_in_a1111_terms(error) from error
        return json_response(Txt2ImgResponse(b64_files, body, _generation_info(result, body)), headers=result.headers)

    async def img2img(self, http: Request) -> Response:
        """Generate images from an image; returns them in base64."""
        try:
            admitted, body = await self._admit_image(http)
            result, b64_files = await self._generate(http, admitted, body)
        except (InvalidField, UnreadableImage, BodyTooLarge) as error:
            raise error_in_a1111_terms(error) from error
        fields = msgspec.structs.asdict(body)
        return json_response(Img2ImgResponse(b64_files, fields, _generation_info(result, body)), headers=result.headers)

    async def _admit_text(self, http: Request) -> tuple[AdmittedRequest, Txt2Img]:
        """Return the request and its body."""
        async with self._body_reader.receive(http) as raw:
            body, sent = decode_with_ignored(raw, Txt2Img, strict=False)  # as in A1111, "20" is a number
            check_body(sent)
            controls = controls_of(sent)
            self._body_reader.check_length(raw, *images_in(sent))
            units = settings_of(sent)
            admitting = self._admit(http, body, controls, units, has_start_image=False)
            del raw, sent, controls  # with images they are long
            return await cancel_on_disconnect(http, admitting), body

    async def _admit_image(self, http: Request) -> tuple[AdmittedRequest, Img2Img]:
        """Return the request, and its body without images."""
        async with self._body_reader.receive(http) as raw:
            body, sent = decode_with_ignored(raw, Img2Img, strict=False)
            check_image_body(sent)
            controls = controls_of(sent)
            self._body_reader.check_length(raw, *(body.init_images or ()), body.mask, *images_in(sent))
            model = self._model_name(self._settings_of(http) | (body.override_settings or {}))
            are_references = has_references(body, self._generation_service.find_model(model))
            load_files = files_of_image_body(body, controls, are_references=are_references)
            body = msgspec.structs.replace(body, init_images=None, mask=None)
            units = settings_of(sent)
            admitting = self._admit(http, body, controls, units, load_files, has_start_image=not are_references)
            del raw, sent, controls, load_files  # they are long
            return await cancel_on_disconnect(http, admitting), body

    async def _generate(
        self, http: Request, admitted: AdmittedRequest, body: Txt2Img
    ) -> tuple[GenerationResult, list[str]]:
        """Return the result, and its files in base64 if `body` wants them."""
        result = await cancel_on_disconnect(http, self._tasks.generate(admitted))
        send_images = body.send_images is not False
        return result, await self._generation_service.files_as_base64(result) if send_images else []

    async def _admit(
        self,
        http: Request,
        body: Txt2Img,
        controls: tuple[ControlField, ...],
        units: Sequence[UnitSettings],
        load_files: LoadFiles | None = None,
        *,
        has_start_image: bool,
    ) -> AdmittedRequest:
        overrides = body.override_settings or {}
        check_settings(overrides)
        settings = self._settings_of(http) | overrides
        model = self._model_name(settings)
        image_body = as_image_body(body, settings, model, controls, has_start_image=has_start_image)
        image_body = apply_headers(image_body, http.headers)
        admitting = self._generation_service.admit(
            image_body,
            http.state.api_client,
            http.state.request_id,
            load_files=load_files,
            client=client_id_of(http),
            check=functools.partial(check_proportions, units),
        )
        del load_files, controls, image_body
        try:
            return await admitting
        except RequestError as error:
            raise error_of_units(error, units) from error

    def _settings_of(self, http: Request) -> dict[str, Any]:
        return self._settings.setdefault(http.state.api_client.name, {})

    def _model_name(self, settings: Mapping[str, Any]) -> str | None:
        checkpoint = settings.get("sd_model_checkpoint")
        return find_model_name(str(checkpoint), self._generation_service.models) if checkpoint else None

    async def options(self, http: Request) -> Response:
        """GET returns the settings; POST changes the model and the file format of the key's later requests."""
        settings = self._settings_of(http)
        if http.method == "POST":
            raw = await self._body_reader.read(http)
            _, sent = decode_with_ignored(raw, Options)
            check_settings(sent)
            changed = {name: sent[name] for name in Options.__struct_fields__ if sent.get(name)}
            self._generation_service.resolve_model(self._model_name(changed))  # raises if the model is unknown
            settings |= changed
            return json_response(None)
        spec = self._generation_service.resolve_model(self._model_name(settings))
        return json_response(
            {
                "sd_model_checkpoint": title(spec),
                "sd_checkpoint_hash": spec.fingerprint,
                "samples_format": settings.get("samples_format", "png"),
                "sd_vae": "Automatic",
                "CLIP_stop_at_last_layers": 1,
            }
        )

    async def sd_models(self, _: Request) -> Response:
        """List the models served."""
        names = ("title", "model_name", "hash", "sha256", "filename", "config")
        return json_response(
            [
                dict(zip(names, (title(spec), spec.name, spec.fingerprint, None, spec.name, None), strict=True))
                for spec in self._generation_service.list_models()
            ]
        )

    async def samplers(self, http: Request) -> Response:
        """List the samplers of the selected model by A1111's names."""
        return json_response(
            [{"name": name, "aliases": [], "options": {}} for name in self._samplers_and_types(http)[0]]
        )

    async def schedulers(self, http: Request) -> Response:
        """List the schedule types of the selected model."""
        return json_response(
            [
                {
                    "name": name.lower(),
                    "label": name,
                    "aliases": None,
                    "default_rho": 7.0 if name == KARRAS else -1.0,  # Karras et al. (2022), as in diffusers
                    "need_inner_model": False,
                }
                for name in self._samplers_and_types(http)[1]
            ]
        )

    async def loras(self, http: Request) -> Response:
        """List the LoRAs of the selected model, without their folders."""
        spec = self._selected_model(http)
        files = await asyncio.to_thread(self._generation_service.loras.files, spec.name) if spec.takes_loras else {}
        return json_response(
            [{"name": name, "alias": name, "path": file.name, "metadata": {}} for name, file in files.items()]
        )

    def _samplers_and_types(self, http: Request) -> tuple[list[str], list[str]]:
        return samplers_and_types(self._selected_model(http).schedulers)

    def _selected_model(self, http: Request) -> DiffusionModelSpec:
        return self._generation_service.resolve_model(self._model_name(self._settings_of(http)))

    async def progress(self, http: Request) -> Response:
        """Return the progress of the client's oldest running request of this API."""
        tasks = self._tasks.of_client(http.state.api_client)
        if not tasks:
            return json_response(ProgressResponse(0.0, 0.0, TaskState()))
        task = tasks[0]
        payload = task.admitted.request.payload
        step, num_steps, finish_in_s = 0, payload.num_steps, None
        if task.progress is not None:
            step, num_steps, finish_in_s = task.progress.step, task.progress.num_steps, task.progress.finish_in_s
        image = None
        if task.preview is not None and http.query_params.get("skip_current_image", "false").lower() != "true":
            image = await preview_as_base64(task.preview, "png", (payload.width, payload.height))
        job = "txt2img" if payload.strength is None else "img2img"
        state = TaskState(
            len(tasks), sampling_step=step, sampling_steps=num_steps, interrupted=task.interrupted, job=job
        )
        return json_response(ProgressResponse(step / max(num_steps, 1), finish_in_s or 0.0, state, image))

    async def interrupt(self, http: Request) -> Response:
        """Cancel all of the client's requests of this API at their next step."""
        for task in self._tasks.of_client(http.state.api_client):
            task.interrupt()
        return json_response({})

    async def skip(self, http: Request) -> Response:
        """Cancel the client's oldest request of this API."""
        for task in self._tasks.of_client(http.state.api_client)[:1]:
            task.interrupt()
        return json_response({})

    async def empty_list(self, http: Request) -> Response:
        """Return the list of a feature that this server does not have."""
        return json_response(_EMPTY_LISTS[http.url.path.rpartition("/")[2]])


def _generation_info(result: GenerationResult, body: Txt2Img) -> str:
    """Return A1111's JSON of the settings used; `infotexts` are the texts in the files."""
    request, spec, num_images = result.request, result.admitted.spec, len(result.files)
    seeds = [request.payload.seed + index for index in range(num_images)]
    info = {
        "prompt": request.payload.prompt,
        "all_prompts": [request.payload.prompt] * num_images,
        "negative_prompt": request.payload.negative_prompt or "",
        "all_negative_prompts": [request.payload.negative_prompt or ""] * num_images,
        "seed": request.payload.seed,
        "all_seeds": seeds,
        "subseed": request.payload.seed,
        "all_subseeds": seeds,
        "subseed_strength": 0,
        "width": request.payload.width,
        "height": request.payload.height,
        "sampler_name": a1111_name(request.payload.scheduler)[0],
        "cfg_scale": request.payload.guidance_scale,
        "steps": request.payload.inference_steps,
        "batch_size": body.batch_size or 1,
        "restore_faces": False,
        "sd_model_name": spec.name,
        "sd_model_hash": spec.fingerprint,
        "denoising_strength": request.payload.strength,
        "extra_generation_params": {},
        "index_of_first_image": 0,
        "infotexts": [to_infotext(metadata_for(request, spec, seed)) for seed in seeds],
        "styles": [],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S"),
        "clip_skip": 1,
        "is_using_inpainting_conditioning": False,
    }
    return msgspec.json.encode(info).decode()
