"""Permits to send, of one tab and of all tabs together, in Chromium."""

import feed
import pytest

pytestmark = pytest.mark.browser

SCENE = """async (shared) => {
  if (!shared) Object.defineProperty(navigator, "locks", { value: undefined });
  const { permits } = await import("/pages/permits.js");
  const some = permits(2), told = [], patient = new AbortController(), goes = new AbortController();
  const [first, second] = [await some.take(patient.signal), await some.take(patient.signal)];
  told.push(`full: ${await some.full()}`);
  const third = some.take(goes.signal).catch(({ name }) => told.push(name));
  const fourth = some.take(patient.signal).then((give) => (told.push("fourth"), give));
  goes.abort();
  await third;
  second();
  (await fourth)();
  first();
  for (const give of [await some.take(patient.signal), await some.take(patient.signal)]) give();
  await some.take(goes.signal).catch(({ name }) => told.push(name));
  return told;
}"""


@pytest.mark.parametrize("shared", [True, False], ids=["of all tabs", "of one tab"])
def test_who_waits_for_a_permit_has_the_next_one_unless_he_goes(open_page, shared):
    with feed.served(feed.Feed(arriving=False)) as served:
        page = open_page(served.url)
        assert page.evaluate(SCENE, shared) == ["full: true", "AbortError", "fourth", "AbortError"]
        page.close()  # before its server: a page that looks for it in vain logs that
