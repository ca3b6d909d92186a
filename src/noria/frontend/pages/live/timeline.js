// Draws the last seconds on one time axis: which image was in which slot, and the stages of the iterations.

import { colours, resizeCanvas } from "../shared/dom.js";
import { describeWork } from "../shared/format.js";

export const BIN_S = 0.25;
const GUTTER_PX = 26;
const AXIS_PX = 18;
const STAGES_PX = 56;
const STAGES = ["image-encode", "text-encode", "denoise", "decode"];

/** How many seconds a timeline of `width` px shows. */
export const visibleSeconds = (width) => (width < 450 ? 12 : 20);

/** The stages' shares of each `BIN_S`: a Map of bin → shares, each 0 to 1, in the order of STAGES. Pure. */
export function binIterations(iterations) {
  const bins = new Map();
  for (const { started_at, duration_s, image_encode_s = 0, text_encode_s, decode_s } of iterations) {
    if (duration_s <= 0) continue;
    const denoise_s = Math.max(0, duration_s - image_encode_s - text_encode_s - decode_s);
    const stageSeconds = [image_encode_s, text_encode_s, denoise_s, decode_s];
    const ended_at = started_at + duration_s;
    for (let bin = Math.floor(started_at / BIN_S); bin * BIN_S < ended_at; bin++) {
      const overlap = Math.min(ended_at, (bin + 1) * BIN_S) - Math.max(started_at, bin * BIN_S);
      const shares = bins.get(bin) ?? STAGES.map(() => 0);
      bins.set(
        bin,
        shares.map((share, stage) => share + (stageSeconds[stage] / duration_s) * (overlap / BIN_S)),
      );
    }
  }
  return bins;
}

/** The height of a slot's row in px: smaller if there are many. */
export const rowHeight = (num_slots) => (num_slots <= 8 ? 22 : num_slots <= 16 ? 15 : num_slots <= 32 ? 9 : 6);

/** Draw a bar for each image from joining to leaving, up to `now`; marks the slot `selected`, if any. */
export function drawSlotBars(canvas, width, { view, hues, selected }, now) {
  const row = rowHeight(view.num_shown);
  const height = row * view.num_shown + AXIS_PX;
  const context = resizeCanvas(canvas, width, height);
  const theme = colours();
  const toX = (at) => width - ((now - at) / visibleSeconds(width)) * (width - GUTTER_PX);
  context.font = `11px ${theme.font}`;
  context.textBaseline = "middle";
  drawTimeGrid(context, toX, width, height - AXIS_PX, now);
  for (let slot = 0; slot < view.num_shown; slot++) {
    context.fillStyle = slot === selected ? theme.accent : theme.sunken;
    context.fillRect(GUTTER_PX, row * slot + 1, width - GUTTER_PX, row - 2);
  }
  context.save();
  context.beginPath();
  context.rect(GUTTER_PX, 0, width - GUTTER_PX, height);
  context.clip();
  for (const bar of view.bars) if (bar.slot < view.num_shown) drawBar(context, bar, row, toX, now, hues, width);
  context.restore();
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  const every = row >= 15 ? 1 : row >= 9 ? 4 : 8;
  for (let slot = 0; slot < view.num_shown; slot += every) {
    context.fillText(String(slot), GUTTER_PX - 6, row * slot + Math.max(row, 11) / 2);
  }
}

function drawBar(context, bar, row, toX, now, hues, width) {
  const theme = colours();
  const from = toX(bar.from);
  const to = bar.to === null ? width : toX(Math.min(bar.to, now));
  if (to < GUTTER_PX || from > width) return;
  const inset = row >= 9 ? 2 : 0.5;
  const [top, barHeight] = [row * bar.slot + inset, row - 2 * inset];
  const barWidth = Math.max(1.5, to - from - 1.5);
  context.fillStyle = theme.hues[hues[bar.settings?.scheduler] ?? 0];
  context.beginPath();
  context.roundRect(from, top, barWidth, barHeight, bar.to === null ? [4, 0, 0, 4] : Math.min(4, barHeight / 2));
  context.fill();
  if (bar.outcome !== null && bar.outcome !== "ok") {
    context.fillStyle = theme.bad;
    context.fillRect(from + barWidth - 4, top, 4, barHeight);
  }
  const visible = Math.max(from, GUTTER_PX);
  if (row < 15 || bar.settings === null || to - visible < 28) return;
  const work = describeWork(bar.settings);
  const text = to - visible > 66 ? work : work.split(" ")[0];
  context.fillStyle = theme["on-hue"];
  context.textAlign = "left";
  context.fillText(text, visible + 6, row * bar.slot + row / 2 + 0.5);
}

/** Draw the `bins` of `binIterations` as stacked columns up to `now`. */
export function drawStages(canvas, width, bins, now) {
  const context = resizeCanvas(canvas, width, STAGES_PX + AXIS_PX);
  const theme = colours();
  const scale = (width - GUTTER_PX) / visibleSeconds(width);
  const toX = (at) => width - (now - at) * scale;
  context.font = `11px ${theme.font}`;
  context.textBaseline = "middle";
  context.fillStyle = theme.sunken;
  context.fillRect(GUTTER_PX, 0, width - GUTTER_PX, STAGES_PX);
  drawTimeGrid(context, toX, width, STAGES_PX, now);
  const fills = STAGES.map((name) => theme.stages[name]);
  context.save();
  context.beginPath();
  context.rect(GUTTER_PX, 0, width - GUTTER_PX, STAGES_PX);
  context.clip();
  for (const [bin, shares] of bins) {
    const x = toX(bin * BIN_S);
    if (x < GUTTER_PX - BIN_S * scale || x > width) continue;
    let top = STAGES_PX;
    // Denoising, the largest part, is at the bottom, so that the small parts are visible.
    for (const stage of [2, 0, 1, 3]) {
      const barHeight = shares[stage] * STAGES_PX;
      context.fillStyle = fills[stage];
      top -= barHeight;
      context.fillRect(x, top, Math.max(1, BIN_S * scale - 1), barHeight);
    }
  }
  context.restore();
}

function drawTimeGrid(context, toX, width, height, now) {
  const theme = colours();
  context.fillStyle = theme.muted;
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  context.textAlign = "center";
  context.beginPath();
  for (let back = 5; back < visibleSeconds(width); back += 5) {
    const x = Math.round(toX(now - back)) + 0.5;
    context.moveTo(x, 0);
    context.lineTo(x, height + 3);
    context.fillText(`−${back} s`, x, height + AXIS_PX / 2 + 2);
  }
  context.stroke();
  context.textAlign = "right";
  context.fillText("now", width, height + AXIS_PX / 2 + 2);
}
