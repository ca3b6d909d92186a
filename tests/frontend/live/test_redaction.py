"""Of a view a key sees its own requests; of others that they are there, and nothing that names or describes them."""

import json
import re

import httpx
import msgspec
import pytest

from frontends import serving
from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.frontend.live.redaction import Redaction
from noria.protocol.diffusion import ImageSettingsView
from noria.protocol.live_views import DepartureView, RatesView, ShareView, SlotView, ThumbnailView, WaitingView
from noria.protocol.messages import EngineView
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until_ready

RATES = RatesView(60.0, 1.0, 2.0, 3.0, 0.5, 0.9, 0.99, 4.0, 0.5, 0.75)
SETTINGS = ImageSettingsView(640, 480, "ddim", 6.5, 37)

SHARES = tuple(
    ShareView(client, share, 2, 1, 5, 3)
    for client, share in (("bob", 0.4), ("ann", 0.3), ("ann jobs", 0.2), ("annabel", 0.1))
)


def view(incarnation="1"):
    slots = tuple(
        SlotView(
            slot, f"customer-4711-{key}", 0, "m", SETTINGS, 9, 37, "normal", 1.0, 5.5, 2.0, client=key, share_client=key
        )
        for slot, key in enumerate(("ann", "bob", "bob"))
    )
    waiting = tuple(
        WaitingView(f"next-4711-{key}", 1, "m", SETTINGS, "normal", 1.0, 2.0, 5.5, client=key, share_client=key)
        for key in ("ann", "bob")
    )
    departures = tuple(DepartureView(1, 3, f"gone-4711-{key}", 0, "ok", key) for key in ("ann", "bob"))
    thumbnails = tuple(ThumbnailView(slot.slot, slot.request_id, 0, 8, 8, 192 * slot.slot) for slot in slots)
    return EngineView(incarnation, 1.0, 0, 4, slots, waiting, 2, 1.5, (), departures, RATES, thumbnails, SHARES)


def test_a_key_sees_its_own_requests_and_that_others_are_there():
    seen = Redaction(b"secret").view_for(view(), "ann")
    assert [seen.slots[0], seen.waiting[0], seen.departures[0], seen.thumbnails[0]] == [
        view().slots[0],
        view().waiting[0],
        view().departures[0],
        view().thumbnails[0],
    ]
    others = msgspec.json.encode([seen.slots[1:], seen.waiting[1:], seen.departures[1:], seen.thumbnails[1:]]).decode()
    assert not [word for word in ("4711", "bob", "ddim", "640", "480", "37", "6.5", "5.5") if word in others]
    assert [(slot.call, slot.num_calls) for slot in seen.slots] == [(9, 37), (24, 100), (24, 100)]
    ids = {seen.slots[1].request_id, seen.slots[2].request_id, *(each.request_id for each in seen.thumbnails[1:])}
    assert len(ids) == 1 and ids.pop().startswith("hidden-")
    assert Redaction(b"other").view_for(view(), "ann").slots[1].request_id != seen.slots[1].request_id


def test_a_key_sees_its_own_share_and_that_of_its_jobs_and_the_others_as_one():
    shares = Redaction(b"secret").view_for(view(), "ann").shares
    assert shares == (*SHARES[1:3], ShareView("", 0.5, 4, 2, 10, 6, num_clients=2))


def test_who_sees_all_sees_keys_and_no_address_and_at_most_eight_clients():
    digest = "~0123456789abcdef"
    one = msgspec.structs.replace(view(), slots=(msgspec.structs.replace(view().slots[0], share_client=digest),))
    many = tuple(
        ShareView(client, 0.1, 1, 0, 0, 0) for client in ("bob", " jobs", digest, *(f"~{k}" for k in range(8)))
    )
    seen = Redaction(b"secret").view_for(msgspec.structs.replace(one, shares=many), None)
    names = [each.share_client for each in seen.shares]
    assert names[:2] == ["bob", "jobs"]
    assert names[2] == seen.slots[0].share_client
    assert re.fullmatch("client-[0-9a-f]{6}", names[2]) and len(set(names)) == 9
    assert seen.shares[8:] == (ShareView("", pytest.approx(0.3), 3, 0, 0, 0, num_clients=3),)
    others = Redaction(b"other").view_for(msgspec.structs.replace(one, shares=many), None)
    assert others.shares[2].share_client != names[2]


def test_an_id_that_another_key_has_chosen_too_shows_nothing_of_it():
    seen = Redaction(b"secret").view_for(view(), "eve")
    assert not {slot.request_id for slot in seen.slots} & {slot.request_id for slot in view().slots}


@pytest.mark.parametrize(("key", "num_own"), [("ann", 1), ("bob", 2), ("reader", 0), ("administrator", 3)], ids=str)
def test_the_stream_of_a_key_has_its_own_requests(folder, tmp_path, key, num_own):
    scopes = {"ann": None, "bob": ["generate"], "reader": ["lineage", "deploy", "metrics"], "administrator": ["admin"]}
    keys = {name: generate_key(name, of_key) for name, of_key in scopes.items()}
    (tmp_path / "keys.toml").write_text("".join(table for _, table in keys.values()))
    config = Config(frontend=FrontendConfig(api_keys_file=str(tmp_path / "keys.toml")))
    with FakeEngine(f"ipc://{folder}/redacted-{key}") as engine, serving(config, engine) as (url, _):
        engine.make_view = lambda _, incarnation: (msgspec.structs.replace(view(incarnation), thumbnails=()), None)
        wait_until_ready(url)
        headers = {"X-Api-Key": keys[key][0]}
        with httpx.stream("GET", f"{url}/v1/live", headers=headers, verify=False, timeout=20) as stream:
            lines = stream.iter_lines()
            found = next(line for line in lines if line.startswith("data: ") and '"slots"' in line)
    slots = json.loads(found.removeprefix("data: "))["slots"]
    assert sum("4711" in slot["request_id"] for slot in slots) == num_own
