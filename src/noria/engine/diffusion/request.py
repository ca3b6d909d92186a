"""Facts that follow from the settings of an image request alone, without a model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from noria.models.diffusion.prompts.a1111_schedule import PromptSteps, read_schedules, split_joined
from noria.models.diffusion.prompts.clip_prompt import PromptText, TextEmbedding, prompt_of
from noria.protocol.diffusion import DiffusionPayload, ImageSettingsView
from noria.protocol.messages import Timings
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import ImageRequest
from noria.sampling.skipped_calls import evenly_spread
from noria.scheduling.types import BatchKey, Phase, RequestTimings, SchedulableRequest

_STAGES: Mapping[Phase, str] = {
    "encodes": "image_encode",
    "joins": "text_encode",
    "steps": "denoise",
    "decodes": "decode",
}


@dataclass(frozen=True)
class BaseImageRequest:
    """The facts that the engine's threads ask of every prepared image request."""

    request: ImageRequest
    guided: bool  # whether each call has a second row, for the negative prompt

    stages = _STAGES

    @property
    def batch_key(self) -> BatchKey:
        """The batch key of all its images."""
        request = self.request
        model = ModelKey(request.model, request.model_version)
        payload = request.payload
        return BatchKey(payload.width, payload.height, model, reference_px=payload.num_reference_pixels)

    @property
    def call_size(self) -> tuple[int, int] | None:
        """The key that images of other sizes in its calls have, too; None: each size has calls of its own."""
        return None

    @property
    def second_stage_from(self) -> int | None:
        """The first call of the model's refiner, or of a second pass; None: there is neither."""
        return None

    @property
    def between(self) -> tuple[tuple[BatchKey, int], ...]:
        """The batch keys and numbers of the calls before a second pass that enlarge pixels."""
        return ()

    @property
    def longest_iteration_s(self) -> float:
        """0: the warm-up has measured its calls."""
        return 0.0

    @property
    def num_calls(self) -> int:
        """Model calls for each image: its steps, without those that a start image leaves out."""
        return self.request.payload.num_steps

    @property
    def num_prompts(self) -> int:
        """Prompts that each call has a row for, without the negative one: more than one if `AND` joins them."""
        payload = self.request.payload
        return len(split_joined(payload.prompt)) if payload.prompt_syntax == "a1111" else 1

    @property
    def num_rows(self) -> int:
        """Rows of each image in a model call, as its cost counts them: two with guidance, more if prompts are joined.

        A ControlNet is the first half of a UNet, so that one for two rows counts as one row more.
        """
        rows = self.num_prompts + self.guided
        return rows + -(-rows * len(self.request.payload.controls) // 2)

    @property
    def settings_view(self) -> ImageSettingsView:
        """The settings that live views show."""
        return self.request.payload.settings_view

    @property
    def span_attributes(self) -> Mapping[str, str | int | float]:
        """The settings that the trace span of its model calls has."""
        payload = self.request.payload
        return {"noria.inference_steps": payload.inference_steps, "noria.scheduler": payload.scheduler}

    def schedulable(self, expires_at: float | None, deadline: float | None) -> SchedulableRequest:
        """The part of it that the scheduler of images uses."""
        request, payload = self.request, self.request.payload
        return SchedulableRequest(
            request.attempt_id,
            self.batch_key,
            payload.n,
            self.num_calls,
            expires_at,
            deadline,
            rows=self.num_rows,
            priority=request.priority,
            exclusive=request.exclusive,
            call_size=self.call_size,
            has_start_image=payload.strength is not None or bool(payload.reference_images or payload.ip_adapter),
            second_stage_from=self.second_stage_from,
            second_stage_px=None if payload.second_pass is None else payload.result_px,
            between=self.between,
            client=request.share_client,
            weight=request.share_weight,
        )

    def timings(self, measured: RequestTimings) -> Timings:
        """Its stages; waits for the device."""
        return Timings(
            measured.queue_s,
            measured.text_encode_s,
            measured.denoise_s,
            measured.decode_s,
            measured.image_encode_s,
        )

    def final_result(self) -> tuple[None, None]:
        """None: each image is sent alone."""
        return None, None


def reference_class_px(num_pixels: int) -> int:
    """Return the largest area of a class of areas, 8 for each doubling: costs are learned by class.

    The classes end 2 % above powers of two, so that one has all sizes in which FLUX.1 Kontext is shown an image.
    """
    return math.ceil(1.02 * 2 ** (math.ceil(8 * math.log2(num_pixels / 1.02)) / 8)) if num_pixels else 0


def preview_calls(num_calls: int, num_previews: int) -> frozenset[int]:
    """The calls after which an image gets a preview: evenly spread, without the last one, which the image follows."""
    calls = ((number * num_calls) // (num_previews + 1) for number in range(1, num_previews + 1))
    return frozenset(call for call in calls if call < num_calls - 1)


@dataclass(frozen=True, slots=True)
class ScheduledPrompt:
    """A prompt by call, and its weight beside those that it is joined with."""

    by_call: tuple[PromptText, ...]  # only one: that of all calls
    weight: float = 1.0

    def at(self, call: int) -> PromptText:
        """Return the text of a call."""
        return self.by_call[call if len(self.by_call) > 1 else 0]


def schedule_prompt(
    text: str | None,
    payload: DiffusionPayload,
    num_calls: tuple[int, int],
    embeddings: tuple[TextEmbedding, ...] = (),
    *,
    is_joined: bool = True,
    num_between: int = 0,
) -> tuple[ScheduledPrompt, ...]:
    """Return a prompt, or those that it joins; `num_calls` are those of both passes, and others are between them.

    With a start image, steps are counted from the first one that is made, as in A1111.

    Raises InvalidField: the prompt is not in its syntax.
    """
    if text is None or payload.prompt_syntax != "a1111":
        return (ScheduledPrompt((prompt_of(text, payload, embeddings),)),)
    second = payload.second_pass
    steps = PromptSteps(payload.inference_steps, 0 if second is None else second.num_made(payload.scheduler))
    num_made = steps.num_first - payload.first_step
    places = [step - 1 for step in steps_of_calls(num_calls[0], num_made)]
    places += places[-1:] * num_between
    places += [steps.num_first + step - 1 for step in steps_of_calls(num_calls[1], steps.num_second)]
    found = []
    for by_step, weight in read_schedules(text, steps, is_joined=is_joined):
        prompts = {each: prompt_of(each, payload, embeddings) for each in by_step}
        by_call = [prompts[by_step[place]] for place in places] if len(by_step) > 1 else prompts.values()
        found.append(ScheduledPrompt(tuple(by_call), weight))
    return tuple(found)


def steps_of_calls(num_calls: int, num_steps: int) -> Sequence[int]:
    """Return the step, from 1 on, of each call of a pass: some samplers make more calls, and some may be skipped."""
    if 1 < num_calls < num_steps:
        return [call + 1 for call in evenly_spread(num_steps, num_calls)]
    return [call * num_steps // num_calls + 1 for call in range(num_calls)]
