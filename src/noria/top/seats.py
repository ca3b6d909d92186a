"""The slots of a wheel as rows: as much of each as there is room for, down to one character a slot. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from noria.top.board import WheelBoard
from noria.top.words import Piece, bar, level, line, number, seconds, squeezed
from noria.views import LeftView, SeatView

_BAR = 10  # cells, wherever something else has to yield
_WIDEST_BAR = 24
_NARROWEST_BAR = 3
_LEFT_SHOWN_S = 3.0
_GAP = 2  # between columns of slots


@dataclass(frozen=True)
class _Field:
    """Something that is told of an image; `heading` is as wide as the field, and its side."""

    name: str
    heading: str


# In the order in which they are told, and, by number, in which they find room.
_FIELDS = (
    (1, _Field("step", "   step")),
    (2, _Field("end", "done in")),
    (5, _Field("deadline", "deadline")),
    (3, _Field("model", "model")),
    (4, _Field("size", "     size")),
    (6, _Field("scheduler", "scheduler     ")),
    (8, _Field("steps", "steps")),
    (9, _Field("guidance", "guidance")),
    (10, _Field("priority", "priority")),
    (7, _Field("request", "request   ")),
)
_WIDEST_REQUEST = 40
_WIDEST_MODEL = 14


def seat_rows(wheel: WheelBoard, now: float, width: int, most: int | None, models: Sequence[str] = ()) -> list[Text]:
    """Every slot of the wheel in at most `most` lines (None: as many as it takes), in more columns where it needs them.

    Each says its model where there are several `models`.
    """
    offered = _offered(models)
    num_slots = wheel.view.num_slots
    if most is not None and most < 1:
        return []
    digits = len(str(num_slots - 1))
    if most is None or num_slots + 1 <= most:
        fields = _fitting(offered, width - digits)
        return [_heading(fields, width, digits), *_rows(wheel, now, fields, width, digits)]
    num_columns = -(-num_slots // most)
    each = (width + _GAP) // num_columns - _GAP
    gap = _GAP
    if each < digits + 1 + _BAR:  # no room to be generous
        gap, each = 1, (width + 1) // num_columns - 1
    if each < digits + 1 + _NARROWEST_BAR:
        return _map(wheel, width, most)
    rows = _rows(wheel, now, _fitting(offered, each - digits), each, digits)
    per_column = -(-num_slots // num_columns)
    return [
        _beside([rows[place] for place in range(top, num_slots, per_column)], gap, width) for top in range(per_column)
    ]


def _offered(models: Sequence[str]) -> list[tuple[int, _Field]]:
    """`_FIELDS`, with a model's as wide as the longest name there is, and without it where all slots have the same."""
    wide = min(_WIDEST_MODEL, max(len("model"), *map(len, models))) if len(models) > 1 else 0
    sized = [
        (rank, _Field("model", "model".ljust(wide)) if field.name == "model" else field) for rank, field in _FIELDS
    ]
    return [(rank, field) for rank, field in sized if wide or field.name != "model"]


def _fitting(offered: Sequence[tuple[int, _Field]], width: int) -> list[_Field]:
    """Those of the `offered` fields that find room beside a bar."""
    left, chosen = width - 1 - _BAR, set[str]()
    for _, field in sorted(offered, key=lambda pair: pair[0]):
        if left < len(field.heading) + 1:
            break
        left -= len(field.heading) + 1
        chosen.add(field.name)
    return [field for _, field in offered if field.name in chosen]


