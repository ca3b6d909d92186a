"""So many at once, and so many of them one client's."""

import pytest

from noria.errors import RateLimited
from noria.frontend.http.concurrency_limits import ConcurrencyLimiter, client_id


def test_a_client_is_refused_at_its_share_and_all_at_the_whole():
    places = ConcurrencyLimiter("wheels", max_total=3, max_per_client=2, retry_after_s=7.0)
    places.acquire("a")
    places.acquire("a")
    with pytest.raises(RateLimited, match=r"^a has 2 wheels already, .* one client may have of the 3 ") as refused:
        places.acquire("a")
    assert refused.value.retry_after_s == 7.0
    places.acquire("b")
    for client in "bc":
        with pytest.raises(RateLimited, match=r"^3 wheels are under way already"):
            places.acquire(client)


def test_a_refusal_takes_nothing():
    places = ConcurrencyLimiter("wheels", max_total=2, max_per_client=2, retry_after_s=7.0)
    places.acquire("a")
    places.acquire("b")
    for _ in range(5):
        with pytest.raises(RateLimited):
            places.acquire("a")
    places.release("b")
    places.acquire("a")
    with pytest.raises(RateLimited, match=r"^a has 2 wheels"):
        places.acquire("a")


def test_what_is_given_back_is_free_for_anybody():
    places = ConcurrencyLimiter("wheels", max_total=1, max_per_client=1, retry_after_s=7.0)
    with pytest.raises(ZeroDivisionError), places.hold("a"):
        _ = 1 / 0
    with places.hold("b"), pytest.raises(RateLimited), places.hold("a"):
        pass
    with places.hold("a"):
        pass


@pytest.mark.parametrize(
    ("key", "host", "name"),
    [
        ("alice", "192.0.2.1", "the key 'alice'"),
        (None, "192.0.2.1", "the address 192.0.2.1"),
        (None, "::ffff:192.0.2.1", "the address 192.0.2.1"),
        (None, "2001:db8:1:2:3:4:5:6", "the network 2001:db8:1:2::/64"),
        (None, "fe80::1%eth0", "the network fe80::/64"),
        (None, "unknown", "the address 'unknown'"),
        (None, None, "an unknown address"),
    ],
)
def test_a_client_is_its_key_or_its_address(key, host, name):
    assert client_id(key, host) == name
