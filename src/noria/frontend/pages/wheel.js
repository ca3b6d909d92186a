// Draws the wheel: its spokes, a bucket for each slot with its picture and a ring of progress, and who boards and leaves.

import { colours, sized } from "./theme.js";
import { keyOf } from "./state.js";

const BOARDING_S = 0.4;
const LEAVING_S = 0.8;
const CATCH_UP_S = 0.12; // a ring's end follows the last view with this time constant
const SPEED = 0.5; // of the spokes while anybody is aboard, radians a second: they are seen to turn, not to be counted

const ROOM_PX = 24; // around the places, as live.css has it: who leaves flies into it

const eased = (share) => 1 - (1 - share) ** 3;
const outOf = (value) => Math.min(1, Math.max(0, value));

export class Wheel {
  #canvas;
  #buckets = []; // by slot: {key, share, said, at, hue} of whom it shows
  #leaving = []; // {key, share, said, slot, at, hue, ok}
  #angle = 0;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  /** Draw one frame at `now`, `passed` seconds after the last. `scene`: {wheel, places, width, pictures, hues, calm, live}. */
  draw(scene, now, passed) {
    const { wheel, places, width, calm, live } = scene;
    const context = sized(this.#canvas, width + 2 * ROOM_PX, places.height + 2 * ROOM_PX);
    context.translate(ROOM_PX, ROOM_PX);
    context.globalAlpha = live ? 1 : 0.45;
    if (live && !calm && wheel.seats.length > 0) this.#angle += passed * SPEED;
    if (places.kind === "ring") spokes(context, places, this.#angle);
    const seats = new Map(wheel.seats.map((seat) => [seat.slot, seat]));
    this.#buckets.length = Math.min(this.#buckets.length, places.spots.length);
    places.spots.forEach((spot, slot) => {
      const seat = seats.get(slot);
      const bucket = this.#follow(slot, seat, scene, now, passed);
      context.globalAlpha = (live ? 1 : 0.45) * (seat?.paused ? 0.5 : 1);
      this.#bucket(context, spot, bucket, scene, now);
    });
    context.globalAlpha = live ? 1 : 0.45;
    this.#flights(context, scene, now);
  }

  /** What slot `slot` shows now: its bucket turns to another image when its seat has one. */
  #follow(slot, seat, { wheel, hues, calm }, now, passed) {
    const before = this.#buckets[slot];
    const key = seat ? keyOf(seat) : null;
    if (before?.key !== key) {
      if (before?.key && !calm) {
        const gone = wheel.gone.find((image) => image.key === before.key);
        const ok = gone?.outcome === "ok";
        this.#leaving.push({ ...before, said: ok ? "✓" : "×", slot, at: now, ok });
      }
      const at = before && !calm ? now : -Infinity; // who was there when the page opened does not board
      this.#buckets[slot] = { key, at, share: 0, hue: hues[seat?.scheduler] ?? 0 };
    }
    const bucket = this.#buckets[slot];
    if (seat) {
      const share = seat.call / seat.num_calls;
      bucket.said = String(seat.call);
      bucket.share = calm || bucket.at === -Infinity ? share : bucket.share + (share - bucket.share) * (1 - Math.exp(-passed / CATCH_UP_S));
    }
    return bucket;
  }

  /** A free slot is hollow and dashed; one that is taken is filled and has a solid ring in its hue, from its first moment on. */
  #bucket(context, { x, y }, bucket, { places, pictures }, now) {
    const theme = colours();
    const radius = places.size / 2;
    if (bucket.key === null) {
      disc(context, x, y, radius, theme.surface);
      context.setLineDash([3, 5]);
      arc(context, x, y, radius - 2, 0, 1, theme.control, 1.25);
      context.setLineDash([]);
      word(context, x, y, "free", theme.muted, `11px ${theme.font}`);
      return;
    }
    const hue = theme.hues[bucket.hue];
    const grown = eased(outOf((now - bucket.at) / BOARDING_S));
    disc(context, x, y, radius, theme.sunken);
    portrait(context, x, y, (radius - 6) * (0.3 + 0.7 * grown), bucket, pictures);
    arc(context, x, y, radius - 2.5, 0, 1, theme.line, 5);
    arc(context, x, y, radius - 0.75, 0, 1, hue, 1.5);
    arc(context, x, y, radius - 2.5, 0, bucket.share, hue, 5);
    if (grown < 1) arc(context, x, y, radius + 8 * grown, 0, 1, hue, 3 * (1 - grown));
  }

