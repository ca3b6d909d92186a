"""Targets of fuzzing: each has a function of any bytes, which returns whether they were accepted.

It raises if it has found a defect. The target's seeds are accepted; they are made of the project's own types, so that
they stay so. `corpus/` has other inputs.
"""

import base64
import contextlib
import dataclasses
import functools
import io
import json
import logging
import math
import pathlib
import shutil
import struct
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import zmq
from google.protobuf.message import DecodeError
from PIL import Image
from safetensors.numpy import save

import gguf_files
from fuzz import mutation
from fuzz.in_process_server import InProcessServer, framed
from noria.config import FrontendConfig
from noria.errors import ImageFileError, InvalidField, ModelError, UnreadableImage
from noria.frontend.protocols.open_inference.grpc_messages import message as grpc_message
from noria.frontend.protocols.open_inference.grpc_server import as_request, as_response
from noria.frontend.protocols.open_inference.inference import as_settings
from noria.frontend.protocols.open_inference.tensors import OutputTensor
from noria.frontend.protocols.t2i.metadata import usable_settings
from noria.images.a1111_metadata import to_infotext
from noria.images.inpainting import MaskUse
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import read_metadata, save_options
from noria.images.reference_size import place_reference
from noria.images.start_image import ImageFiles, RequestImages
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.models.catalog import open_model
from noria.protocol import messages
from noria.protocol.text import TextResult, TextTimings
from noria.protocol.transport import EngineConnection, pack, pass_on
from noria.testing.fake_encoder import FAKE_ENCODER, make_text_request
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL
from noria.testing.requests import make_image_request

BUNDLED = pathlib.Path(__file__).parents[2] / "src" / "noria" / "models" / "bundled"


@dataclasses.dataclass(frozen=True)
class Target:
    """`open` is a context manager, whose value is the function that takes an input."""

    open: Callable[[], contextlib.AbstractContextManager[Callable[[bytes], bool]]]
    seeds: Callable[[], Iterable[bytes]]
    mutator: Callable  # takes libFuzzer's own mutation, which changes bytes; returns another one
    share: float  # share of the inputs of a run
    max_bytes: int = 8192


# ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

