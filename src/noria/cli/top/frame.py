"""Renders one frame of `noria top`: lines of a given size. Pure.

From top to bottom: the server; for each engine its statistics, the shares of its clients, sparklines of its last
iterations and rates, its slots, its queue; and a footer. If there is little room, the shares take one line and the
sparklines are dropped first, then fields of slots, then all but the first line of the queue, then the shares.
"""

import itertools
from collections.abc import Sequence

from rich.text import Text

from noria.cli.top.events import EngineInfo
from noria.cli.top.server_state import EngineHistory, ServerState
from noria.cli.top.shares import client_name, has_several_clients, share_lines
from noria.cli.top.slots import shown_slots, slot_rows
from noria.cli.top.text import SEPARATOR, StyledText, flow, format_number, format_seconds, line, sparkline
from noria.protocol.diffusion import ImageSettingsView
from noria.protocol.kinds import SettingsView
from noria.protocol.live_views import WaitingView
from noria.protocol.messages import EngineView
from noria.protocol.text import TextSettingsView

_STATES = {"ready": "green", "loading": "yellow", "draining": "yellow", "unknown": "red"}
_MAX_WAITING_LINES = 12  # lines, even where there is room
_MIN_SLOT_LINES = 8  # lines, before curves get any
_LABEL_WIDTH = 12
_SCALE_WIDTH = 8


