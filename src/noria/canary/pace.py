"""How far a canary is from its judge's verdict, in words: the responses that it has and needs, and how long that takes.

Knows no clock: times are those of the canary's events.
"""

from noria.canary.judge import JudgeSettings, JudgeState, num_to_pass

_MIN_RESPONSES_FOR_A_RATE = 3


def describe_needs(settings: JudgeSettings, share: float) -> str:
    """Say how many requests a judge needs; `share` is the canary's part of them, above 0 to 1."""
    enough, for_pass = settings.min_responses, num_to_pass(settings)
    return (
        f"its judge needs {enough} responses of the canary to roll it back, about {enough / share:.0f} requests, and "
        f"{for_pass} or more to pass it, about {for_pass / share:.0f}"
    )


def describe_pace(evidence: JudgeState, settings: JudgeSettings, share: float, elapsed_s: float) -> str:
    """Say what the canary had in `elapsed_s`, and how long the rest takes at this rate; empty if none is missing."""
    seen, needed = evidence.num_seen, num_to_pass(settings)
    if seen >= needed:
        return ""
    had = f"{seen} responses of the canary in {format_long(elapsed_s)}"
    if seen < _MIN_RESPONSES_FOR_A_RATE or elapsed_s <= 0:
        return f"{had}; {describe_needs(settings, share)}"
    left_s = (needed - seen) * elapsed_s / seen
    return f"{had}; {describe_needs(settings, share)}: at this rate {format_long(left_s)} more"


def format_long(seconds: float) -> str:
    """Return a duration in its largest unit: `40 s`, `12 min`, `3 h`, `5 days`."""
    for unit, size_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"