ALL_FIELDS = {"prompt": "a red circle", "negative_prompt": "blue", "seed": 7, "priority": "low", "deadline_ms": 9000}
T2I = ALL_FIELDS | {
    "width": 64,
    "height": 48,
    "inference_steps": 3,
    "guidance_scale": 2.5,
    "scheduler": "ddim",
    "n": 2,
    "model": "tiny",
    "format": "webp",
    "stream": False,
    "partial_images": 0,
    "metadata": True,
}
OPENAI = ALL_FIELDS | {
    "model": "tiny",
    "n": 1,
    "size": "64x48",
    "output_format": "jpeg",
    "output_compression": 80,
    "response_format": "b64_json",
    "stream": False,
    "partial_images": 0,
    "quality": "high",
    "style": "vivid",
    "background": "opaque",
    "moderation": "low",
    "user": "someone",
    "safety_identifier": "x",
    "inference_steps": 3,
    "guidance_scale": 2,
    "scheduler": "euler",
    "metadata": False,
}
TXT2IMG = ALL_FIELDS | {
    "steps": 3,
    "cfg_scale": 7,
    "width": 64,
    "height": 48,
    "batch_size": 1,
    "n_iter": 2,
    "sampler_name": "Euler",
    "scheduler": "Automatic",
    "override_settings": {"samples_format": "png", "sd_model_checkpoint": "tiny", "enable_pnginfo": True},
    "send_images": True,
    "alwayson_scripts": {"x": {"args": []}},
    "styles": [],
    "eta": 0,
    "metadata": True,
}
EMBEDDINGS = {
    "input": ["a red circle", "b"],
    "model": "fake-encoder",
    "dimensions": 2,
    "encoding_format": "float",
    "user": "u",
    "normalize": False,
    "truncate": True,
    "prompt_name": None,
    "priority": "low",
    "deadline_ms": 9000,
}
INFER = {
    "id": "1",
    "inputs": [{"name": "TEXT", "shape": [2, 1], "datatype": "BYTES", "data": [["a"], ["b"]]}],
    "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}],
    "parameters": {"priority": 1, "timeout": 9_000_000, "binary_data_output": False},
}
TOKENS = [
    {"name": name, "shape": [1, 2], "datatype": "INT64", "data": [1, 1]} for name in ("input_ids", "attention_mask")
]
JOB = {"input": T2I | {"endpoint": "/t2i"}, "webhook": None, "webhook_events_filter": ["start", "completed"]}
BODIES = (
    ("POST /t2i", T2I),
    ("POST /t2i", {"prompt": "p", "stream": True, "partial_images": 2, "n": 2}),
    ("POST /v1/images/generations", OPENAI),
    ("POST /v1/images/generations", {"prompt": "p", "stream": True, "partial_images": 1}),
    ("POST /v1/embeddings", EMBEDDINGS),
    ("POST /v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64"}),
    ("POST /embed", {"inputs": ["a", "b"], "normalize": False, "truncate": True, "dimensions": 2}),
    ("POST /similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": True}}),
    ("POST /tokenize", {"inputs": ["a"], "add_special_tokens": False}),
    ("POST /", {"inputs": "a", "model": "fake-encoder"}),
    ("POST /v2/models/fake-encoder/infer", INFER),
    ("POST /v2/models/fake-encoder/versions/1/infer", {"inputs": TOKENS}),
    ("POST /v2/repository/index", {"ready": True}),
    ("POST /v1/endpoints/lengths", {"inputs": ["a", "b c"], "dimensions": 2}),
    ("POST /v1/jobs", JOB),
    ("POST /v1/jobs", {"input": {"prompt": "p", "endpoint": "/v1/images/generations", "size": "64x48"}}),
    ("POST /sdapi/v1/txt2img", TXT2IMG),
    (
        "POST /sdapi/v1/options",
        {"samples_format": "webp", "sd_model_checkpoint": "tiny", "CLIP_stop_at_last_layers": 1},
    ),
    ("POST /sdapi/v1/interrupt", {}),
    ("POST /sdapi/v1/skip", {}),
)
FIELDS = (
    "X-Request-Id: a-1",
    "X-Priority: high",
    "X-Deadline-Ms: 9000",
    "Accept: text/event-stream",
    "Authorization: Basic bm9yaWE6a2V5",
    "X-Forwarded-For: 192.0.2.1",
    "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "Idempotency-Key: one",
    "Last-Event-ID: 1",
    "X-Noria-Version: control",
)
PATHS = (
    "/",
    "/live",
    "/text",
    "/models",
    "/deployments",
    "/lineage",
    "/drift",
    "/v1/statistics",
    "/v1/registry/versions?limit=2&before=9",
    "/v1/registry/served",
    "/v1/registry/events?run=01a2028d-9625-77a9-a141-efbbcc3a6ef9&limit=2&before=9",
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/docs/errors.md",
    "/pages/shared/noria.svg",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/live?thumbnails=false",
    "/info",
    "/health",
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"),
    *(
        f"/v2/models/fake-encoder{version}{suffix}"
        for version in ("", "/versions/1")
        for suffix in ("", "/ready", "/config", "/stats")
    ),
    "/v1/jobs?limit=3&cursor=ff",
    *(f"/sdapi/v1/{name}" for name in ("options", "sd-models", "samplers", "schedulers", "progress")),
    *(
        f"/sdapi/v1/{name}"
        for name in ("upscalers", "latent-upscale-modes", "sd-vae", "loras", "embeddings", "scripts")
    ),
    *(f"/controlnet/{name}" for name in ("version", "settings", "model_list", "module_list", "control_types")),
)


