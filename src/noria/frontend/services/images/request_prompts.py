"""Checks the prompts of a request, and by what they are read."""

from noria.config import FrontendConfig
from noria.errors import InvalidField, short_repr
from noria.images.a1111_metadata import split_networks
from noria.models.diffusion.prompts.a1111_schedule import PromptSteps, read_schedules
from noria.models.diffusion.prompts.a1111_syntax import parse
from noria.protocol.diffusion import DiffusionModelSpec, PromptSyntax


def check_prompt(
    field: str, got: str, syntax: PromptSyntax | None, steps: PromptSteps, config: FrontendConfig
) -> tuple[str, ...]:
    """Return the texts of a prompt at all steps. Raises InvalidField: it is too long, or not in its syntax."""
    if len(got) > config.max_prompt_chars:
        raise InvalidField(
            f"{field} has {len(got)} characters; at most {config.max_prompt_chars} are allowed.", field=field
        )
    if syntax == "a1111":
        networks = split_networks(got)[1] if field == "prompt" else []
        if networks:
            raise InvalidField(
                f"{field} has {short_repr(networks[0].tag)}, which is not read here: name LoRAs in loras.", field=field
            )
        schedules = read_schedules(got, steps, field, is_joined=field == "prompt")
        texts = tuple(dict.fromkeys(text for each in schedules for text in each.by_step))
        for text in texts:
            parse(text, field)
        return texts
    return (got,)


def check_syntax(got: PromptSyntax | None, spec: DiffusionModelSpec) -> PromptSyntax | None:
    """Return the syntax of a request's prompts; None: it is plain, which is the model's default."""
    syntax = got or spec.default_prompt_syntax
    if syntax not in spec.prompt_syntaxes:
        raise InvalidField(
            f"prompt_syntax is {short_repr(syntax)}, but {spec.name} reads prompts as they are: weights of words have "
            f"a meaning in Stable Diffusion 1, 2 and XL, not in its family, {spec.family}. Leave it out.",
            field="prompt_syntax",
        )
    return None if syntax == spec.default_prompt_syntax == "plain" else syntax


def check_clip_skip(got: int | None, spec: DiffusionModelSpec) -> int | None:
    """Return the layer that is read; None: the family's, which is the model's default."""
    if got is not None and not spec.max_clip_skip:
        raise InvalidField(
            f"clip_skip is {short_repr(got)}, but {spec.name} has no choice of layers: only Stable Diffusion 1, 2 and "
            f"XL have one, not its family, {spec.family}. Leave it out.",
            field="clip_skip",
        )
    clip_skip = spec.default_clip_skip if got is None else got
    if clip_skip == spec.family_clip_skip == spec.default_clip_skip:
        return None
    if not 1 <= clip_skip <= spec.max_clip_skip:
        raise InvalidField(
            f"clip_skip is {short_repr(got)}; allowed are 1 (the last layer) to {spec.max_clip_skip}. {spec.name} "
            f"reads {spec.default_clip_skip} by default.",
            field="clip_skip",
        )
    return clip_skip
