"""The span attributes of an image request, named as in OpenTelemetry's semantic conventions for generative models.

https://opentelemetry.io/docs/specs/semconv/gen-ai/. Attributes that the conventions do not have begin with `noria.`.
Prompts and negative prompts, which may be secrets, are not among them.
"""

from opentelemetry.util.types import AttributeValue

from noria.protocol.request import ImageRequest


def request_attributes(request: ImageRequest) -> dict[str, AttributeValue]:
    """Return what the request asks for."""
    payload = request.payload
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.output.type": "image",
        "gen_ai.provider.name": "noria",
        "gen_ai.request.model": request.model,
        "gen_ai.request.seed": payload.seed,
        "noria.scheduler": payload.scheduler,
        "noria.inference_steps": payload.inference_steps,
        "noria.guidance_scale": payload.guidance_scale,
        "noria.calls": payload.calls,
        "noria.width": payload.width,
        "noria.height": payload.height,
        "noria.images": payload.n,
        "noria.priority": request.priority,
    }
    if payload.n > 1:
        attributes["gen_ai.request.choice.count"] = payload.n
    if request.deadline_s is not None:
        attributes["noria.deadline_s"] = request.deadline_s
    return attributes
