"""The prompts of a request at each call: A1111's syntax changes them between steps, and joins several."""

from collections.abc import Sequence
from dataclasses import dataclass

from noria.models.diffusion.prompts.a1111_schedule import PromptSteps, read_schedules
from noria.models.diffusion.prompts.clip_prompt import PromptText, TextEmbedding, prompt_of
from noria.protocol.diffusion import DiffusionPayload
from noria.sampling.skipped_calls import evenly_spread


@dataclass(frozen=True, slots=True)
class ScheduledPrompt:
    """A prompt by call, and its weight beside those that it is joined with."""

    by_call: tuple[PromptText, ...]  # only one: that of all calls
    weight: float = 1.0

    def at(self, call: int) -> PromptText:
        """Return the text of a call."""
        return self.by_call[call if len(self.by_call) > 1 else 0]


def prompt_steps(payload: DiffusionPayload) -> PromptSteps:
    """Return the steps by which the prompts of a request change."""
    second = payload.second_pass
    return PromptSteps(payload.inference_steps, 0 if second is None else second.num_made(payload.scheduler))


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
    steps = prompt_steps(payload)
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