def request_seeds():
    """Every route with all fields of its body, in the form of `framed`."""
    for number, (route, body) in enumerate(BODIES):
        head = f"{route}\nContent-Type: application/json\n{FIELDS[number % len(FIELDS)]}\n\n"
        yield head.encode() + json.dumps(body).encode()
    for number, path in enumerate(PATHS):
        yield f"GET {path}\n{FIELDS[number % len(FIELDS)]}\n\n".encode()
    yield b"POST /v1/jobs/texts?dimensions=3&webhook_events_filter=start\nContent-Type: text/plain\n\na b\r\nc"
    lines = b'"a"\n{"text": "b", "id": 1}\n"c"'
    yield b"POST /v1/jobs/texts?model=fake-encoder\nContent-Type: application/jsonl\n\n" + lines
    yield b"POST /v1/images/metadata\nContent-Type: image/png\n\n" + next(image_seeds())
    file, mask = base64.b64encode(next(image_seeds())).decode(), base64.b64encode(_image_file("RGBA")).decode()
    control = {"name": "edges", "image": file, "scale": 0.8, "start": 0.1, "end": 0.5}
    edit = {"prompt": "p", "image": f"data:image/png;base64,{file}", "mask": mask, "strength": 0.5}
    yield b"POST /t2i\nContent-Type: application/json\n\n" + json.dumps(edit | {"controls": [control] * 2}).encode()
    yield b"POST /v1/jobs\nContent-Type: application/json\n\n" + json.dumps({"input": edit}).encode()
    steered = {"prompt": "p", "size": "64x48", "controls": [control]}
    for endpoint in ("/t2i", "/v1/images/generations"):
        job = {"input": {"prompt": "p", "endpoint": endpoint, "controls": [control]}}
        yield b"POST /v1/jobs\nContent-Type: application/json\n\n" + json.dumps(job).encode()
    yield b"POST /v1/images/generations\nContent-Type: application/json\n\n" + json.dumps(steered).encode()
    unit = dict(zip(("model", "weight", "guidance_start", "guidance_end"), ("edges [0a]", 0.8, 0, 1), strict=True))
    units = [unit | {"image": {"image": file, "mask": None}}, unit | {"input_image": file, "module": "none"}]
    txt2img = {"prompt": "p", "width": 64, "height": 64, "alwayson_scripts": {"ControlNet": {"args": units}}}
    yield b"POST /sdapi/v1/txt2img\nContent-Type: application/json\n\n" + json.dumps(txt2img).encode()
    hires = {"prompt": "p", "enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "Latent", "denoising_strength": 0.7}
    yield b"POST /sdapi/v1/txt2img\nContent-Type: application/json\n\n" + json.dumps(hires).encode()
    yield (
        b"POST /sdapi/v1/img2img\nContent-Type: application/json\n\n"
        + json.dumps(txt2img | {"init_images": [file]}).encode()
    )
    yield b"POST /t2i\nContent-Type: application/json\n\n" + json.dumps(edit).encode()
    edit = {"init_images": [file], "mask": mask, "denoising_strength": 0.5, "inpainting_mask_invert": 1}
    for more in (
        {"resize_mode": 2, "inpaint_full_res": False, "inpainting_fill": 2},
        {"mask_blur_x": 9, "mask_blur": None},
    ):
        yield b"POST /sdapi/v1/img2img\nContent-Type: application/json\n\n" + json.dumps(edit | more).encode()
    enlarged = {"upscaler_1": "Lanczos", "upscaling_resize": 2, "gfpgan_visibility": 0}
    for path, images in (("single-image", {"image": file}), ("batch-images", {"imageList": [{"data": file}]})):
        head = f"POST /sdapi/v1/extra-{path}\nContent-Type: application/json\n\n"
        yield head.encode() + json.dumps(enlarged | images).encode()
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    files = b'--b\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n%s\r\n'
    form = part % (b"prompt", b"p") + files % (b"image[]", next(image_seeds())) + files % (b"mask", _image_file("RGBA"))
    controls = part % (b"controls", b'[{"name": "edges", "scale": 0.8}]') + files % (b"control", next(image_seeds()))
    head = b"\nContent-Type: multipart/form-data; boundary=b\n\n"
    for path in (b"/v1/images/edits", b"/t2i"):
        yield b"POST " + path + head + form + controls + part % (b"strength", b"0.5") + b"--b--"
    form = part % (b"prompt", b"p") + controls + part % (b"n", b"1") + part % (b"loras", b"[]")
    yield b"POST /v1/images/generations" + head + form + b"--b--"


def http_seeds():
    """Connections with one request each."""
    yield from map(framed, request_seeds())


@contextlib.contextmanager
def open_http():
    with InProcessServer() as server:
        yield lambda data: max(server.serve(data), default=400) < 400


@contextlib.contextmanager
def open_requests():
    with InProcessServer() as server:
        yield lambda data: max(server.serve(framed(data)), default=400) < 400


# ── Jobs' cursors and Last-Event-ID ───────────────────────────────────────────────────────────────────────────────────


def job_seeds():
    """Cursor, limit, Last-Event-ID, job and image, each in a line."""
    yield b"ff\n3\n1\nA\n0"
    yield b"1\n100\n0\nA\n00"


@contextlib.contextmanager
def open_jobs():
    with InProcessServer() as server:
        for _ in range(5):
            server.serve(framed(b'POST /v1/jobs\nContent-Type: application/json\n\n{"input": {"prompt": "p"}}'))
        known = json.loads(server.bodies[0])["id"]

        def read(data):
            cursor, limit, last_event_id, job, image, *_ = [*data.split(b"\n"), b"", b"", b"", b"", b""]
            job, image = (urllib.parse.quote(known if each == b"A" else each, "").encode() for each in (job, image))
            query = urllib.parse.urlencode({"cursor": cursor, "limit": limit}).encode()
            field = last_event_id.replace(b"\r", b"")
            statuses = []
            for request in (
                b"GET /v1/jobs?%s\n\n" % query,
                b"GET /v1/jobs/%s/events\nLast-Event-ID: %s\n\n" % (job, field),
                b"GET /v1/jobs/%s/images/%s\n\n" % (job, image),
            ):
                statuses += server.serve(framed(request))
            return 200 in statuses

        yield read


# ── Messages of gRPC ──────────────────────────────────────────────────────────────────────────────────────────────────


def grpc_seeds():
    """ModelInfer's requests: texts and tokens, as contents and in binary form, with all parameters."""
    texts = {"name": "TEXT", "datatype": "BYTES", "shape": [2, 1]}
    parameters = {
        "priority": {"int64_param": 1},
        "timeout": {"uint64_param": 9_000_000},
        "normalize": {"bool_param": False},
    }
    outputs = [{"name": "embedding"}]
    yield _infer(inputs=[texts | {"contents": {"bytes_contents": [b"a", b"b"]}}], parameters=parameters)
    yield _infer(inputs=[texts], outputs=outputs, raw_input_contents=[b"\1\0\0\0a\1\0\0\0b"])
    tokens = [{"name": name, "datatype": "INT32", "shape": [1, 2]} for name in ("input_ids", "attention_mask")]
    yield _infer(inputs=[each | {"contents": {"int_contents": [1, 1]}} for each in tokens])
    wide = [each | {"datatype": "INT64"} for each in tokens]
    yield _infer(inputs=wide, raw_input_contents=[np.ones(2, "<i8").tobytes()] * 2)


def _infer(**settings):
    request = grpc_message("ModelInferRequest")(model_name=FAKE_ENCODER.name, id="1", **settings)
    return request.SerializeToString(deterministic=True)


@contextlib.contextmanager
def open_grpc():
    config, output = FrontendConfig(), OutputTensor("embedding", np.zeros((2, 4), np.float32))

    def read(data):
        try:
            request = grpc_message("ModelInferRequest").FromString(data)
            as_settings(as_request(request), FAKE_ENCODER, config)
        except DecodeError:
            return False
        except InvalidField as error:
            error.message.encode()
            return False
        as_response(request, FAKE_ENCODER.name, [output]).SerializeToString()
        return True

    yield read


# ── Image files ───────────────────────────────────────────────────────────────────────────────────────────────────────

METADATA = GenerationMetadata(
    "a red circle", "blurry, dark", 7, 64, 48, 20, 7.5, "dpm++2m-karras", "tiny", "0123456789ab", "0.1.0"
)


def image_seeds():
    """Files of the three formats, of Noria and of A1111."""
    for file_format in ("png", "webp", "jpeg"):
        for metadata in (METADATA, msgspec.structs.replace(METADATA, noria=None, prompt="ü" * 40)):
            file = io.BytesIO()
            Image.new("RGB", (1, 1)).save(file, file_format, **save_options(metadata, file_format))
            yield file.getvalue()
    text = to_infotext(METADATA) + ', Hires: "a, \\"b\\"", Lora hashes: x'
    comment = b"UNICODE\0" + text.encode("utf-16-le")
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = comment
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "jpeg", exif=exif.tobytes())
    yield file.getvalue()


