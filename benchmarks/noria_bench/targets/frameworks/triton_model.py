"""The model of the Triton target: diffusers' pipeline, for Triton's Python backend.

The backend hands over a list of requests and stacks nothing, so the model groups those of equal settings and generates
each group in one call of the pipeline. A request's body travels in its parameters, and the device is the pipeline's
choice: Triton's own arrays are wrong with numpy 2, and strings among its inputs end the process.

The files of a batch are compressed in threads of this process before it is answered: Triton has no other place for it.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pydantic
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from noria_bench.targets.pipeline_generator import PipelineGenerator, T2IBody, TargetJob, generate_mixed, image_response


class TritonPythonModel:
    """A body in the parameter `body` to the file `IMAGE` and the size of its call, `BATCH`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the pipeline and warm it up."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._job = msgspec.json.decode(parameters["job"]["string_value"], type=TargetJob)
        self._generator = PipelineGenerator(self._job)
        self._compressors = ThreadPoolExecutor(self._job.settings.max_images, thread_name_prefix="compress")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Generate the images of all requests, a call for each group of equal settings."""
        responses: list[Any] = [None] * len(requests)
        bodies: dict[int, T2IBody] = {}
        for index, request in enumerate(requests):
            try:
                bodies[index] = T2IBody.model_validate_json(json.loads(request.parameters())["body"])
            except (LookupError, pydantic.ValidationError) as error:
                responses[index] = pb_utils.InferenceResponse(
                    error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                )
        generated = generate_mixed(self._generator, self._job.spec, list(bodies.values()))
        files = self._compressors.map(lambda each: image_response(*each).content, generated)
        for index, (_, batch_size), content in zip(bodies, generated, files, strict=True):
            file = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            tensors = {"IMAGE": file[None], "BATCH": torch.tensor([[batch_size]], dtype=torch.int32)}
            responses[index] = pb_utils.InferenceResponse(
                [pb_utils.Tensor.from_dlpack(name, to_dlpack(tensor)) for name, tensor in tensors.items()]
            )
        return responses

    def finalize(self) -> None:
        """End the threads."""
        self._compressors.shutdown()
        self._generator.close()
