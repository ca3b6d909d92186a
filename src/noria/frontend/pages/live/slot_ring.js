// Draws the slots on a canvas: a circle for each with its image's thumbnail and a ring of progress, and images that join and leave.
// A few slots stand on a turning wheel with spokes.

import { colours, resizeCanvas } from "../shared/dom.js";
import { imageKey } from "./state.js";

const JOIN_ANIMATION_S = 0.4;
const LEAVE_ANIMATION_S = 0.8;
const CATCH_UP_S = 0.12; // time constant with which a progress ring follows the last view
const ROTATION_RAD_PER_S = 0.5; // of the spokes while images are running
const MARGIN_PX = 24; // around the layout, as in live.css: leaving images move into it

const easeOut = (value) => 1 - (1 - value) ** 3;
const clamp01 = (value) => Math.min(1, Math.max(0, value));

export class SlotRing {
  #canvas;
  #slots = []; // by slot: {key, progress, label, at, hue} of the image shown
  #departing = []; // {key, progress, label, slot, at, hue, ok}
  #angle = 0;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  /** Draw one frame at `now`, `passed` seconds after the last. `scene`: {view, layout, width, thumbnails, hues, reducedMotion, live}. */
  draw(scene, now, passed) {
    const { view, layout, width, reducedMotion, live } = scene;
    const context = resizeCanvas(this.#canvas, width + 2 * MARGIN_PX, layout.height + 2 * MARGIN_PX);
    context.translate(MARGIN_PX, MARGIN_PX);
    context.globalAlpha = live ? 1 : 0.45;
    if (live && !reducedMotion && view.slots.length > 0) this.#angle += passed * ROTATION_RAD_PER_S;
    if (layout.kind === "ring") drawSpokes(context, layout, this.#angle);
    const images = new Map(view.slots.map((image) => [image.slot, image]));
    this.#slots.length = Math.min(this.#slots.length, layout.centers.length);
    layout.centers.forEach((center, slot) => {
      const image = images.get(slot);
      const slotState = this.#updateSlot(slot, image, scene, now, passed);
      context.globalAlpha = (live ? 1 : 0.45) * (image?.paused ? 0.5 : 1);
      this.#drawSlot(context, center, slotState, scene, now);
    });
    context.globalAlpha = live ? 1 : 0.45;
    this.#drawDeparting(context, scene, now);
  }

  /** Update and return the state of slot `slot`, which holds `image` or is free. */
  #updateSlot(slot, image, { view, hues, reducedMotion }, now, passed) {
    const before = this.#slots[slot];
    const key = image ? imageKey(image) : null;
    if (before?.key !== key) {
      if (before?.key && !reducedMotion) {
        const departure = view.departures.find((each) => each.key === before.key);
        const ok = departure?.outcome === "ok";
        this.#departing.push({ ...before, label: ok ? "✓" : "×", slot, at: now, ok });
      }
      const at = before && !reducedMotion ? now : -Infinity; // images that were there when the page opened are not animated
      this.#slots[slot] = { key, at, progress: 0, hue: hues[image?.settings.scheduler] ?? 0 };
    }
    const slotState = this.#slots[slot];
    if (image) {
      const progress = image.call / image.num_calls;
      const animated = !reducedMotion && slotState.at !== -Infinity;
      slotState.label = String(image.call);
      slotState.progress = animated
        ? slotState.progress + (progress - slotState.progress) * (1 - Math.exp(-passed / CATCH_UP_S))
        : progress;
    }
    return slotState;
  }

  /** Draw a free slot as a dashed circle, a taken one filled and with a solid ring in its image's hue. */
  #drawSlot(context, { x, y }, slotState, { layout, thumbnails }, now) {
    const theme = colours();
    const radius = layout.size / 2;
    if (slotState.key === null) {
      drawDisc(context, x, y, radius, theme.surface);
      context.setLineDash([3, 5]);
      drawArc(context, x, y, radius - 2, 0, 1, theme.control, 1.25);
      context.setLineDash([]);
      drawText(context, x, y, "free", theme.muted, `11px ${theme.font}`);
      return;
    }
    const hue = theme.hues[slotState.hue];
    const joinProgress = easeOut(clamp01((now - slotState.at) / JOIN_ANIMATION_S));
    drawDisc(context, x, y, radius, theme.sunken);
    drawThumbnail(context, x, y, (radius - 6) * (0.3 + 0.7 * joinProgress), slotState, thumbnails);
    drawArc(context, x, y, radius - 2.5, 0, 1, theme.line, 5);
    drawArc(context, x, y, radius - 0.75, 0, 1, hue, 1.5);
    drawArc(context, x, y, radius - 2.5, 0, slotState.progress, hue, 5);
    if (joinProgress < 1) drawArc(context, x, y, radius + 8 * joinProgress, 0, 1, hue, 3 * (1 - joinProgress));
  }

