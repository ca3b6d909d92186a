"""One frame of `noria top`: what is known, as lines of a given size. Pure.

From the top: the server; for each engine its figures, its last turns and rates as small curves, its slots, its queue; and a last line
for whoever looks. Where there is little room, the curves go first, then what is told of each slot, then the queue but its first line.
"""

import itertools
from collections.abc import Sequence

from rich.text import Text

from noria.top.board import Board, WheelBoard
from noria.top.events import EngineSaid
from noria.top.seats import seat_rows
from noria.top.words import SEPARATOR, Piece, flow, line, number, seconds, sparkline
from noria.views import WaitingView

_STATES = {"ready": "green", "loading": "yellow", "unknown": "red"}
_MOST_WAITING = 12  # lines, even where there is room
_FEWEST_SEATS = 8  # lines, before curves get any
_LABEL = 9
_SCALE = 8


def frame(board: Board, url: str, note: Piece, width: int, height: int | None, now: float) -> list[Text]:
    """`height` lines of `width` cells, or as many as it takes; `note` is the last line."""
    top = _head(board, url, width)
    if height is None:
        sections = [_section(board, engine, width, None, now) for engine in board.engines]
        return [*top, *itertools.chain.from_iterable(sections), line([note], width)]
    rows = list(top)
    for place, engine in enumerate(board.engines):
        room = height - 1 - len(rows)
        following = board.engines[place + 1 :]
        if following and room < 2:
            rows.append(line([(f"… and {len(following) + 1} more engines", "dim")], width))
            break
        # Who has a wheel shares what is left when the others have their line.
        wheels_left = sum(each.name in board.wheels for each in following)
        titles_left = len(following) - wheels_left
        rows += _section(board, engine, width, max(1, (room - titles_left) // (wheels_left + 1)), now)
    del rows[height - 1 :]
    rows += [line([], width)] * (height - 1 - len(rows))
    return [*rows, line([note], width)]


def _head(board: Board, url: str, width: int) -> list[Text]:
    pieces: list[Piece] = [("noria", "bold")]
    if board.server is not None:
        pieces.append((f" {board.server.version}", "bold"))
    pieces += [SEPARATOR, (url, "")]
    rates = [wheel.view.rates for wheel in board.wheels.values()]
    if len(rates) > 1:
        images, steps = sum(each.images_per_s for each in rates), sum(each.steps_per_s for each in rates)
        pieces += [SEPARATOR, (f"{number(images)} images/s, {number(steps)} steps/s in all", "")]
    if board.server is not None and board.server.models:
        pieces += [SEPARATOR, (", ".join(board.server.models), "")]
    return [line(pieces, width)]


def _section(board: Board, engine: EngineSaid, width: int, height: int | None, now: float) -> list[Text]:
    """One engine, in at most `height` lines."""
    wheel = board.wheels.get(engine.name)
    title: list[Piece] = [(engine.name, "bold"), (f" {engine.state}", _STATES[engine.state])]
    if engine.device:
        title += [SEPARATOR, (engine.device, "")]
    if wheel is None:
        return [line(title, width)]
    view, models = wheel.view, _models(board)
    title += [SEPARATOR, (f"{len(view.seats)} of {view.num_slots} slots", "")]
    title += [SEPARATOR, (f"{view.num_waiting} waiting", "yellow" if view.num_waiting else "")]
    head = [line(title, width), *flow(_figures(wheel), width, 2)]
    if height is None:
        seats = seat_rows(wheel, now, width, None, models)
        return [*head, *_curves(wheel, width, 5), *seats, *_queue(wheel, now, width, None, models)]
    if height <= len(head):
        return head[: max(1, height)]
    room = height - len(head)
    num_waiting = min(len(view.waiting), 1)
    num_curves = _num_curves(room - num_waiting, view.num_slots + 1)
    room -= num_curves
    seats = seat_rows(wheel, now, width, room - num_waiting, models)
    return [*head, *_curves(wheel, width, num_curves), *seats, *_queue(wheel, now, width, room - len(seats), models)]


def _models(board: Board) -> tuple[str, ...]:
    """The names of the server's models."""
    return () if board.server is None else board.server.models


def _num_curves(room: int, wanted: int) -> int:
    """As many as leave every slot its own line; else a few, where that leaves enough."""
    for num_curves in (5, 2, 1):
        if room - num_curves >= wanted:
            return num_curves
    return 2 if room - 2 >= 2 * _FEWEST_SEATS else 1 if room - 1 >= _FEWEST_SEATS else 0


def _figures(wheel: WheelBoard) -> list[list[Piece]]:
    rates, view = wheel.view.rates, wheel.view
    told = {
        "images/s": number(rates.images_per_s),
        "steps/s": number(rates.steps_per_s),
        "p50": seconds(rates.p50_s),
        "p95": seconds(rates.p95_s),
        "p99": seconds(rates.p99_s),
        "batch": number(rates.mean_batch),
        "drain": "–" if view.drain_s <= 0 else seconds(view.drain_s),
        "busy": f"{rates.busy:.0%}",
        "occupancy": f"{rates.occupancy:.0%}",
    }
    return [[(f"{name} ", "dim"), (said, "bold")] for name, said in told.items()]


def _curves(wheel: WheelBoard, width: int, num: int) -> list[Text]:
    """The last turns, a column each: how many stepped, and how long each stage took; and the rate of images, a column a view."""
    turns, rates = list(wheel.turns), list(wheel.images_per_s)
    columns = width - _LABEL - _SCALE
    longest_s = max((turn.seconds for turn in turns[-columns:]), default=0.0)
    most_rate = max(rates[-columns:], default=0.0)
    stages = {
        "encode": ([turn.encode_s for turn in turns], "magenta"),
        "denoise": ([turn.seconds - turn.encode_s - turn.decode_s for turn in turns], "cyan"),
        "decode": ([turn.decode_s for turn in turns], "yellow"),
    }
    batch = _curve(
        "batch",
        [float(turn.num_stepped) for turn in turns],
        wheel.view.num_slots,
        f"of {wheel.view.num_slots}",
        "green",
        columns,
    )
    rate = _curve("images/s", rates, most_rate, number(most_rate), "blue", columns)
    each = [
        _curve(name, values, longest_s, seconds(longest_s or None), style, columns)
        for name, (values, style) in stages.items()
    ]
    chosen = {0: [], 1: [batch], 2: [batch, rate]}.get(num, [batch, *each, rate])
    return [line(pieces, width) for pieces in chosen]


def _curve(name: str, values: Sequence[float], most: float, scale: str, style: str, columns: int) -> list[Piece]:
    return [(name.ljust(_LABEL), "dim"), (sparkline(values, most, columns), style), (scale.rjust(_SCALE), "dim")]


def _queue(wheel: WheelBoard, now: float, width: int, most: int | None, models: Sequence[str]) -> list[Text]:
    """Who waits, in the order of boarding, and how many more there are."""
    view, server_s = wheel.view, wheel.server_s(now)
    most = _MOST_WAITING if most is None else min(most, _MOST_WAITING)
    if not view.waiting or most < 1:
        return []
    shown = view.waiting[:most]
    rows = [line(_waiting(request, server_s, tell_model=len(models) > 1), width) for request in shown]
    num_more = view.num_waiting - sum(request.num_images for request in shown)
    if num_more > 0 and most > 1:
        shown = view.waiting[: most - 1]
        num_more = view.num_waiting - sum(request.num_images for request in shown)
        rows[most - 1 :] = [line([(f"… and {num_more} images more", "dim")], width)]
    return rows


def _waiting(request: WaitingView, server_s: float, *, tell_model: bool) -> list[Piece]:
    num = f"{request.num_images} × " if request.num_images > 1 else ""
    starts = None if request.start_at is None else max(0.0, request.start_at - server_s)
    pieces: list[Piece] = [
        ("waits ", "yellow"),
        (f"{num}{request.width_px}×{request.height_px}", ""),
        (f" boards {_in(starts)}", ""),
    ]
    if request.due_at is not None:
        left_s = request.due_at - server_s
        pieces.append((" late" if left_s < 0 else f" due {_in(left_s)}", "red" if left_s < 0 else ""))
    pieces.append((f" {request.num_steps} steps {request.scheduler}", "green"))
    if tell_model:
        pieces.append((f" {request.model}", ""))
    if request.priority != "normal":
        pieces.append((f" {request.priority}", "bold"))
    return [*pieces, (f" {request.request_id}", "dim")]


def _in(wait_s: float | None) -> str:
    said = seconds(wait_s)
    return said if said in ("now", "–") else f"in {said}"
