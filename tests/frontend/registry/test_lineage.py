"""Lineage events while the registry cannot be opened."""

import asyncio
import json
import threading

import pytest

from noria.config import RegistryConfig
from noria.errors import ConfigError, RateLimited, RegistryConflict, RegistryUnavailable
from noria.frontend.registry.connection import RegistryConnection
from noria.frontend.registry.lineage import LineageService
from noria.registry.schema import open_registry_database

START = 1_795_400_000.0
EVENT = {
    "eventType": "COMPLETE",
    "eventTime": "2026-11-22T09:00:00Z",
    "producer": "urn:x",
    "schemaURL": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent",
    "run": {"runId": "01a2028d-9625-77a9-a141-efbbcc3a6ef9"},
    "job": {"namespace": "demo", "name": "train"},
}


async def test_a_registry_that_cannot_be_opened_is_not_tried_again_by_each_request_and_opened_later(tmp_path):
    now, attempts, is_away = START, [], True

    def open_engine():
        attempts.append(now)
        if is_away:
            raise ConfigError("the disk is full")
        return open_registry_database("auto", tmp_path)

    service = LineageService(registry := RegistryConnection(open_engine, lambda: now), RegistryConfig())
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
    assert attempts == [START, START + 5.0]


@pytest.mark.parametrize(
    ("limits", "error", "words"),
    [
        ({"lineage_events_per_minute": 4}, RateLimited, "may send 2 lineage events a minute to this front end"),
        (
            {"lineage_mib_per_minute": 1500 / 2**20},
            RateLimited,
            "may send 750 bytes of lineage a minute to this front end",
        ),
        ({"max_lineage_mib": 2800 / 2**20}, RegistryConflict, r"would take \d+ bytes of the registry"),
    ],
)
async def test_what_a_sender_sends_and_keeps_is_bounded_and_others_go_on(tmp_path, limits, error, words):
    def body(number):
        return json.dumps(EVENT | {"eventTime": f"2026-11-22T09:00:0{number}Z"}).encode()

    registry = RegistryConnection(lambda: open_registry_database("auto", tmp_path), lambda: START)
    service = LineageService(registry, RegistryConfig(**limits), lambda: 2)
    for number in range(2):
        await service.record(body(number), "alice")
    with pytest.raises(error, match=words) as caught:
        await service.record(body(2), "alice")
    assert caught.value.retryable == (caught.value.retry_after_s is not None) == (error is RateLimited)
    other = json.loads(body(3)) | {"run": {"runId": "01a2028d-9625-77a9-a141-efbbcc3a6ef0"}}
    await service.record(json.dumps(other).encode(), "bob")
    await registry.close()


async def test_deployments_do_not_wait_for_lineage(tmp_path):
    """While lineage of one client fills its threads, other clients take turns, and other work has its own threads."""
    registry = RegistryConnection(lambda: open_registry_database("auto", tmp_path), lambda: START)
    release, order = threading.Event(), []

    def slow(_):
        release.wait(30)

    busy = [asyncio.create_task(registry.run_lineage("eve", slow)) for _ in range(8)]
    await asyncio.sleep(0.1)
    ann = asyncio.create_task(registry.run_lineage("ann", lambda _: order.append("ann")))
    last = asyncio.create_task(registry.run_lineage("eve", lambda _: order.append("eve")))
    await asyncio.wait_for(registry.run(lambda _: order.append("deployment")), 10)
    release.set()
    await asyncio.gather(*busy, ann, last)
    assert order == ["deployment", "ann", "eve"]
    await registry.close()
