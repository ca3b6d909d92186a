"""The log line of an image request: one line per request, written when the request has ended, with any outcome.

The middleware (HTTP) or the worker (jobs) makes a `RequestLogRecord`, and the services fill it in. The middleware
writes the line; that of a job is written by the process that ends the job (`jobs/completion.py`).
"""

import hashlib
import logging
from collections.abc import Mapping
from typing import Literal

from noria.observe.logs.setup import log_fields
from noria.protocol.request import ImageRequest

log = logging.getLogger("noria.requests")

LogPrompts = Literal["off", "hash", "full"]

REQUEST_FIELDS: Mapping[str, str] = {
    "event": "`request`",
    "request_id": "X-Request-Id of the response; of a job, its id",
    "job_id": "of a job",
    "attempt": "of a job: how many times processing began; 0 if it never did",
    "job_status": "of a job: `succeeded`, `failed` or `canceled`, as the API has it",
    "waited_s": "of a job: from its acceptance until processing last began, or until its end if it never did",
    "method": "HTTP method",
    "path": "HTTP path as it was sent, without the query",
    "status": "HTTP status; 499 if the client had disconnected",
    "seconds": "from the request's head to the end of the response; of a job, from its acceptance to its end",
    "key": "name of the API key",
    "client": "address of the client; behind a trusted proxy, the one in its X-Forwarded-For",
    "outcome": "`ok`, or a code of errors.md",
    "error": "the error message",
    "endpoint": "name of the endpoint, if it is one with code of the operator's",
    "model": "name of the model",
    "model_version": "fingerprint of the model",
    "deployment": "number of the deployment that answered, if the model was deployed",
    "version": "its version in the registry, as `MODEL@NUMBER`",
    "n": "number of images requested",
    "width": "of each image, in pixels",
    "height": "of each image, in pixels",
    "scheduler": "short name of the scheduler",
    "inference_steps": "steps requested",
    "guidance_scale": "guidance scale",
    "prompt_syntax": "how prompts are read, unless as plain text",
    "clip_skip": "which layer of the text encoder is read, unless that of the model's family",
    "calls": "share of the model's calls that are made; absent if all are",
    "controls": "names and scales of ControlNets, as `edges:0.8`; absent without any",
    "ip_adapter": "name and scale of an IP-Adapter, as `ip-adapter_sd15:0.6`; absent without one",
    "reference_images": "number of reference images; absent without any",
    "loras": "names and weights of LoRAs, as `ink:0.8, detail:1`; absent without any",
    "refiner": "name and start of the refiner, as `refiner:0.8`; absent without one",
    "second_pass": "size and strength of a second pass, as `1024x1024:0.7`; absent without one",
    "upscaling": "size and upscaler of an image that is only enlarged, as `2048x2048:4x-UltraSharp`; absent if none is",
    "seed": "seed of the first image",
    "priority": "priority, if it is not normal",
    "deadline_s": "the client's deadline, from the arrival",
    "queue_s": "from the arrival at the engine until the image had its slot",
    "image_encode_s": "time to encode start images",
    "text_encode_s": "time to encode the prompt",
    "denoise_s": "time of the steps, and of the waiting between them",
    "decode_s": "latents to pixels",
    "postprocess_s": "pixels to files; of texts: numbers to the response",
    "total_s": "queue to files; of texts: until their numbers are there; until the failure if it failed",
    "predicted_s": "the engine's prediction, at acceptance, of the time from queue to decode",
    "mean_batch": "mean number of images in the steps of this one, itself included",
    "num_refused": "images that the safety classifier has refused; absent without any",
    "steps_run": "model calls of the image: some schedulers make more than the steps requested",
    "task": "of texts: `embedding`, `sparse_embedding`, `token_embedding`, `classification`, `token_classification` or "
    "`reranking`",
    "num_texts": "of texts: how many; a pair counts as one",
    "num_tokens": "of texts: tokens of all of them, special tokens included",
    "num_truncated": "of texts: how many were cut to the model's maximum length, if any",
    "tokenize_s": "of texts: until their tokens were known",
    "infer_s": "of texts: the batch of the one that finished last",
    "prompt": "with `log_prompts = full`",
    "negative_prompt": "with `log_prompts = full`, if there is one",
    "prompt_sha256": "with `log_prompts = hash`",
    "negative_prompt_sha256": "with `log_prompts = hash`, if there is one",
}
"""Every field of the line and its meaning; `docs/logs.md` lists them."""


class RequestLogRecord(dict[str, object]):
    """The fields of a request's log line, as far as they are known.

    It is empty if the request is none for a model, or never reached a service.
    """

    add = dict.update  # sets fields, replacing earlier values

    def write(self, **values: object) -> None:
        """Set `values` and write the log line."""
        named = self | values
        assert named.keys() <= REQUEST_FIELDS.keys(), named.keys() - REQUEST_FIELDS.keys()
        seconds = named.get("total_s", named.get("seconds"))
        took = f" after {seconds:.3f} s" if isinstance(seconds, float) else ""
        log_fields(log, logging.INFO, f"request {named.get('outcome')}{took}", named, event="request")


def request_fields(request: ImageRequest, model_version: str, prompts: LogPrompts) -> dict[str, object]:
    """Return the fields that describe the request; `model_version` is the fingerprint of its model."""
    payload = request.payload
    return {
        "model": request.model,
        "model_version": model_version,
        "n": payload.n,
        "width": payload.width,
        "height": payload.height,
        "scheduler": payload.scheduler,
        "inference_steps": payload.inference_steps,
        "guidance_scale": payload.guidance_scale,
        "calls": None if payload.calls == 1 else payload.calls,
        "prompt_syntax": payload.prompt_syntax,
        "clip_skip": payload.clip_skip,
        "loras": ", ".join(f"{lora.name}:{lora.weight:g}" for lora in payload.loras) or None,
        "controls": ", ".join(f"{each.name}:{each.scale:g}" for each in payload.controls) or None,
        "ip_adapter": None if (adapter := payload.ip_adapter) is None else f"{adapter.name}:{adapter.scale:g}",
        "reference_images": len(payload.reference_images) or None,
        "refiner": None if payload.refiner is None else f"{payload.refiner.name}:{payload.refiner.start:g}",
        "second_pass": None
        if (second := payload.second_pass) is None
        else f"{second.width}x{second.height}:{second.strength:g}",
        "upscaling": None
        if (upscaling := payload.upscaling) is None
        else f"{upscaling.width}x{upscaling.height}:{upscaling.upscaler.name}",
        "seed": payload.seed,
        "priority": request.priority if request.priority != "normal" else None,
        "deadline_s": request.deadline_s,
        **prompt_fields("prompt", payload.prompt, prompts),
        **prompt_fields("negative_prompt", payload.negative_prompt, prompts),
    }


def prompt_fields(name: str, text: str | None, prompts: LogPrompts) -> dict[str, object]:
    """Return the field of a prompt that `prompts` allows, if any."""
    match prompts:
        case "full" if text:
            return {name: text}
        case "hash" if text:
            return {f"{name}_sha256": hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()}
    return {}