  /** Those who have left fly off: outwards from a ring, upwards from rows. */
  #flights(context, { places, pictures }, now) {
    const theme = colours();
    this.#leaving = this.#leaving.filter(({ at, slot }) => now - at < LEAVING_S && slot < places.spots.length);
    for (const bucket of this.#leaving) {
      const gone = outOf((now - bucket.at) / LEAVING_S);
      const { x, y } = places.spots[bucket.slot];
      const far = places.size * 0.7 * eased(gone);
      const angle = places.middle ? Math.atan2(y - places.middle.y, x - places.middle.x) : -Math.PI / 2;
      const [to_x, to_y] = [x + far * Math.cos(angle), y + far * Math.sin(angle)];
      const radius = (places.size / 2 - 4) * (1 - 0.55 * eased(gone));
      context.globalAlpha = 1 - gone ** 2;
      disc(context, to_x, to_y, radius, theme.sunken);
      portrait(context, to_x, to_y, radius, bucket, pictures);
      arc(context, to_x, to_y, radius + 1.5, 0, 1, bucket.ok ? theme.good : theme.bad, 3);
      context.globalAlpha = 1;
    }
  }
}

function spokes(context, { middle, radius, hub }, angle) {
  const { line, control, accent } = colours();
  arc(context, middle.x, middle.y, radius, 0, 1, line, 8);
  arc(context, middle.x, middle.y, radius, 0, 1, control, 1);
  context.strokeStyle = line;
  context.lineWidth = 3;
  context.beginPath();
  for (let spoke = 0; spoke < 12; spoke++) {
    const [cos, sin] = [Math.cos(angle + (spoke * Math.PI) / 6), Math.sin(angle + (spoke * Math.PI) / 6)];
    context.moveTo(middle.x + hub * cos, middle.y + hub * sin);
    context.lineTo(middle.x + radius * cos, middle.y + radius * sin);
  }
  context.stroke();
  arc(context, middle.x, middle.y, hub, 0, 1, line, 6);
  context.fillStyle = accent; // one mark on the hub, so that its turning is seen
  context.beginPath();
  context.arc(middle.x + hub * Math.cos(angle), middle.y + hub * Math.sin(angle), 5, 0, 2 * Math.PI);
  context.fill();
}

/** The image as it looks by now; before its first picture, water as high as the image is far, and the number of its calls, or how it left. */
function portrait(context, x, y, radius, { key, share, said, hue }, pictures) {
  const picture = pictures.of(key);
  context.save();
  context.beginPath();
  context.arc(x, y, Math.max(0, radius), 0, 2 * Math.PI);
  context.clip();
  if (picture) {
    context.imageSmoothingQuality = "high";
    const scale = (2 * radius) / Math.min(picture.width, picture.height); // it covers the circle, whatever its sides
    const [width, height] = [picture.width * scale, picture.height * scale];
    context.drawImage(picture, x - width / 2, y - height / 2, width, height);
  } else {
    const { hues, ink, font } = colours();
    const alpha = context.globalAlpha;
    context.fillStyle = hues[hue];
    context.globalAlpha = alpha * 0.3;
    context.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
    context.fillRect(x - radius, y + radius - 2 * radius * share, 2 * radius, 2 * radius);
    context.globalAlpha = alpha;
    word(context, x, y, said, ink, `650 ${Math.max(10, Math.round(0.6 * radius))}px ${font}`);
  }
  context.restore();
}

function word(context, x, y, text, colour, font) {
  context.font = font;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = colour;
  context.fillText(text, x, y + 1);
}

function disc(context, x, y, radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

function arc(context, x, y, radius, from, to, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  context.arc(x, y, radius, (from - 0.25) * 2 * Math.PI, (to - 0.25) * 2 * Math.PI);
  context.stroke();
}
