"""The limit of concurrent requests, of one tab and of all tabs together, in Chromium."""

import feed
import pytest

pytestmark = pytest.mark.browser

SCENE = """async (shared) => {
  if (!shared) Object.defineProperty(navigator, "locks", { value: undefined });
  const { concurrencyLimit } = await import("/pages/playground/concurrency_limit.js");
  const limit = concurrencyLimit(2), log = [], notAborted = new AbortController(), aborted = new AbortController();
  const [first, second] = [await limit.acquire(notAborted.signal), await limit.acquire(notAborted.signal)];
  log.push(`full: ${await limit.isFull()}`);
  const third = limit.acquire(aborted.signal).catch(({ name }) => log.push(name));
  const fourth = limit.acquire(notAborted.signal).then((release) => (log.push("fourth"), release));
  aborted.abort();
  await third;
  second();
  (await fourth)();
  first();
  for (const release of [await limit.acquire(notAborted.signal), await limit.acquire(notAborted.signal)]) release();
  await limit.acquire(aborted.signal).catch(({ name }) => log.push(name));
  return log;
}"""


@pytest.mark.parametrize("shared", [True, False], ids=["of all tabs", "of one tab"])
def test_waiters_acquire_in_order_unless_aborted(open_page, shared):
    with feed.served(feed.Feed(arriving=False)) as served:
        page = open_page(served.url)
        assert page.evaluate(SCENE, shared) == ["full: true", "AbortError", "fourth", "AbortError"]
        page.close()  # before the server stops: a page that cannot reconnect logs errors
