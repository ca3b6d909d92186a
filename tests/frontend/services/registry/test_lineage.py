"""Lineage events while the registry cannot be opened."""

import asyncio
import json

import pytest

from noria.errors import ConfigError, RegistryUnavailable
from noria.frontend.services.registry.connection import RegistryConnection
from noria.frontend.services.registry.lineage import LineageService
from noria.registry.schema import open_registry_database

EVENT = {
    "eventType": "COMPLETE",
    "eventTime": "2026-11-22T09:00:00Z",
    "producer": "urn:x",
    "schemaURL": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent",
    "run": {"runId": "01a2028d-9625-77a9-a141-efbbcc3a6ef9"},
    "job": {"namespace": "demo", "name": "train"},
}


def test_a_registry_that_cannot_be_opened_is_not_tried_again_by_each_request_and_opened_later(tmp_path):
    now, attempts, is_away = 1000.0, [], True

    def open_engine():
        attempts.append(now)
        if is_away:
            raise ConfigError("the disk is full")
        return open_registry_database("auto", tmp_path)

    async def scenario():
        nonlocal now, is_away
        service = LineageService(registry := RegistryConnection(open_engine, lambda: now))
        body = json.dumps(EVENT).encode()
        together = await asyncio.gather(*(service.record(body, "alice") for _ in range(5)), return_exceptions=True)
        assert {type(each) for each in together} == {RegistryUnavailable}
        now += 2.0
        with pytest.raises(RegistryUnavailable, match="cannot be opened") as caught:
            await service.record(body, "alice")
        assert caught.value.retry_after_s == 3.0
        now, is_away = now + 3.0, False
        await service.record(body, "alice")
        await registry.close()

    asyncio.run(scenario())
    assert attempts == [1000.0, 1005.0]
