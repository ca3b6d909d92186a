"""AUTOMATIC1111's HTTP API, for its clients: Open WebUI, SillyTavern, webuiapi and others. The routes under /sdapi/v1.

`bodies.py` defines what the fields mean, `tasks.py` which request's progress is returned on a server with many users.
Settings other than the model and the file format are accepted and ignored.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import BodyTooLarge, InvalidField, RequestError, UnreadableImage
from noria.errors.problems import Problems
from noria.frontend.http.body import JsonBodyReader, apply_headers, deadline_ms_of, decode_with_ignored
from noria.frontend.http.json_response import json_response
from noria.frontend.protocols.a1111.bodies import (
    CLIP_SKIP,
    Img2Img,
    Txt2Img,
    as_image_body,
    check_body,
    check_settings,
    clip_skip_of,
    drop_off_values,
    error_in_a1111_terms,
    file_format_of,
    find_model_name,
    has_clip_skip,
    ignored_by_model,
    ignored_in,
    own_settings,
    title,
)
from noria.frontend.protocols.a1111.controlnet import (
    FIXED_RESPONSES,
    ControlNetRoutes,
    UnitFields,
    UnitSettings,
    check_proportions,
    error_of_units,
    fields_of,
    images_in,
    settings_of,
)
from noria.frontend.protocols.a1111.extras import ExtrasRoutes
from noria.frontend.protocols.a1111.hires import check_hires, second_pass_of
from noria.frontend.protocols.a1111.ignored import header_of, ignored_tokens
from noria.frontend.protocols.a1111.init_images import files_of_image_body, has_references
from noria.frontend.protocols.a1111.off_values import is_off
from noria.frontend.protocols.a1111.tasks import A1111Tasks
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult
from noria.frontend.services.images.image_writer import preview_as_base64
from noria.frontend.services.images.request_validation import limits
from noria.frontend.services.images.start_images import LoadFiles
from noria.images.a1111_metadata import to_infotext
from noria.images.a1111_names import KARRAS, UPSCALERS, a1111_name, samplers_and_types
from noria.images.metadata import metadata_for
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageFormat

Txt2ImgT = TypeVar("Txt2ImgT", bound=Txt2Img)

# Clients request these lists when they connect; a server without the features returns them like this. SillyTavern
# requests all of them.
_FIXED_RESPONSES: Mapping[str, Any] = {
    "latent-upscale-modes": [{"name": name} for name in UPSCALERS],
    "sd-vae": [],
    **FIXED_RESPONSES,
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


class A1111Options(Struct, frozen=True):
    """The settings of A1111 that have an effect here."""

    sd_model_checkpoint: str | None = None
    samples_format: str | None = None
    CLIP_stop_at_last_layers: int | None = None  # 1 to 12


class A1111Routes:
    """The routes under /sdapi/v1, and the two settings that an API key's clients, or all without keys, share."""

    def __init__(self, generation_service: GenerationService, body_reader: JsonBodyReader) -> None:
        self._generation_service, self._body_reader = generation_service, body_reader
        self._tasks = A1111Tasks(generation_service)
        self._settings: dict[str | None, dict[str, Any]] = {}  # by the API key's name
        self.controlnets = ControlNetRoutes(generation_service.folders, self._selected_model)
        self.extras = ExtrasRoutes(
            generation_service, body_reader, self._tasks, self._selected_model, self._selected_format
        )

    async def txt2img(self, http: Request) -> Response:
        """Generate images; returns them in base64."""
        body, files, info, headers = await self._answer(http, Txt2Img)
        return json_response(Txt2ImgResponse(files, body, info), headers=headers)

    async def img2img(self, http: Request) -> Response:
        """Generate images from an image; returns them in base64."""
        body, files, info, headers = await self._answer(http, Img2Img)
        return json_response(Img2ImgResponse(files, msgspec.structs.asdict(body), info), headers=headers)

    async def _answer(
        self, http: Request, body_type: type[Txt2ImgT]
    ) -> tuple[Txt2ImgT, list[str], str, Mapping[str, str]]:
        """Return a request's body, its files in base64, if it wants them, its settings as JSON, and headers."""
        try:
            admitted, body, ignored = await self._admit_body(http, body_type)
            result = await self._tasks.generate(admitted)
        except (InvalidField, UnreadableImage, BodyTooLarge) as error:  # may come from an engine, too
            raise error_in_a1111_terms(error) from None
        send_images = body.send_images is not False
        files = await self._generation_service.as_base64(result.files) if send_images else []
        settings = self._settings_of(http) | own_settings(body)
        assert isinstance(admitted.spec, DiffusionModelSpec), admitted.spec
        ignored += ignored_by_model(admitted.request.payload, settings, admitted.spec)
        ignored += ignored_tokens(result.num_truncated_tokens)
        return body, files, _generation_info(result, body, ignored), result.headers | header_of(ignored)

    async def _admit_body(
        self, http: Request, body_type: type[Txt2ImgT]
    ) -> tuple[AdmittedRequest, Txt2ImgT, list[str]]:
        """Return the request, its body without images, and what of it is ignored."""
        problems = Problems()
        with contextlib.ExitStack() as slots:
            raw = await self._body_reader.receive(http, slots)
            # Not strict: as in A1111, "20" is a number.
            body, sent = decode_with_ignored(raw, body_type, strict=False, prepare=drop_off_values, problems=problems)
            images = [*(body.init_images or ()), body.mask] if isinstance(body, Img2Img) else []
            check_body(sent, problems, has_image=isinstance(body, Img2Img))
            if not isinstance(body, Img2Img):
                body = check_hires(body, sent, problems)
            fields = problems.attempt(functools.partial(fields_of, sent), UnitFields())
            if not problems.are_there:
                self._body_reader.check_length(raw, *images, *images_in(sent))
            load_files, has_start_image = None, False
            model = self._model_name(self._settings_of(http) | own_settings(body))
            deadline_ms = deadline_ms_of(body, http.headers)
            spec = await self._generation_service.open_model(model, http.state.context, deadline_ms)
            if isinstance(body, Img2Img):
                has_start_image = not has_references(body, spec)
                load = functools.partial(files_of_image_body, body, fields, are_references=not has_start_image)
                load_files = problems.attempt(load, None)
                body = msgspec.structs.replace(body, init_images=None, mask=None)
                del load
            units = problems.attempt(functools.partial(settings_of, sent), [])
            ignored = ignored_in(body, sent)
            admitting = self._admit(
                http, body, spec, fields, units, problems, load_files, has_start_image=has_start_image
            )
            del raw, sent, fields, images, load_files  # they are long
            return await admitting, body, ignored

    async def _admit(
        self,
        http: Request,
        body: Txt2Img,
        spec: DiffusionModelSpec | None,
        fields: UnitFields,
        units: Sequence[UnitSettings],
        problems: Problems,
        load_files: LoadFiles | None,
        *,
        has_start_image: bool,
    ) -> AdmittedRequest:
        check_settings(body.override_settings or {}, problems)
        settings = self._settings_of(http) | own_settings(body)
        model = self._model_name(settings)
        second_pass = None
        if spec is not None and body.enable_hr and not isinstance(body, Img2Img):
            allowed, folders = limits(spec, self._generation_service.config), self._generation_service.folders
            # In a thread: it reads folders.
            second_pass = await asyncio.to_thread(second_pass_of, body, spec, allowed, folders.upscalers, problems)
        image_body = as_image_body(
            body, settings, spec, model, fields.controls, problems, second_pass, has_start_image=has_start_image
        )
        image_body = apply_headers(msgspec.structs.replace(image_body, ip_adapter=fields.ip_adapter), http.headers)
        admitting = self._generation_service.admit(
            image_body,
            http.state.context,
            load_files=load_files,
            check=functools.partial(check_proportions, units),
            problems=problems,
        )
        del load_files, fields, image_body
        try:
            return await admitting
        except RequestError as error:
            raise error_of_units(error, units) from None

    def _settings_of(self, http: Request) -> dict[str, Any]:
        return self._settings.setdefault(http.state.api_client.name, {})

    def _model_name(self, settings: Mapping[str, Any]) -> str | None:
        checkpoint = settings.get("sd_model_checkpoint")
        if is_off(checkpoint):
            return None
        name = find_model_name(str(checkpoint), self._generation_service.models)
        return self._generation_service.submission.checkpoints.find_name(name) or name

    async def options(self, http: Request) -> Response:
        """Return the settings of the key's requests."""
        settings, spec = self._settings_of(http), self._selected_model(http)
        return json_response(
            {
                "sd_model_checkpoint": title(spec),
                "sd_checkpoint_hash": spec.fingerprint,
                "samples_format": settings.get("samples_format", "png"),
                "sd_vae": "Automatic",
                CLIP_SKIP: clip_skip_of(settings) or (spec.default_clip_skip if has_clip_skip(spec) else 1),
            }
        )

    async def set_options(self, http: Request) -> Response:
        """Change the model and the file format of the key's later requests."""
        _, sent = decode_with_ignored(await self._body_reader.read(http), A1111Options, strict=False)
        problems = Problems()
        check_settings(sent, problems)
        problems.raise_all()
        changed = {name: sent[name] for name in A1111Options.__struct_fields__ if not is_off(sent.get(name))}
        model = self._model_name(changed)
        await self._generation_service.open_model(model, http.state.context)
        self._generation_service.resolve_model(model, http.state.context)  # raises if the model is unknown
        self._settings_of(http).update(changed)
        return json_response(None)

    async def sd_models(self, _: Request) -> Response:
        """List the models served."""
        names = ("title", "model_name", "hash", "sha256", "filename", "config")
        facts = [
            *((title(spec), spec.name, spec.fingerprint) for spec in self._generation_service.list_models()),
            *((name, name, None) for name in self._generation_service.submission.checkpoints.unopened),
        ]
        return json_response([dict(zip(names, (*each, None, each[1], None), strict=True)) for each in facts])

    async def samplers(self, http: Request) -> Response:
        """List the samplers of the selected model by A1111's names."""
        names = self._samplers_and_types(http)[0]
        return json_response([{"name": name, "aliases": [], "options": {}} for name in names])

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
        files = (
            await asyncio.to_thread(self._generation_service.folders.loras.files, spec.name) if spec.takes_loras else {}
        )
        return json_response(
            [{"name": name, "alias": name, "path": file.name, "metadata": {}} for name, file in files.items()]
        )

    async def embeddings(self, http: Request) -> Response:
        """List the embeddings that prompts for the selected model can name, by name."""
        folders, spec = self._generation_service.folders.embeddings, self._selected_model(http)
        files = await asyncio.to_thread(folders.files, spec.name) if "a1111" in spec.prompt_syntaxes else {}
        facts = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "shape": None, "vectors": None}
        return json_response({"loaded": dict.fromkeys(files, facts), "skipped": {}})

    def _samplers_and_types(self, http: Request) -> tuple[list[str], list[str]]:
        return samplers_and_types(self._selected_model(http).schedulers)

    def _selected_format(self, http: Request) -> ImageFormat:
        return file_format_of(self._settings_of(http))

    def _selected_model(self, http: Request) -> DiffusionModelSpec:
        model = self._model_name(self._settings_of(http))
        return self._generation_service.resolve_model(model, http.state.context)

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

    async def fixed(self, http: Request) -> Response:
        """Return what is the same for all models."""
        return json_response(_FIXED_RESPONSES[http.url.path.rpartition("/")[2]])


def _generation_info(result: GenerationResult, body: Txt2Img, ignored: Sequence[str]) -> str:
    """Return A1111's JSON of the settings used, and what was ignored; `infotexts` are the texts in the files."""
    request, spec, num_images = result.request, result.task.spec, len(result.files)
    seeds, second = [image.seed for image in result.images], request.payload.second_pass
    info = {
        "prompt": request.payload.prompt,
        "all_prompts": [request.payload.prompt] * num_images,
        "negative_prompt": request.payload.negative_prompt or "",
        "all_negative_prompts": [request.payload.negative_prompt or ""] * num_images,
        "seed": seeds[0],
        "all_seeds": seeds,
        "subseed": seeds[0],
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
        "denoising_strength": request.payload.strength if second is None else second.strength,
        "extra_generation_params": {},
        "index_of_first_image": 0,
        "infotexts": [to_infotext(metadata_for(request, spec, seed)) for seed in seeds],
        "styles": [],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S"),
        "clip_skip": request.payload.clip_skip or 1,
        "is_using_inpainting_conditioning": False,
        "ignored": ignored,
        "refused_images": result.refused,
    }
    return msgspec.json.encode(info).decode()