@contextlib.contextmanager
def open_images():
    config = FrontendConfig()

    def read(data):
        try:
            metadata = read_metadata(io.BytesIO(data), "the file")
        except ImageFileError as error:
            error.message.encode()  # it is sent
            return False
        msgspec.json.encode((usable_settings(metadata, FAKE_MODEL, config, AdapterFolders()), metadata))
        return True

    yield read


# ── Start images ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _image_file(mode, file_format="png", **options):
    file = io.BytesIO()
    Image.new(mode, (1, 1)).save(file, file_format, **options)
    return file.getvalue()


def start_image_seeds():
    """Files of the three formats, in many modes; of some EXIF says that they are turned."""
    yield from image_seeds()
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        yield _image_file(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    yield _image_file("RGB", "jpeg", exif=exif, progressive=True)
    yield _image_file("CMYK", "jpeg")
    yield _image_file("RGBA", "webp", exif=exif, lossless=True)


EDITOR = msgspec.structs.replace(FAKE_MODEL, max_references=1, reference_size="preferred", multiple_px=1)
"""A model whose references may be as small as the seeds are."""


@contextlib.contextmanager
def open_start_images():
    def read(data):
        try:
            files = ImageFiles(data, data, controls=(data,), references=(data,) * (len(data) % 2))
            images = RequestImages(files)
            pixels = images.pixels(3, 2, EDITOR)
            with contextlib.suppress(InvalidField):  # the mask covers nothing
                RequestImages(ImageFiles(data, data, mask_use=MaskUse((1, 2), 1, "surroundings"))).pixels(3, 2, EDITOR)
        except (UnreadableImage, InvalidField) as error:
            error.message.encode()  # it is sent
            return False
        shown = [place_reference("", (each.width_px, each.height_px), EDITOR) for each in images.facts.references]
        assert len(pixels) == 3 * 2 * (4 + 3) + sum(3 * math.prod(each.shown_px) for each in shown)
        return True

    yield read


# ── Model folders ─────────────────────────────────────────────────────────────────────────────────────────────────────

TENSORS = {
    "text_encoder/model.safetensors": ("text_model.embeddings.token_embedding.weight", "vocab_size", "hidden_size"),
    "unet/diffusion_pytorch_model.safetensors": ("conv_in.weight", None, "in_channels"),
    "vae/diffusion_pytorch_model-00001-of-00001.safetensors": ("decoder.layers.0.weight", None, "latent_channels"),
}
SHARD_OF_TENSOR = {"decoder.layers.0.weight": "diffusion_pytorch_model-00001-of-00001.safetensors"}


@contextlib.contextmanager
def _model_folder():
    """The bundled model with one tensor in each part."""
    with tempfile.TemporaryDirectory(prefix="noria-fuzz-") as name:
        folder = pathlib.Path(name) / "model"
        shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        for file, (tensor, *keys) in TENSORS.items():
            config = json.loads((folder / file).with_name("config.json").read_text())
            shape = [1 if key is None else config[key] for key in keys]
            (folder / file).write_bytes(save({tensor: np.zeros(shape, np.int8)}))
        index = folder / "vae/diffusion_pytorch_model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": SHARD_OF_TENSOR}))
        yield folder


