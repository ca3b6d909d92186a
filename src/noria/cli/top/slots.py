"""Renders the slots of an engine as rows, with as many fields as there is room for, down to one character a slot.

Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from noria.cli.top.server_state import EngineHistory
from noria.cli.top.shares import client_name, has_several_clients
from noria.cli.top.text import StyledText, bar, elide_middle, format_number, format_seconds, level, line
from noria.protocol.kinds import SettingsView
from noria.protocol.live_views import DepartureView, SlotView
from noria.protocol.messages import EngineView
from noria.protocol.text import TextSettingsView

_BAR_WIDTH = 10  # cells, as long as fields can be dropped
_MAX_BAR_WIDTH = 24
_MIN_BAR_WIDTH = 3
_DEPARTURE_VISIBLE_S = 3.0
_GAP = 2  # between columns of slots
_ALL_SHOWN = 64


class _Field(NamedTuple):
    """A column; `rank` is that in which it gets room, `heading` has the width of the column and its alignment."""

    rank: int
    name: str
    heading: str


# In display order.
_FIELDS = (
    _Field(1, "step", "   step"),
    _Field(2, "end", "done in"),
    _Field(5, "deadline", "deadline"),
    _Field(3, "model", "model"),
    _Field(4, "size", "     size"),
    _Field(6, "scheduler", "scheduler     "),
    _Field(9, "steps", "steps"),
    _Field(10, "guidance", "guidance"),
    _Field(11, "priority", "priority"),
    _Field(7, "client", "client        "),
    _Field(8, "request", "request   "),
)
_MAX_REQUEST_WIDTH = 40
_MAX_MODEL_WIDTH = 14


def shown_slots(view: EngineView) -> int:
    """Return how many slots are shown: of hundreds, the power of two that holds those in use, and at least 64."""
    used = max((each.slot + 1 for each in view.slots), default=1)
    return min(view.num_slots, max(_ALL_SHOWN, 1 << (used - 1).bit_length()))


def slot_rows(
    history: EngineHistory, now: float, width: int, max_lines: int | None, models: Sequence[str] = ()
) -> list[Text]:
    """Every slot in at most `max_lines` lines (None: no limit), side by side if needed.

    The field of the model appears if there are several `models`, that of the client if there are several clients.
    """
    available = _available_fields(models, has_several_clients(history.view))
    num_slots = shown_slots(history.view)
    if max_lines is not None and max_lines < 1:
        return []
    digits = len(str(num_slots - 1))
    if max_lines is None or num_slots + 1 <= max_lines:
        fields = _fit_fields(available, width - digits)
        return [_heading(fields, width, digits), *_rows(history, now, fields, width, digits)]
    num_columns = -(-num_slots // max_lines)
    column_width = (width + _GAP) // num_columns - _GAP
    gap = _GAP
    if column_width < digits + 1 + _BAR_WIDTH:
        gap, column_width = 1, (width + 1) // num_columns - 1
    if column_width < digits + 1 + _MIN_BAR_WIDTH:
        return _slot_map(history, width, max_lines)
    rows = _rows(history, now, _fit_fields(available, column_width - digits), column_width, digits)
    per_column = -(-num_slots // num_columns)
    return [
        _join_columns([rows[slot] for slot in range(top, num_slots, per_column)], gap, width)
        for top in range(per_column)
    ]


def _available_fields(models: Sequence[str], with_client: bool) -> list[_Field]:
    """`_FIELDS`, with the model's as wide as the longest name, or without it if there is only one model."""
    hidden = (set() if len(models) > 1 else {"model"}) | (set() if with_client else {"client"})
    model_width = min(_MAX_MODEL_WIDTH, max(len("model"), *map(len, models))) if len(models) > 1 else 0
    return [
        field._replace(heading="model".ljust(model_width)) if field.name == "model" else field
        for field in _FIELDS
        if field.name not in hidden
    ]


def _fit_fields(available: Sequence[_Field], width: int) -> list[_Field]:
    """The `available` fields that fit beside a bar."""
    remaining, chosen = width - 1 - _BAR_WIDTH, set[_Field]()
    for field in sorted(available):
        if remaining < len(field.heading) + 1:
            break
        remaining -= len(field.heading) + 1
        chosen.add(field)
    return [field for field in available if field in chosen]