def _widths(fields: Sequence[_Field], width: int, digits: int) -> tuple[int, int]:
    """Of the bar, and of the request's id, which share what the others leave."""
    left = width - digits - 1 - sum(len(field.heading) + 1 for field in fields)
    if not fields:
        return left, 0
    extra = max(0, left - _BAR)
    if fields[-1].name != "request":
        return _BAR + extra if left >= _BAR else left, 0
    request = min(_WIDEST_REQUEST, len(fields[-1].heading) + extra // 2)
    return min(_WIDEST_BAR, _BAR + extra - (request - len(fields[-1].heading))), request


def _heading(fields: Sequence[_Field], width: int, digits: int) -> Text:
    bar_width, _ = _widths(fields, width, digits)
    words = " ".join(["#".rjust(digits), "progress".ljust(bar_width), *(field.heading for field in fields)])
    return line([(words, "dim")], width)


def _rows(wheel: WheelBoard, now: float, fields: Sequence[_Field], width: int, digits: int) -> list[Text]:
    seated = {seat.slot: seat for seat in wheel.view.seats}
    server_s = wheel.server_s(now)
    bar_width, request_width = _widths(fields, width, digits)
    rows = []
    for slot in range(wheel.view.num_slots):
        place: Piece = (f"{slot:>{digits}} ", "dim")
        if slot in seated:
            pieces = [place, *_seat(seated[slot], server_s, fields, bar_width, request_width)]
        else:
            pieces = [place, _empty(wheel.left.get(slot), now, bar_width)]
        rows.append(line(pieces, width))
    return rows


def _seat(seat: SeatView, server_s: float, fields: Sequence[_Field], bar_width: int, request_width: int) -> list[Piece]:
    pieces: list[Piece] = [(bar(_share(seat), bar_width), _style(seat))]
    for field in fields:
        said, style = _told(field.name, seat, server_s)
        if field.name == "request":
            said = said if len(said) <= request_width else said[: request_width - 1] + "…"
        elif field.name == "model":
            said = squeezed(said, len(field.heading)).ljust(len(field.heading))
        elif field.name == "scheduler":
            said = said[: len(field.heading)].ljust(len(field.heading))
        else:
            said = said.rjust(len(field.heading))
        pieces.append((f" {said}", style))
    return pieces


def _told(name: str, seat: SeatView, server_s: float) -> Piece:
    """What a field says of an image."""
    match name:
        case "step":
            return f"{seat.call}/{seat.num_calls}", ""
        case "end" if seat.paused:
            return "paused", "yellow"
        case "end":
            return seconds(None if seat.finish_at is None else max(0.0, seat.finish_at - server_s)), ""
        case "deadline":
            if seat.due_at is None:
                return "–", "dim"
            left_s = seat.due_at - server_s
            return ("late", "red") if left_s < 0 else (seconds(left_s), "red" if _will_be_late(seat) else "")
        case "model":
            return seat.model, ""
        case "size":
            return f"{seat.width_px}×{seat.height_px}", ""
        case "scheduler":
            return seat.scheduler, "green"
        case "steps":
            return str(seat.num_steps), ""
        case "guidance":
            return number(seat.guidance_scale), ""
        case "priority":
            return seat.priority, "dim" if seat.priority == "normal" else "bold"
        case _:
            return seat.request_id if seat.index == 0 else f"{seat.request_id}[{seat.index}]", "dim"


def _empty(left: tuple[LeftView, float] | None, now: float, width: int) -> Piece:
    """Nobody; for a moment, how it ended for who was there."""
    if left is not None and now - left[1] <= _LEFT_SHOWN_S:
        return left[0].outcome[:width], "green" if left[0].outcome == "ok" else "red"
    return "·" * width, "dim"


def _map(wheel: WheelBoard, width: int, most: int) -> list[Text]:
    """One character a slot: how far its image is."""
    seated = {seat.slot: seat for seat in wheel.view.seats}
    rows = []
    for first in range(0, wheel.view.num_slots, width):
        slots = range(first, min(first + width, wheel.view.num_slots))
        cells = [
            (level(max(_share(seated[slot]), 0.01)), _style(seated[slot])) if slot in seated else ("·", "dim")
            for slot in slots
        ]
        rows.append(line(cells, width))
    if len(rows) > most:
        rows[most - 1 :] = [line([(f"… and {wheel.view.num_slots - (most - 1) * width} more slots", "dim")], width)]
    return rows


def _beside(cells: Sequence[Text], gap: int, width: int) -> Text:
    row = Text(no_wrap=True)
    for place, cell in enumerate(cells):
        row.append_text(Text(" " * gap if place else ""))
        row.append_text(cell)
    row.truncate(width, pad=True)
    return row


def _share(seat: SeatView) -> float:
    return seat.call / seat.num_calls if seat.num_calls else 0.0


def _will_be_late(seat: SeatView) -> bool:
    return seat.due_at is not None and seat.finish_at is not None and seat.finish_at > seat.due_at


def _style(seat: SeatView) -> str:
    colour = "red" if _will_be_late(seat) else "magenta" if seat.priority == "high" else "cyan"
    return f"dim {colour}" if seat.paused else colour
