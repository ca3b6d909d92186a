"""Chooses by measurement whether a text encoder's batches are packed or padded.

Texts of many lengths, as a queue has them, are computed both ways: padded in batches of similar lengths, which the
scheduler would make of them, and packed as they come. A text alone is computed both ways, too.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
from msgspec import Struct

from noria.engine.encoder.fidelity import compare
from noria.errors import ModelError
from noria.models.encoder.tokenizers.token_rows import FloatArray, TokenRow
from noria.observe.logs.log_record import fields
from noria.protocol.text import EncoderModelSpec

_log = logging.getLogger(__name__)

_BATCH, _NUM_BATCHES = 32, 4  # texts
_FEW = 8  # texts of which the fidelity alone is measured
_MEDIAN_TOKENS, _SPREAD = 48, 0.9  # log-normal, as the texts of the scheduler's simulations
_LONE_TOKENS = 24
_NUM_ROUNDS = 3  # the first computes a new shape, the second captures it

PACKED_MIN_FIDELITY = 0.9999
"""The least fidelity of packed batches in float32."""

Run = Callable[[Sequence[TokenRow]], list[FloatArray]]


class PackingSession(Protocol):
    """A session that can compute both ways."""

    packed_from: int | None
    """The number of texts from which on a batch is packed; None: none is."""

    @property
    def packing_obstacle(self) -> str | None:
        """The reason why texts cannot be packed, or None."""
        ...

    def run_padded(self, rows: Sequence[TokenRow]) -> list[FloatArray]:
        """Compute texts, padded to the longest."""
        ...

    def run_packed(self, rows: Sequence[TokenRow]) -> list[FloatArray]:
        """Compute texts one behind the other."""
        ...

    def drop_packed(self) -> None:
        """Drop what packed batches have allocated."""
        ...


class PackingTimes(Struct, frozen=True):
    """Seconds of the same texts both ways, and of a text alone."""

    num_texts: int
    num_tokens: int
    padded_s: float
    packed_s: float
    lone_padded_s: float
    lone_packed_s: float
    fidelity: float  # fidelity of the packed results, 1 being equal

    @property
    def packed_from(self) -> int | None:
        """The number of texts from which on packing is no slower; None: it is always slower."""
        if self.packed_s > self.padded_s:
            return None
        return 1 if self.lone_packed_s <= self.lone_padded_s else 2


def choose_packing(
    spec: EncoderModelSpec,
    session: PackingSession,
    mode: Literal["auto", "on"],
    min_fidelity: float,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Set from how many texts on `session` packs batches: where it is faster, or with "on" always.

    Raises ModelError: `mode` is "on", and the model cannot be packed, or differs by more than `min_fidelity` allows.
    """
    obstacle = session.packing_obstacle
    if mode == "auto" and obstacle:
        return
    try:
        if obstacle:
            raise ModelError(obstacle)
        times = None if mode == "on" else measure_packing(spec, session, clock)
        fidelity = _fidelity(spec, session) if times is None else times.fidelity
        if not fidelity >= min_fidelity:  # NaN is rejected, too
            raise ModelError(f"packed texts have other results than padded ones: fidelity {fidelity:.5f}")
    except Exception as error:  # also of kernels that this GPU or torch has not
        message = " ".join((str(error) or type(error).__name__).split())
        if mode == "on":
            raise ModelError(
                f"{spec.name} cannot compute packed batches: {message.rstrip('.')}. Use engine.encoder_packing auto."
            ) from error
        extra = fields(event="packing_failed", model=spec.name)
        _log.warning("%s keeps padded batches: %s", spec.name, message, extra=extra)
        session.drop_packed()
        return
    session.packed_from = 1 if times is None else times.packed_from
    if session.packed_from is None:
        session.drop_packed()
    _log.info(
        "%s computes %s batches: %s",
        spec.name,
        "padded" if session.packed_from is None else "packed",
        "engine.encoder_packing is on"
        if times is None
        else f"{times.num_texts} texts took {1e3 * times.padded_s:.1f} ms padded, {1e3 * times.packed_s:.1f} ms packed",
        extra=fields(event="packing_chosen", model=spec.name, packed_from=session.packed_from),
    )


def _fidelity(spec: EncoderModelSpec, session: PackingSession) -> float:
    """Return the fidelity of a few packed texts, each computed once, 1 being equal."""
    rows = _texts(spec, _FEW)
    return compare(spec, session.run_padded(rows), session.run_packed(rows)).min


def _texts(spec: EncoderModelSpec, number: int) -> list[TokenRow]:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(_MEDIAN_TOKENS), _SPREAD, number)).clip(1, spec.max_length).astype(int)
    return [TokenRow(rng.integers(0, spec.vocab_size, length)) for length in lengths]


def measure_packing(
    spec: EncoderModelSpec,
    session: PackingSession,
    clock: Callable[[], float] = time.perf_counter,
    batch_texts: int = _BATCH,
) -> PackingTimes:
    """Compute texts of many lengths both ways, in batches of `batch_texts`. Raises whatever the session raises."""
    num_texts = _NUM_BATCHES * batch_texts
    rows = _texts(spec, num_texts)
    lengths = np.array([len(row.ids) for row in rows])
    lone = [[TokenRow(np.arange(min(_LONE_TOKENS, spec.max_length)) % spec.vocab_size)]]
    order = np.argsort(lengths, kind="stable")
    starts = range(0, num_texts, batch_texts)
    as_they_come = [rows[start : start + batch_texts] for start in starts]
    by_length = [[rows[place] for place in order[start : start + batch_texts]] for start in starts]
    packed_s, packed = _measure(session.run_packed, as_they_come, clock)  # first, for it may fail
    padded_s, padded = _measure(session.run_padded, by_length, clock)
    lone_padded_s, _ = _measure(session.run_padded, lone, clock)
    lone_packed_s, _ = _measure(session.run_packed, lone, clock)
    fidelity = compare(spec, padded, [packed[place] for place in order]).min
    return PackingTimes(num_texts, int(lengths.sum()), padded_s, packed_s, lone_padded_s, lone_packed_s, fidelity)


def _measure(
    run: Run, batches: Sequence[Sequence[TokenRow]], clock: Callable[[], float]
) -> tuple[float, list[FloatArray]]:
    """Return the seconds of the fastest round, and its results."""
    seconds, results = [], list[FloatArray]()
    for _ in range(_NUM_ROUNDS):
        started = clock()
        results = [result for batch in batches for result in run(batch)]
        seconds.append(clock() - started)
    return min(seconds), results
