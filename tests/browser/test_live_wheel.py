"""What a slot looks like: drawn by wheel.js alone, in Chromium, and looked at pixel by pixel."""

import feed
import pytest

pytestmark = pytest.mark.browser

SEAT = {
    "slot": 0, "request_id": "a", "index": 0, "model": "m", "width_px": 64, "height_px": 64, "scheduler": "ddim", "guidance_scale": 3,
    "num_steps": 20, "call": 0, "num_calls": 20, "priority": "normal", "boarded_at": 100.0, "due_at": None, "finish_at": None,
}  # fmt: skip


@pytest.fixture
def looked_at(open_page):
    """Draw slot 0 of four as `frames` say, each (seconds since the first, seats); of the last frame, what is seen of it."""
    with feed.served(feed.Feed(arriving=False)) as served:
        pages = []

        def look(frames, **options):
            pages.append(open_page(served.url, **options))
            return pages[-1].evaluate(SEEN, frames)

        yield look
        for page in pages:
            page.close()  # before its server: a page that looks for it in vain logs that


SEEN = """async (frames) => {
  const { Wheel } = await import("/pages/wheel.js"), { places } = await import("/pages/places.js"), { calm } = await import("/pages/theme.js");
  const canvas = document.createElement("canvas"), wheel = new Wheel(canvas), room = 24;
  const scene = { places: places(4, 430), width: 430, pictures: { of: () => undefined }, hues: { ddim: 2 }, calm: calm(), live: true };
  let last = 0;
  for (const [at, seats] of frames) {
    wheel.draw({ ...scene, wheel: { seats, gone: [] } }, at, at - last);
    last = at;
  }
  const { spots: [{ x, y }], size } = scene.places, ratio = canvas.width / (430 + 2 * room);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  // Its hue is orange, and all that has none of it is bluish.
  const orange = (radius, turn) => {
    const [across, down] = [x + room + radius * Math.sin(turn), y + room - radius * Math.cos(turn)].map((px) => Math.round(px * ratio));
    const at = 4 * (down * canvas.width + across);
    return data[at] - data[at + 2] > 10;
  };
  const turns = Array.from({ length: 90 }, (_, k) => ((k + 0.5) / 45) * Math.PI);
  const share = (...radii) => turns.filter((turn) => radii.some((radius) => orange(radius, turn))).length / turns.length;
  return { ring: share(size / 2, size / 2 - 0.75, size / 2 - 1.5), inside: share(0.36 * size) };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_who_has_just_boarded_has_a_whole_ring_and_a_tint_without_a_picture(looked_at, scheme, motion, late_s):
    seen = looked_at([(1.0, []), (2.0, [SEAT]), (2.0 + late_s, [SEAT])], color_scheme=scheme, reduced_motion=motion)
    assert seen["ring"] > 0.9
    assert seen["inside"] > 0.9 or (motion == "no-preference" and late_s == 0)  # it grows


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("frames", [[(1.0, [])], [(1.0, []), (2.0, [SEAT]), (5.0, []), (9.0, [])]])
def test_a_free_slot_has_no_hue(looked_at, scheme, frames):
    assert looked_at(frames, color_scheme=scheme, reduced_motion="no-preference") == {"ring": 0, "inside": 0}


def test_who_leaves_is_seen_to_fly_unless_things_should_stand_still(looked_at):
    frames = [(1.0, []), (2.0, [SEAT]), (5.0, []), (5.1, [])]
    assert looked_at(frames, reduced_motion="no-preference")["inside"] > 0.3
    assert looked_at(frames, reduced_motion="reduce") == {"ring": 0, "inside": 0}