def render_frame(
    state: ServerState, url: str, footer: StyledText, width: int, height: int | None, now: float
) -> list[Text]:
    """`height` lines of `width` cells; as many lines as needed if `height` is None. The last line is `footer`."""
    header = _header(state, url, width)
    if height is None:
        sections = [_engine_section(state, engine, width, None, now) for engine in state.engines]
        return [*header, *itertools.chain.from_iterable(sections), line([footer], width)]
    rows = list(header)
    for index, engine in enumerate(state.engines):
        num_free_lines = height - 1 - len(rows)
        following = state.engines[index + 1 :]
        if following and num_free_lines < 2:
            rows.append(line([(f"… and {len(following) + 1} more engines", "dim")], width))
            break
        # Engines without a view get one line each; the others share the rest.
        num_views_after = sum(each.name in state.histories for each in following)
        num_titles_after = len(following) - num_views_after
        rows += _engine_section(
            state, engine, width, max(1, (num_free_lines - num_titles_after) // (num_views_after + 1)), now
        )
    del rows[height - 1 :]
    rows += [line([], width)] * (height - 1 - len(rows))
    return [*rows, line([footer], width)]


def _header(state: ServerState, url: str, width: int) -> list[Text]:
    pieces: list[StyledText] = [("noria", "bold")]
    if state.server is not None:
        pieces.append((f" {state.server.version}", "bold"))
    pieces += [SEPARATOR, (url, "")]
    rates = [history.view.rates for history in state.histories.values()]
    if len(rates) > 1:
        images, steps = sum(each.images_per_s for each in rates), sum(each.steps_per_s for each in rates)
        pieces += [SEPARATOR, (f"{format_number(images)} images/s, {format_number(steps)} steps/s in all", "")]
    if state.server is not None and state.server.models:
        pieces += [SEPARATOR, (", ".join(state.server.models), "")]
    return [line(pieces, width)]


def _engine_section(state: ServerState, engine: EngineInfo, width: int, height: int | None, now: float) -> list[Text]:
    """The section of an engine, in at most `height` lines."""
    history = state.histories.get(engine.name)
    title: list[StyledText] = [(engine.name, "bold"), (f" {engine.state}", _STATES[engine.state])]
    if engine.device:
        title += [SEPARATOR, (engine.device, "")]
    if history is None:
        return [line(title, width)]
    view, models = history.view, () if state.server is None else state.server.models
    if engine.kind == "encoder":
        return _text_engine_section(history, title, width, height, now, models)
    title += [SEPARATOR, (f"{len(view.slots)} of {view.num_slots} slots", "")]
    title += [SEPARATOR, (f"{view.num_waiting} waiting", "yellow" if view.num_waiting else "")]
    header = [line(title, width), *flow(_stats(history), width, 2)]
    if height is None:
        slot_lines = slot_rows(history, now, width, None, models)
        return [
            *header,
            *share_lines(view, width, None),
            *_sparklines(history, width, _num_all_curves(history)),
            *slot_lines,
            *_queue_lines(history, now, width, None, models),
        ]
    if height <= len(header):
        return header[: max(1, height)]
    num_free_lines, num_waiting = height - len(header), min(len(view.waiting), 1)
    num_all_curves = _num_all_curves(history)
    num_spare_lines = num_free_lines - num_waiting - shown_slots(view) - 1 - num_all_curves
    shares = share_lines(view, width, max(num_spare_lines, int(num_free_lines > _MIN_SLOT_LINES)))
    num_free_lines -= len(shares)
    num_curves = _num_curves(num_free_lines - num_waiting, shown_slots(view) + 1, num_all_curves)
    num_free_lines -= num_curves
    slot_lines = slot_rows(history, now, width, num_free_lines - num_waiting, models)
    return [
        *header,
        *shares,
        *_sparklines(history, width, num_curves),
        *slot_lines,
        *_queue_lines(history, now, width, num_free_lines - len(slot_lines), models),
    ]


def _text_engine_section(
    history: EngineHistory, title: list[StyledText], width: int, height: int | None, now: float, models: Sequence[str]
) -> list[Text]:
    """An engine of text encoders: its statistics, the texts and the time of its last batches, and its queue."""
    view, batches = history.view, [each for each in history.iterations if each.batch is not None]
    title += [SEPARATOR, (f"{view.num_slots} session{'s' if view.num_slots > 1 else ''}", "")]
    title += [SEPARATOR, (f"{view.num_waiting} texts waiting", "yellow" if view.num_waiting else "")]
    tokens = sum(each.batch.num_tokens for each in batches if each.batch)
    padded = sum(each.batch.padded_tokens for each in batches if each.batch)
    renamed = {"images/s": "texts/s", "steps/s": "", "batch": "texts a batch", "occupancy": ""}
    stats = {renamed.get(name, name): value for name, value in _stat_values(history).items()}
    stats["padding"] = f"{1 - tokens / padded:.0%}" if padded else "–"
    stats.pop("", None)
    pieces: list[list[StyledText]] = [[(f"{name} ", "dim"), (value, "bold")] for name, value in stats.items()]
    columns = width - _LABEL_WIDTH - _SCALE_WIDTH
    curves = []
    for name, values, style, form in (
        ("texts", [float(each.num_stepped) for each in batches], "green", format_number),
        ("batch time", [each.duration_s for each in batches], "cyan", format_seconds),
    ):
        largest = max(values[-columns:], default=0.0)
        curves.append(line(_labelled_sparkline(name, values, largest, form(largest), style, columns), width))
    rows = [line(title, width), *flow(pieces, width, 2), *curves]
    rows += share_lines(view, width, None if height is None else height - len(rows) - min(len(view.waiting), 1))
    if height is None:
        return [*rows, *_queue_lines(history, now, width, None, models)]
    return [*rows, *_queue_lines(history, now, width, height - len(rows), models)][: max(1, height)]


def _num_all_curves(history: EngineHistory) -> int:
    return 6 if _has_start_images(history) else 5


def _has_start_images(history: EngineHistory) -> bool:
    return any(iteration.image_encode_s for iteration in history.iterations)


def _num_curves(num_free_lines: int, wanted: int, num_all: int) -> int:
    """The number of sparklines: as many as leave a line for every slot, else a few if enough lines remain."""
    for num_curves in (num_all, 2, 1):
        if num_free_lines - num_curves >= wanted:
            return num_curves
    return 2 if num_free_lines - 2 >= 2 * _MIN_SLOT_LINES else 1 if num_free_lines - 1 >= _MIN_SLOT_LINES else 0


def _stats(history: EngineHistory) -> list[list[StyledText]]:
    stats = _stat_values(history) | _mixed_calls(history)
    return [[(f"{name} ", "dim"), (value, "bold")] for name, value in stats.items()]


def _stat_values(history: EngineHistory) -> dict[str, str]:
    rates, view = history.view.rates, history.view
    return {
        "images/s": format_number(rates.images_per_s),
        "steps/s": format_number(rates.steps_per_s),
        "p50": format_seconds(rates.p50_s),
        "p95": format_seconds(rates.p95_s),
        "p99": format_seconds(rates.p99_s),
        "batch": format_number(rates.mean_batch),
        "backlog": "–" if view.backlog_s <= 0 else format_seconds(view.backlog_s),
        "busy": f"{rates.busy:.0%}",
        "occupancy": f"{rates.occupancy:.0%}",
    }


def _mixed_calls(history: EngineHistory) -> dict[str, str]:
    """The share of the last calls that had images of several sizes, and what part of these was padding, if any had."""
    calls = [iteration for iteration in history.iterations if iteration.num_stepped]
    sizes = [iteration.call_sizes for iteration in calls if len(iteration.call_sizes) > 1]
    if not sizes:
        return {}
    used = sum(each.width * each.height * each.num_rows for call in sizes for each in call)
    padded = sum(max(each.width * each.height for each in call) * sum(each.num_rows for each in call) for call in sizes)
    return {"mixed sizes": f"{len(sizes) / len(calls):.0%}", "of it padding": f"{1 - used / padded:.0%}"}


def _sparklines(history: EngineHistory, width: int, num_curves: int) -> list[Text]:
    """Sparklines: of the last iterations, one column each, the batch size and the time of each stage; and the images/s
    of each view.
    """
    iterations, rates = list(history.iterations), list(history.images_per_s)
    columns = width - _LABEL_WIDTH - _SCALE_WIDTH
    max_iteration_s = max((iteration.duration_s for iteration in iterations[-columns:]), default=0.0)
    max_rate = max(rates[-columns:], default=0.0)
    images, texts = [each.image_encode_s for each in iterations], [each.text_encode_s for each in iterations]
    decode = [each.decode_s for each in iterations]
    denoise = [each.duration_s - each.image_encode_s - each.text_encode_s - each.decode_s for each in iterations]
    stages = {"img encode": (images, "bright_magenta")} if _has_start_images(history) else {}
    stages |= {"text encode": (texts, "magenta"), "denoise": (denoise, "cyan"), "decode": (decode, "yellow")}
    batch = _labelled_sparkline(
        "batch",
        [float(iteration.num_stepped) for iteration in iterations],
        history.view.num_slots,
        f"of {history.view.num_slots}",
        "green",
        columns,
    )
    rate = _labelled_sparkline("images/s", rates, max_rate, format_number(max_rate), "blue", columns)
    stage_curves = [
        _labelled_sparkline(name, values, max_iteration_s, format_seconds(max_iteration_s or None), style, columns)
        for name, (values, style) in stages.items()
    ]
    curves = {0: [], 1: [batch], 2: [batch, rate]}.get(num_curves, [batch, *stage_curves, rate])
    return [line(pieces, width) for pieces in curves]


def _labelled_sparkline(
    name: str, values: Sequence[float], max_value: float, scale: str, style: str, columns: int
) -> list[StyledText]:
    return [
        (name.ljust(_LABEL_WIDTH), "dim"),
        (sparkline(values, max_value, columns), style),
        (scale.rjust(_SCALE_WIDTH), "dim"),
    ]


def _queue_lines(
    history: EngineHistory, now: float, width: int, max_lines: int | None, models: Sequence[str]
) -> list[Text]:
    """The waiting requests in the order in which they get slots, and how many more there are."""
    view, server_time_s = history.view, history.server_time_s(now)
    max_lines = _MAX_WAITING_LINES if max_lines is None else min(max_lines, _MAX_WAITING_LINES)
    if not view.waiting or max_lines < 1:
        return []
    visible = view.waiting[:max_lines]
    rows = [
        line(_waiting_request(request, server_time_s, view, with_model=len(models) > 1), width) for request in visible
    ]
    num_more = view.num_waiting - sum(request.num_images for request in visible)
    if num_more > 0 and max_lines > 1:
        visible = view.waiting[: max_lines - 1]
        num_more = view.num_waiting - sum(request.num_images for request in visible)
        what = "texts" if isinstance(visible[0].settings, TextSettingsView) else "images"
        rows[max_lines - 1 :] = [line([(f"… and {num_more} more {what}", "dim")], width)]
    return rows


def _waiting_request(
    request: WaitingView, server_time_s: float, view: EngineView, *, with_model: bool
) -> list[StyledText]:
    count = f"{request.num_images} × " if request.num_images > 1 else ""
    start_in_s = None if request.start_at is None else max(0.0, request.start_at - server_time_s)
    pieces: list[StyledText] = [
        ("waits ", "yellow"),
        (f"{count}{_size(request.settings)}", ""),
        (f" starts {_relative_time(start_in_s)}", ""),
    ]
    if request.deadline_at is not None:
        remaining_s = request.deadline_at - server_time_s
        is_late = remaining_s < 0
        pieces.append((" late" if is_late else f" due {_relative_time(remaining_s)}", "red" if is_late else ""))
    if isinstance(request.settings, ImageSettingsView):
        pieces.append((f" {request.settings.inference_steps} steps {request.settings.scheduler}", "green"))
    if with_model:
        pieces.append((f" {request.model}", ""))
    if has_several_clients(view):
        pieces.append((f" of {client_name(request)}", "magenta"))
    if request.priority != "normal":
        pieces.append((f" {request.priority}", "bold"))
    return [*pieces, (f" {request.request_id}", "dim")]


def _size(settings: SettingsView) -> str:
    if isinstance(settings, TextSettingsView):
        return f"{settings.num_tokens} tokens"
    return f"{settings.width}×{settings.height}"


def _relative_time(wait_s: float | None) -> str:
    text = format_seconds(wait_s)
    return text if text in ("now", "–") else f"in {text}"