def model_folder_seeds():
    """The path of a file in the folder, a line feed, and what is in it."""
    with _model_folder() as folder:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".json", ".safetensors") and file.stat().st_size < 40_000:
                yield f"{file.relative_to(folder)}\n".encode() + file.read_bytes()
    yield b'noria.json\n{"name": "a/b", "default_scheduler": "ddim", "default_steps": 3, "default_guidance": 2.5}'


EMBEDDER = {
    "config.json": {"model_type": "bert", "vocab_size": 6, "hidden_size": 4, "type_vocab_size": 2, "pad_token_id": 0},
    "tokenizer.json": {"model": {"vocab": {"[PAD]": 0, "a": 1}}, "normalizer": {"type": "Lowercase"}},
    "tokenizer_config.json": {"model_max_length": 30},
    "sentence_bert_config.json": {"max_seq_length": 20, "do_lower_case": True},
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    "modules.json": [
        {"type": "sentence_transformers.models.Transformer"},
        {"type": "sentence_transformers.models.Pooling", "path": "pool"},
        {"type": "sentence_transformers.models.Normalize"},
    ],
    "pool/config.json": {"word_embedding_dimension": 4, "pooling_mode_mean_tokens": True, "include_prompt": True},
}
CLASSIFIER = {
    "config.json": EMBEDDER["config.json"]
    | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}},
    "tokenizer.json": {"model": {"vocab": [["a", -1.0]]}, "added_tokens": [{"id": 1, "content": "b"}]},
    "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
}
ENCODERS = {"embedder": EMBEDDER, "classifier": CLASSIFIER}


