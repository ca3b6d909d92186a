"""Selects which running images the next iteration steps; the others are paused.

They are of one batch key (`shares/stride.py` selects it), or of several sizes where the model mixes them and that pays
(`shared_calls.py`), and as many of them as pay off together (`batch_selection.py`, `costs.py`), of each client its
share (`fair_width.py`); if these are not all, the policy decides.
"""

import math
from dataclasses import dataclass, field

from noria.scheduling.policies import uses_deadlines
from noria.scheduling.shares.fair_width import ReadyImages, count_clients, fair_counts
from noria.scheduling.shares.stride import StrideScheduler
from noria.scheduling.step.batch_selection import BatchLimits, all_fit, select_batch
from noria.scheduling.step.predictor import CompletionPredictor, OrderKey
from noria.scheduling.step.request_table import RunningImage, cost_key, count_rows
from noria.scheduling.step.shared_calls import share_calls
from noria.scheduling.types import BatchKey, ItemId


@dataclass(slots=True)
class StepSelector:
    """Selects among the running images of the table of `predictor`, with its costs and its policy."""

    predictor: CompletionPredictor
    _stride: StrideScheduler = field(init=False, default_factory=StrideScheduler)

    def select(self, now: float) -> list[RunningImage]:
        """Return the images that step next; none if all running images are denoised."""
        by_key: dict[BatchKey, list[RunningImage]] = {}
        for running in self.predictor.table.running.values():
            if not running.is_denoised:
                by_key.setdefault(running.step_key, []).append(running)
        if not by_key:
            return []
        keys: dict[ItemId, OrderKey] = {}
        batch_key = next(iter(by_key))
        if len(by_key) > 1:
            candidates = [running for images in by_key.values() for running in images]
            keys = self.predictor.policy_keys(candidates, now)
            batch_key = min(candidates, key=lambda running: keys[running.image]).step_key
            by_key, batch_key = self._mix_sizes(by_key, batch_key)
        ready: dict[BatchKey, ReadyImages] = {}
        counts = {key: float(len(images)) for key, images in by_key.items()}
        if self.predictor.width_slack < math.inf:
            ready = {key: count_clients(images) for key, images in by_key.items()}
            if len(by_key) > 1:
                counts = dict(zip(by_key, fair_counts(list(ready.values())), strict=True))
        batch_key = self._stride.next(counts, batch_key)
        share = counts[batch_key] / sum(counts.values())
        chosen = self._select_batch(by_key[batch_key], batch_key, share, ready.get(batch_key), keys, now)
        # If nothing is measured, all calls count the same.
        cost_s = self.predictor.costs.step_s(cost_key(chosen), count_rows(chosen)) or 1.0
        self._stride.charge(batch_key, cost_s)
        return chosen

    def _mix_sizes(
        self, by_key: dict[BatchKey, list[RunningImage]], urgent: BatchKey
    ) -> tuple[dict[BatchKey, list[RunningImage]], BatchKey]:
        """Return the images by the largest size of the calls that they share, and that of the `urgent` key."""
        requests = {key: images[0].active.request for key, images in by_key.items()}
        if all(request.call_size is None for request in requests.values()):
            return by_key, urgent
        rows = {key: count_rows(images) for key, images in by_key.items()}
        call_keys = {key: request.call_key(key) for key, request in requests.items()}
        largest = share_calls(rows, call_keys, self.predictor.costs)
        mixed: dict[BatchKey, list[RunningImage]] = {}
        for key, images in by_key.items():
            mixed.setdefault(largest[key], []).extend(images)
        return mixed, largest[urgent]

    def _is_full(self, batch_key: BatchKey) -> bool:
        """Whether all slots are taken, or more images run than a call has room for."""
        running = self.predictor.table.running
        if len(running) >= self.predictor.max_running:
            return True
        return count_rows(running.values()) > self.predictor.costs.rows_limit(batch_key)

    def _select_batch(
        self,
        images: list[RunningImage],
        batch_key: BatchKey,
        share: float,
        ready: ReadyImages | None,
        keys: dict[ItemId, OrderKey],
        now: float,
    ) -> list[RunningImage]:
        """Select from `images` those that step.

        `share` is their part of the device; `ready` says whose they are, if clients share it; `keys` are the policy's,
        if they are known.
        """
        costs, width_slack = self.predictor.costs, self.predictor.width_slack
        has_deadline = uses_deadlines(self.predictor.policy) and any(each.deadline_s is not None for each in images)
        rows = count_rows(images)
        is_full = self._is_full(batch_key)
        rows_limit = costs.stretched_limit(batch_key, costs.exploration_limit(batch_key), rows)
        if all_fit(rows, rows_limit, ready, is_full=is_full or not has_deadline):
            return images
        limits = BatchLimits(
            rows_limit=rows_limit,
            step_s=lambda rows: costs.step_s(batch_key, rows),
            decode_s=costs.decode_s(batch_key),
            share=share,
            is_full=is_full or not has_deadline,
            width_slack=width_slack,
        )
        known = keys or self.predictor.policy_keys(images, now)
        in_order = sorted(images, key=lambda running: known[running.image])
        chosen = {running.slot for running in select_batch(in_order, limits, now, ready)[0]}
        return [running for running in images if running.slot in chosen]
