"""Host names are resolved within a time limit, in separate threads."""

import asyncio
import contextlib
import socket
import threading

import pytest

from noria.errors import JobsUnavailable
from noria.jobs.webhooks.resolver import Resolver
from noria.jobs.webhooks.url_check import check_webhook_url
from waiting import TIMEOUT_S


def test_it_resolves_like_the_system():
    with contextlib.closing(Resolver(timeout_s=TIMEOUT_S)) as resolver:
        assert "127.0.0.1" in asyncio.run(resolver("127.0.0.1", 80))


def test_a_lookup_without_an_answer_times_out_with_a_message():
    released = threading.Event()

    def hang(*_):
        released.wait(TIMEOUT_S)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with contextlib.closing(Resolver(hang, timeout_s=0.05)) as resolver:
        try:
            for _ in range(20):  # more than there are threads: the limit includes waiting for one
                with pytest.raises(JobsUnavailable, match=r"no answer within 0\.05 s"):
                    asyncio.run(check_webhook_url("https://slow.example/", resolver))
        finally:
            released.set()


def test_lookups_do_not_use_the_event_loops_own_threads():
    thread_names = []

    def look_up(*_):
        thread_names.append(threading.current_thread().name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 80))]

    with contextlib.closing(Resolver(look_up, timeout_s=TIMEOUT_S)) as resolver:
        assert asyncio.run(resolver("hooks.example", 80)) == ["192.0.2.1"]
    assert thread_names[0].startswith("resolve")