@contextlib.contextmanager
def _encoder_folders():
    """Two text encoders with one tensor each."""
    with tempfile.TemporaryDirectory(prefix="noria-fuzz-") as name:
        folder = pathlib.Path(name)
        for model, files in ENCODERS.items():
            for file, tree in files.items():
                (folder / model / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / model / file).write_text(json.dumps(tree))
            tensors = {"embeddings.word_embeddings.weight": np.zeros((6, 4), np.int8)}
            (folder / model / "model.safetensors").write_bytes(save(tensors))
        yield folder


def encoder_folder_seeds():
    """Yield seeds as for model folders, with the name of an encoder before the path."""
    with _encoder_folders() as folder:
        for file in sorted(folder.rglob("*.*")):
            yield f"{file.relative_to(folder)}\n".encode() + file.read_bytes()
    yield b'embedder/noria.json\n{"name": "a/b"}'
    yield b'embedder/pool/config.json\n{"embedding_dimension": 4, "pooling_mode": ["cls", "max"]}'
    activation = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}
    yield b"classifier/config.json\n" + json.dumps(CLASSIFIER["config.json"] | activation).encode()


@contextlib.contextmanager
def _open_folders(new_folder, seeds, model_of=lambda _path: ""):
    """`model_of` is the folder of the model to which a path belongs."""
    known = {seed.partition(b"\n")[0].decode() for seed in seeds()}
    with new_folder() as folder:
        kept = {name: (folder / name).read_bytes() for name in known if (folder / name).exists()}

        def inspect(data):
            name, _, content = data.partition(b"\n")
            name = name.decode(errors="replace")
            if name not in known:
                return False
            (folder / name).write_bytes(content)
            try:
                msgspec.msgpack.encode(open_model(str(folder / model_of(name))))
                return True
            except ModelError as error:
                error.message.encode()
                return False
            finally:
                if name in kept:
                    (folder / name).write_bytes(kept[name])
                else:
                    (folder / name).unlink()

        yield inspect


# ── Messages between processes ────────────────────────────────────────────────────────────────────────────────────────

MESSAGES = (
    messages.Hello("front end"),
    make_image_request("a", "tiny", deadline_s=3.0, client="alice"),
    messages.Cancel("a"),
    messages.Ping(),
    messages.LoadAck(),
    messages.ViewRequest(None, with_thumbnails=True),
    messages.EngineState("1", "ready", (FAKE_MODEL,), "cpu", "crashed", ("a",)),
    FAKE_LOAD,
    messages.Pong("1", 0.5, 60.0),
    messages.Progress("a", None, 1, 3, 0.0, 0.5),
    messages.Preview("a", 0, 1, 4, 3),
    messages.ImageDone("a", 0, 7, 64, 48),
    messages.Finished("a", messages.Timings(0.1), 3, 2.0),
    messages.Failed("a", "queue_full", "full", retry_after_s=1.0),
    make_text_request("a", [1, 5, 2], [1, 2], type_ids=bytes(5), dimensions=4, normalize=False),
    messages.EngineState("1", "ready", (FAKE_ENCODER,), "cpu"),
    messages.Finished("a", TextTimings(0.1, 0.2), 1, 2.0, 0.3, TextResult(2, 4)),
)


def message_seeds():
    """A byte, E for an engine and C for a client, and a frame; in lower case, the lengths and contents of several."""
    for message in MESSAGES:
        side = b"C" if isinstance(message, messages.FromEngine) else b"E"
        content = messages.serialize(message)
        yield side + content
        lengths, contents, _ = pack([(content, b"data"), (content, b"")])
        yield side.lower() + lengths + contents


class _ClientSocket:
    """Receives frames once."""

    def __init__(self, frames):
        self._frames = [_Frame(frame, frame is not frames[-1]) for frame in frames]

    def get(self, option):
        assert option == zmq.EVENTS
        return zmq.POLLIN if self._frames else 0

    def recv(self, flags, copy):
        return self._frames.pop(0)


@dataclasses.dataclass
class _Frame:
    buffer: bytes
    more: bool


