"""A slot as slot_ring.js draws it, in Chromium, checked pixel by pixel."""

import feed
import pytest

pytestmark = pytest.mark.browser

SETTINGS = {"width": 64, "height": 64, "scheduler": "ddim", "guidance_scale": 3, "inference_steps": 20}
IMAGE = {
    "slot": 0, "request_id": "a", "index": 0, "model": "m", "settings": SETTINGS,
    "call": 0, "num_calls": 20, "priority": "normal", "joined_at": 100.0, "deadline_at": None, "finish_at": None,
}  # fmt: skip


@pytest.fixture
def draw_frames(open_page):
    """Draw slot 0 of four in `frames`, each (time in seconds, slots of the view); returns what the last frame shows."""
    with feed.served(feed.Feed(arriving=False)) as served:
        pages = []

        def draw(frames, **options):
            pages.append(open_page(served.url, **options))
            return pages[-1].evaluate(DRAW, frames)

        yield draw
        for page in pages:
            page.close()  # before the server stops: a page that cannot reconnect logs errors


DRAW = """async (frames) => {
  const { SlotRing } = await import("/pages/live/slot_ring.js"), { slotLayout } = await import("/pages/live/slots.js");
  const { prefersReducedMotion } = await import("/pages/shared/dom.js");
  const canvas = document.createElement("canvas"), ring = new SlotRing(canvas), margin = 24;
  const thumbnails = { get: () => undefined }, layout = slotLayout(4, 430), reducedMotion = prefersReducedMotion();
  const scene = { layout, width: 430, thumbnails, hues: { ddim: 2 }, reducedMotion, live: true };
  let last = 0;
  for (const [at, slots] of frames) {
    ring.draw({ ...scene, view: { slots, departures: [] } }, at, at - last);
    last = at;
  }
  const { centers: [{ x, y }], size } = layout, ratio = canvas.width / (430 + 2 * margin);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  // The image's hue is orange, everything else is bluish.
  const orange = (radius, angle) => {
    const [across, down] = [x + margin + radius * Math.sin(angle), y + margin - radius * Math.cos(angle)].map((px) => Math.round(px * ratio));
    const at = 4 * (down * canvas.width + across);
    return data[at] - data[at + 2] > 10;
  };
  const angles = Array.from({ length: 90 }, (_, k) => ((k + 0.5) / 45) * Math.PI);
  const share = (...radii) => angles.filter((angle) => radii.some((radius) => orange(radius, angle))).length / angles.length;
  return { ring: share(size / 2, size / 2 - 0.75, size / 2 - 1.5), inside: share(0.36 * size) };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_new_image_without_a_thumbnail_has_a_whole_ring_and_a_tint(draw_frames, scheme, motion, late_s):
    shown = draw_frames(
        [(1.0, []), (2.0, [IMAGE]), (2.0 + late_s, [IMAGE])], color_scheme=scheme, reduced_motion=motion
    )
    assert shown["ring"] > 0.9
    assert shown["inside"] > 0.9 or (motion == "no-preference" and late_s == 0)  # it is still growing


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("frames", [[(1.0, [])], [(1.0, []), (2.0, [IMAGE]), (5.0, []), (9.0, [])]])
def test_a_free_slot_has_no_hue(draw_frames, scheme, frames):
    assert draw_frames(frames, color_scheme=scheme, reduced_motion="no-preference") == {"ring": 0, "inside": 0}


def test_leaving_image_is_animated_unless_motion_is_reduced(draw_frames):
    frames = [(1.0, []), (2.0, [IMAGE]), (5.0, []), (5.1, [])]
    assert draw_frames(frames, reduced_motion="no-preference")["inside"] > 0.3
    assert draw_frames(frames, reduced_motion="reduce") == {"ring": 0, "inside": 0}
