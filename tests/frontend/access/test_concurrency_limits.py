"""The limits of concurrent uses, in total and per client."""

import pytest

from noria.errors import RateLimited
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter, client_id


def test_a_client_is_rejected_at_its_limit_and_everyone_at_the_total():
    limiter = ConcurrencyLimiter("uploads", max_total=3, max_per_client=2, retry_after_s=7.0)
    limiter.acquire("a")
    limiter.acquire("a")
    with pytest.raises(RateLimited, match=r"^a has 2 uploads") as rejected:
        limiter.acquire("a")
    assert rejected.value.retry_after_s == 7.0
    limiter.acquire("b")
    for client in "bc":
        with pytest.raises(RateLimited, match=r"^3 uploads are under way already"):
            limiter.acquire(client)


def test_a_use_by_nobody_counts_in_total_only():
    limiter = ConcurrencyLimiter("uploads", max_total=3, max_per_client=1, retry_after_s=7.0)
    for client in (None, None, "a"):
        limiter.acquire(client)
    for client in (None, "b"):
        with pytest.raises(RateLimited, match=r"^3 uploads are under way already"):
            limiter.acquire(client)
    limiter.release(None)
    limiter.acquire("b")


def test_several_uses_fit_together_or_are_rejected():
    limiter = ConcurrencyLimiter("images", max_total=5, max_per_client=3, retry_after_s=7.0)
    with limiter.hold("a", 2):
        with pytest.raises(RateLimited, match=r"^a has 2 images already, and one client may have 3 of the 5 "):
            limiter.acquire("a", 2)
        limiter.acquire("b", 3)
        with pytest.raises(RateLimited, match=r"^5 images are under way already, and a front end may have 5;"):
            limiter.acquire("c")
    limiter.acquire("a", 2)


def test_a_rejection_is_not_counted():
    limiter = ConcurrencyLimiter("uploads", max_total=2, max_per_client=2, retry_after_s=7.0)
    limiter.acquire("a")
    limiter.acquire("b")
    for _ in range(5):
        with pytest.raises(RateLimited):
            limiter.acquire("a")
    limiter.release("b")
    limiter.acquire("a")
    with pytest.raises(RateLimited, match=r"^a has 2 uploads"):
        limiter.acquire("a")


def test_a_released_use_is_free_for_any_client():
    limiter = ConcurrencyLimiter("uploads", max_total=1, max_per_client=1, retry_after_s=7.0)
    with pytest.raises(ZeroDivisionError), limiter.hold("a"):
        _ = 1 / 0
    with limiter.hold("b"), pytest.raises(RateLimited), limiter.hold("a"):
        pass
    with limiter.hold("a"):
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
def test_a_client_is_named_by_its_key_or_its_address(key, host, name):
    assert client_id(key, host) == name