@contextlib.contextmanager
def open_messages():
    client = EngineConnection.__new__(EngineConnection)
    logger = logging.getLogger("noria.protocol.transport")
    logger.disabled = True  # it has a line for each invalid message

    def receive(data):
        frames = [data[1:], b"data"] if data[:1] in (b"E", b"C") else [data[1:17], data[17:], b"data"]
        if data[:1] in (b"E", b"e"):
            received = []
            pass_on([b"client", *frames], lambda _client, message, _data: received.append(message))
        else:
            received, client._socket, client._is_read = [], _ClientSocket(frames), True
            client._on_event = lambda event: received.append(event[0])
            client._read_messages()
        for message in received:
            messages.serialize(message)
        return bool(received)

    yield receive
    logger.disabled = False


# ── LoRA files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def lora_seeds():
    """Small files with diffusers' and with kohya's names, and of LyCORIS' kinds."""
    down, up = np.ones((1, 2), np.float32), np.ones((2, 1), np.float32)
    described = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 2, "unet.alpha_pattern": {"to_q": 4}})}
    yield save({"unet.to_q.lora_A.weight": down, "unet.to_q.lora_B.weight": up}, described)
    names = [f"lora_unet_{module}.{end}" for module in ("proj_in",) for end in ("lora_down.weight", "lora_up.weight")]
    kohya = dict(zip(names, (down, up), strict=True)) | {"lora_unet_proj_in.alpha": np.ones((), np.float32)}
    yield save(kohya | {"lora_unet_proj_in.dora_scale": up, "lora_unet_norm.w_norm": up[:, 0]})
    square = np.ones((2, 2), np.float32)
    yield save({f"lora_unet_proj_in.hada_w{n}_{name}": square for n in (1, 2) for name in "ab"})
    factors = {"lokr_w1": np.ones((1, 1), np.float32), "lokr_w2_a": up, "lokr_w2_b": down, "diff_b": up[:, 0]}
    yield save({f"lycoris_to_q.{name}": each for name, each in factors.items()})
    window = np.ones((1, 1, 3, 3), np.float32)
    outer = {"conv.lora_down.weight": down[..., None, None], "conv.lora_up.weight": up[..., None, None]}
    yield save(outer | {"conv.lora_mid.weight": window})
    matrices = {"lora_A.default.weight": down, "lora_B.default.weight": up, "lora_magnitude_vector": up[:, 0]}
    yield save({f"base_model.model.to_q.{name}": each for name, each in matrices.items()})


@contextlib.contextmanager
def open_loras():
    """Read files for a model of two linear layers, a convolution and a norm."""
    import torch

    from noria.models.diffusion.loras.lora_file import read_lora

    layers = {"to_q": torch.nn.Linear(2, 2), "proj_in": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)}
    layers["conv"] = torch.nn.Conv2d(2, 2, 3)
    unet = torch.nn.ModuleDict(layers)
    with tempfile.TemporaryDirectory(prefix="noria-fuzz-") as name:
        file = pathlib.Path(name) / "a.safetensors"

        def read(data):
            file.write_bytes(data)
            try:
                found = read_lora(file, {"unet": unet}, torch.float32, 2**20)
            except ModelError as error:
                error.message.encode()  # it is sent
                return False
            assert all(
                each.isfinite().all() for layer in found.layers["unet"].values() for each in layer.tensors.values()
            )
            return True

        yield read


def gguf_seeds():
    """Small files, one with an array in its fields."""
    yield gguf_files.gguf_bytes({"a.weight": ((4, 32), "Q8_0"), "a.bias": ((4,), "F32")})
    array = gguf_files.field("general.tags", 9, struct.pack("<IQ", 8, 2) + gguf_files.string("a") * 2)
    yield gguf_files.gguf_bytes({"a.weight": ((4, 32), "BF16")}, (array,))


@contextlib.contextmanager
def open_ggufs():
    """Read headers."""
    from noria.models.files.gguf_file import read_gguf_header

    with tempfile.TemporaryDirectory(prefix="noria-fuzz-") as name:
        file = pathlib.Path(name) / "a.gguf"

        def read(data):
            file.write_bytes(data)
            try:
                header = read_gguf_header(file)
            except ModelError as error:
                error.message.encode()
                return False
            assert sum(tensor.stored_bytes for tensor in header.tensors.values()) <= len(data)
            return True

        yield read