  /** Draw leaving images, which move outwards from a ring and upwards from rows. */
  #drawDeparting(context, { layout, thumbnails }, now) {
    const theme = colours();
    this.#departing = this.#departing.filter(
      ({ at, slot }) => now - at < LEAVE_ANIMATION_S && slot < layout.centers.length,
    );
    for (const image of this.#departing) {
      const share = clamp01((now - image.at) / LEAVE_ANIMATION_S);
      const { x, y } = layout.centers[image.slot];
      const distance = layout.size * 0.7 * easeOut(share);
      const angle = layout.center ? Math.atan2(y - layout.center.y, x - layout.center.x) : -Math.PI / 2;
      const [to_x, to_y] = [x + distance * Math.cos(angle), y + distance * Math.sin(angle)];
      const radius = (layout.size / 2 - 4) * (1 - 0.55 * easeOut(share));
      context.globalAlpha = 1 - share ** 2;
      drawDisc(context, to_x, to_y, radius, theme.sunken);
      drawThumbnail(context, to_x, to_y, radius, image, thumbnails);
      drawArc(context, to_x, to_y, radius + 1.5, 0, 1, image.ok ? theme.good : theme.bad, 3);
      context.globalAlpha = 1;
    }
  }
}

function drawSpokes(context, { center, radius, hub }, angle) {
  const { line, control, accent } = colours();
  drawArc(context, center.x, center.y, radius, 0, 1, line, 8);
  drawArc(context, center.x, center.y, radius, 0, 1, control, 1);
  context.strokeStyle = line;
  context.lineWidth = 3;
  context.beginPath();
  for (let spoke = 0; spoke < 12; spoke++) {
    const [cos, sin] = [Math.cos(angle + (spoke * Math.PI) / 6), Math.sin(angle + (spoke * Math.PI) / 6)];
    context.moveTo(center.x + hub * cos, center.y + hub * sin);
    context.lineTo(center.x + radius * cos, center.y + radius * sin);
  }
  context.stroke();
  drawArc(context, center.x, center.y, hub, 0, 1, line, 6);
  context.fillStyle = accent; // one mark on the hub makes its rotation visible
  context.beginPath();
  context.arc(center.x + hub * Math.cos(angle), center.y + hub * Math.sin(angle), 5, 0, 2 * Math.PI);
  context.fill();
}

/** Draw the image's thumbnail; without one, a tint as high as its progress, and its label. */
function drawThumbnail(context, x, y, radius, { key, progress, label, hue }, thumbnails) {
  const thumbnail = thumbnails.get(key);
  context.save();
  context.beginPath();
  context.arc(x, y, Math.max(0, radius), 0, 2 * Math.PI);
  context.clip();
  if (thumbnail) {
    context.imageSmoothingQuality = "high";
    const scale = (2 * radius) / Math.min(thumbnail.width, thumbnail.height); // it covers the circle
    const [width, height] = [thumbnail.width * scale, thumbnail.height * scale];
    context.drawImage(thumbnail, x - width / 2, y - height / 2, width, height);
  } else {
    const { hues, ink, font } = colours();
    const alpha = context.globalAlpha;
    context.fillStyle = hues[hue];
    context.globalAlpha = alpha * 0.3;
    context.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
    context.fillRect(x - radius, y + radius - 2 * radius * progress, 2 * radius, 2 * radius);
    context.globalAlpha = alpha;
    drawText(context, x, y, label, ink, `650 ${Math.max(10, Math.round(0.6 * radius))}px ${font}`);
  }
  context.restore();
}

function drawText(context, x, y, text, colour, font) {
  context.font = font;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = colour;
  context.fillText(text, x, y + 1);
}

function drawDisc(context, x, y, radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/** Draw an arc; `from` and `to` are turns, clockwise from the top. */
function drawArc(context, x, y, radius, from, to, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  context.arc(x, y, radius, (from - 0.25) * 2 * Math.PI, (to - 0.25) * 2 * Math.PI);
  context.stroke();
}