def _widths(fields: Sequence[_Field], width: int, digits: int) -> tuple[int, int]:
    """The widths of the bar and of the request id, which share the room that the other fields leave."""
    remaining = width - digits - 1 - sum(len(field.heading) + 1 for field in fields)
    if not fields:
        return remaining, 0
    extra = max(0, remaining - _BAR_WIDTH)
    if fields[-1].name != "request":
        return _BAR_WIDTH + extra if remaining >= _BAR_WIDTH else remaining, 0
    request = min(_MAX_REQUEST_WIDTH, len(fields[-1].heading) + extra // 2)
    return min(_MAX_BAR_WIDTH, _BAR_WIDTH + extra - (request - len(fields[-1].heading))), request


def _heading(fields: Sequence[_Field], width: int, digits: int) -> Text:
    bar_width, _ = _widths(fields, width, digits)
    text = " ".join(["#".rjust(digits), "progress".ljust(bar_width), *(field.heading for field in fields)])
    return line([(text, "dim")], width)


def _rows(history: EngineHistory, now: float, fields: Sequence[_Field], width: int, digits: int) -> list[Text]:
    image_by_slot = {image.slot: image for image in history.view.slots}
    server_time_s = history.server_time_s(now)
    bar_width, request_width = _widths(fields, width, digits)
    rows = []
    for slot in range(shown_slots(history.view)):
        label: StyledText = (f"{slot:>{digits}} ", "dim")
        if slot in image_by_slot:
            pieces = [label, *_slot_pieces(image_by_slot[slot], server_time_s, fields, bar_width, request_width)]
        else:
            pieces = [label, _free_slot(history.last_departures.get(slot), now, bar_width)]
        rows.append(line(pieces, width))
    return rows


def _slot_pieces(
    image: SlotView, server_time_s: float, fields: Sequence[_Field], bar_width: int, request_width: int
) -> list[StyledText]:
    pieces: list[StyledText] = [(bar(_progress(image), bar_width), _bar_style(image))]
    for field in fields:
        text, style = _field_text(field.name, image, server_time_s)
        if field.name == "request":
            text = text if len(text) <= request_width else text[: request_width - 1] + "…"
        elif field.name in ("model", "client"):
            text = elide_middle(text, len(field.heading)).ljust(len(field.heading))
        elif field.name == "scheduler":
            text = text[: len(field.heading)].ljust(len(field.heading))
        else:
            text = text.rjust(len(field.heading))
        pieces.append((f" {text}", style))
    return pieces


def _field_text(name: str, image: SlotView, server_time_s: float) -> StyledText:
    match name:
        case "step":
            return f"{image.call}/{image.num_calls}", ""
        case "end" if image.paused:
            return "paused", "yellow"
        case "end":
            return format_seconds(None if image.finish_at is None else max(0.0, image.finish_at - server_time_s)), ""
        case "deadline":
            if image.deadline_at is None:
                return "–", "dim"
            remaining_s = image.deadline_at - server_time_s
            return (
                ("late", "red")
                if remaining_s < 0
                else (format_seconds(remaining_s), "red" if _will_be_late(image) else "")
            )
        case "model":
            return image.model, ""
        case "client":
            return client_name(image), "magenta"
        case "size" | "scheduler" | "steps" | "guidance":
            return _setting_text(name, image.settings)
        case "priority":
            return image.priority, "dim" if image.priority == "normal" else "bold"
        case _:
            return image.request_id if image.index == 0 else f"{image.request_id}[{image.index}]", "dim"


def _setting_text(name: str, settings: SettingsView) -> StyledText:
    if isinstance(settings, TextSettingsView):
        return f"{settings.num_tokens} tok" if name == "size" else "", ""
    match name:
        case "size":
            return f"{settings.width}×{settings.height}", ""
        case "scheduler":
            return settings.scheduler, "green"
        case "steps":
            return str(settings.inference_steps), ""
        case _:
            return format_number(settings.guidance_scale), ""


def _free_slot(departure: tuple[DepartureView, float] | None, now: float, width: int) -> StyledText:
    """A free slot; for a few seconds, the outcome of the image that left it."""
    if departure is not None and now - departure[1] <= _DEPARTURE_VISIBLE_S:
        return departure[0].outcome[:width], "green" if departure[0].outcome == "ok" else "red"
    return "·" * width, "dim"


def _slot_map(history: EngineHistory, width: int, max_lines: int) -> list[Text]:
    """Lines with a character for each slot: the progress of its image."""
    image_by_slot = {image.slot: image for image in history.view.slots}
    rows = []
    for first in range(0, shown_slots(history.view), width):
        slots = range(first, min(first + width, shown_slots(history.view)))
        cells = [
            (level(max(_progress(image_by_slot[slot]), 0.01)), _bar_style(image_by_slot[slot]))
            if slot in image_by_slot
            else ("·", "dim")
            for slot in slots
        ]
        rows.append(line(cells, width))
    if len(rows) > max_lines:
        rows[max_lines - 1 :] = [
            line([(f"… and {shown_slots(history.view) - (max_lines - 1) * width} more slots", "dim")], width)
        ]
    return rows


def _join_columns(cells: Sequence[Text], gap: int, width: int) -> Text:
    row = Text(no_wrap=True)
    for index, cell in enumerate(cells):
        row.append_text(Text(" " * gap if index else ""))
        row.append_text(cell)
    row.truncate(width, pad=True)
    return row


def _progress(image: SlotView) -> float:
    return image.call / image.num_calls if image.num_calls else 0.0


def _will_be_late(image: SlotView) -> bool:
    return image.deadline_at is not None and image.finish_at is not None and image.finish_at > image.deadline_at


def _bar_style(image: SlotView) -> str:
    colour = "red" if _will_be_late(image) else "magenta" if image.priority == "high" else "cyan"
    return f"dim {colour}" if image.paused else colour