def checkpoint_seeds():
    """Headers of checkpoints, whose tensors have few numbers."""
    unet = "model.diffusion_model."
    tensors = {
        f"{unet}input_blocks.0.0.weight": np.ones((1, 4, 1, 1), np.float16),
        f"{unet}input_blocks.1.0.in_layers.0.weight": np.ones(1, np.float16),
        f"{unet}input_blocks.1.1.transformer_blocks.0.norm1.weight": np.ones(1, np.float16),
        f"{unet}output_blocks.11.1.transformer_blocks.0.norm1.bias": np.ones(1, np.float16),
        "cond_stage_model.model.transformer.resblocks.0.ln_1.weight": np.ones(1, np.float16),
        "first_stage_model.decoder.conv_in.weight": np.ones((1, 4, 1, 1), np.float16),
        "v_pred": np.ones(0, np.float32),
    }
    yield save(tensors, {"modelspec.prediction_type": "v", "modelspec.resolution": "64x64"})
    yield save({"lora_unet_a.lora_down.weight": np.ones((1, 1), np.float32)})
    names = ("double_blocks.0.img_mod.lin", "vector_in.in_layer", "single_blocks.0.linear1", "final_layer.linear")
    yield save({f"{unet}{name}.weight": np.ones((7, 1), np.float16) for name in names})


@contextlib.contextmanager
def open_checkpoints():
    """Read headers, and plan what becomes of them."""
    from noria.models.diffusion.single_file.checkpoint import Checkpoint
    from noria.models.diffusion.single_file.checkpoint_header import read_checkpoint_header
    from noria.models.diffusion.single_file.folder_plan import FolderPlan
    from noria.models.diffusion.single_file.transformer_configs import transformer_settings
    from noria.models.diffusion.single_file.transformer_file import read_single_file
    from noria.models.diffusion.single_file.transformer_names import find_transformer_tensors

    with tempfile.TemporaryDirectory(prefix="noria-fuzz-") as name:
        file = pathlib.Path(name) / "a.safetensors"

        def read(data):
            file.write_bytes(data)
            try:
                header = read_checkpoint_header(file)
            except ModelError as error:
                error.message.encode()
                return False
            assert sum(tensor.num_bytes for tensor in header.tensors.values()) < len(data)
            with contextlib.suppress(ModelError):
                source = read_single_file(file)
                if isinstance(source, Checkpoint):
                    FolderPlan(source, None)
                else:
                    origins = find_transformer_tensors(source.kind, source.shapes)
                    transformer_settings(source.kind.family, source.shapes, origins)
            return True

        yield read


TARGETS = {
    "http": Target(open_http, http_seeds, lambda mutate: None, 0.05),
    "requests": Target(open_requests, request_seeds, lambda mutate: mutation.json_after(b"\n\n", mutate), 0.06),
    "jobs": Target(open_jobs, job_seeds, lambda mutate: None, 0.02, max_bytes=300),
    "grpc": Target(open_grpc, grpc_seeds, lambda mutate: None, 0.1, max_bytes=2000),
    "images": Target(open_images, image_seeds, mutation.png_checksums, 0.2),
    "start_images": Target(open_start_images, start_image_seeds, mutation.png_checksums, 0.1),
    "model_folders": Target(
        functools.partial(_open_folders, _model_folder, model_folder_seeds),
        model_folder_seeds,
        lambda mutate: mutation.json_after(b"\n", mutate),
        0.1,
        max_bytes=40_000,
    ),
    "encoder_folders": Target(
        functools.partial(_open_folders, _encoder_folders, encoder_folder_seeds, lambda path: path.partition("/")[0]),
        encoder_folder_seeds,
        lambda mutate: mutation.json_after(b"\n", mutate),
        0.05,
    ),
    "loras": Target(open_loras, lora_seeds, lambda mutate: None, 0.02, max_bytes=2000),
    "checkpoints": Target(open_checkpoints, checkpoint_seeds, lambda mutate: None, 0.02, max_bytes=2000),
    "ggufs": Target(open_ggufs, gguf_seeds, lambda mutate: None, 0.02, max_bytes=2000),
    "messages": Target(open_messages, message_seeds, mutation.message_pack, 0.32, max_bytes=2000),
}
