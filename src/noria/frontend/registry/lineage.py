"""Records OpenLineage's events in the registry, as many as each client may send."""

import time
from collections.abc import Callable, Sequence

import msgspec

from noria.config.registry import RegistryConfig
from noria.errors import InvalidBody, RateLimited
from noria.frontend.access.quotas import TokenBucket
from noria.frontend.registry.connection import RegistryConnection
from noria.registry.lineage.openlineage import Event, parse_event
from noria.registry.lineage.store import LineageStore

_MIB = 2**20


class LineageService:
    """Records events. Each front end grants its share of the limits of a sender, an API key or an address."""

    def __init__(
        self, registry: RegistryConnection, config: RegistryConfig, num_processes: Callable[[], int] = lambda: 1
    ) -> None:
        self._registry, self._config, self._num_processes = registry, config, num_processes
        self._limits: dict[str, tuple[TokenBucket, TokenBucket]] = {}  # by sender: of events, of bytes

    async def record(self, body: bytes, sender: str) -> None:
        """Record one event.

        Raises:
            BodyTooLarge, ForeignRun, RegistryConflict: see `LineageStore.record`, whose RegistryError is the last.
            InvalidBody, InvalidField: see `parse_event`.
            RateLimited: the sender has sent too much in the last minute.
            RegistryUnavailable: the database does not answer, or cannot be opened.
        """
        await self._record(body, lambda: [parse_event(body)], sender)

    async def record_batch(self, body: bytes, sender: str) -> None:
        """Record a JSON list of events, if all are valid. Raises what `record` raises."""
        await self._record(body, lambda: _parse_batch(body), sender)

    async def _record(self, body: bytes, parse: Callable[[], Sequence[Event]], sender: str) -> None:
        """Parse, which takes long for large events, and record in threads."""
        events_limit, bytes_limit = self._limits_of(sender)
        _charge(bytes_limit, len(body), "bytes of lineage", sender)
        events = await self._registry.run_lineage(sender, lambda _: parse())
        _charge(events_limit, len(events), "lineage events", sender)
        now = self._registry.clock()
        maximum = self._config.max_lineage_mib * _MIB
        await self._registry.run_lineage(
            sender, lambda engine: LineageStore(engine).record(events, sender, now, max_sender_bytes=maximum)
        )

    def _limits_of(self, sender: str) -> tuple[TokenBucket, TokenBucket]:
        share = 1 / self._num_processes()
        per_minute = (
            self._config.lineage_events_per_minute * share,
            self._config.lineage_mib_per_minute * _MIB * share,
        )
        limits = self._limits.get(sender)
        if limits is None:
            limits = self._limits[sender] = TokenBucket(per_minute[0]), TokenBucket(per_minute[1])
        for bucket, limit in zip(limits, per_minute, strict=True):
            bucket.update(limit)
        return limits


def _charge(bucket: TokenBucket, count: int, unit: str, sender: str) -> None:
    """Charge what a sender sends; what is more than a minute has takes all of a minute. Raises RateLimited."""
    if wait_s := bucket.take(min(count, int(bucket.capacity)), time.monotonic()):
        raise RateLimited(
            f"{sender!r} may send {bucket.capacity:.0f} {unit} a minute to this front end, and has; {count} more pass "
            "after Retry-After. The server's operator can raise registry.lineage_events_per_minute and "
            "registry.lineage_mib_per_minute.",
            retry_after_s=wait_s,
        )


def _parse_batch(body: bytes) -> list[Event]:
    try:
        raw_events = msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidBody(f"the body is not a list of events: {error}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidBody(f"the body is not JSON: {error}.") from error
    return [parse_event(bytes(raw), f"[{number}].") for number, raw in enumerate(raw_events)]
