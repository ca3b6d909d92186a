"""Records OpenLineage's events in the registry."""

from collections.abc import Callable, Sequence

import msgspec

from noria.errors import InvalidBody
from noria.frontend.services.registry.connection import RegistryConnection
from noria.registry.lineage.openlineage import Event, parse_event
from noria.registry.lineage.store import LineageStore


class LineageService:
    """Records events."""

    def __init__(self, registry: RegistryConnection) -> None:
        self._registry = registry

    async def record(self, body: bytes, received_from: str) -> None:
        """Record one event.

        Raises:
            InvalidBody, InvalidField: see `parse_event`.
            RegistryUnavailable: the database does not answer, or cannot be opened.

        """
        await self._record(lambda: [parse_event(body)], received_from)

    async def record_batch(self, body: bytes, received_from: str) -> None:
        """Record a JSON list of events, if all are valid. Raises what `record` raises."""
        await self._record(lambda: _parse_batch(body), received_from)

    async def _record(self, parse: Callable[[], Sequence[Event]], received_from: str) -> None:
        """Parse, which takes long for large events, and record in threads."""
        events = await self._registry.offload(parse)
        now = self._registry.clock()
        await self._registry.run(lambda engine: LineageStore(engine).record(events, received_from, now))


def _parse_batch(body: bytes) -> list[Event]:
    try:
        raw_events = msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidBody(f"the body is not a list of events: {error}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidBody(f"the body is not JSON: {error}.") from error
    return [parse_event(bytes(raw), f"[{number}].") for number, raw in enumerate(raw_events)]
