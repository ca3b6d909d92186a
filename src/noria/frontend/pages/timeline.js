// Draws the last seconds: who was in which slot, and what the turns were spent on, on one axis of time.

import { colours, sized } from "./theme.js";

export const BIN_S = 0.25;
const GUTTER_PX = 26;
const AXIS_PX = 18;
const STAGES_PX = 56;

/** How many seconds `width` px show. */
export const span = (width) => (width < 450 ? 12 : 20);

/** The shares of each `BIN_S` that went into the stages: a Map of bin → [encode, denoise, decode], each 0 to 1. Pure. */
export function binned(turns) {
  const bins = new Map();
  for (const { began_at, seconds, encode_s, decode_s } of turns) {
    if (seconds <= 0) continue;
    const spent = [encode_s, Math.max(0, seconds - encode_s - decode_s), decode_s];
    const ended = began_at + seconds;
    for (let bin = Math.floor(began_at / BIN_S); bin * BIN_S < ended; bin++) {
      const within = Math.min(ended, (bin + 1) * BIN_S) - Math.max(began_at, bin * BIN_S);
      const shares = bins.get(bin) ?? [0, 0, 0];
      bins.set(bin, shares.map((share, stage) => share + (spent[stage] / seconds) * (within / BIN_S)));
    }
  }
  return bins;
}

/** The height of a slot's row: less where there are many. */
export const rowHeight = (num_slots) => (num_slots <= 8 ? 22 : num_slots <= 16 ? 15 : num_slots <= 32 ? 9 : 6);

/** Draw a bar for each stay in a slot, up to `now`; the slot `chosen`, if any, is marked. */
export function drawBars(canvas, width, { wheel, hues, chosen }, now) {
  const row = rowHeight(wheel.num_slots);
  const height = row * wheel.num_slots + AXIS_PX;
  const context = sized(canvas, width, height);
  const theme = colours();
  const across = (at) => width - ((now - at) / span(width)) * (width - GUTTER_PX);
  context.font = `11px ${theme.font}`;
  context.textBaseline = "middle";
  grid(context, across, width, height - AXIS_PX, now);
  for (let slot = 0; slot < wheel.num_slots; slot++) {
    context.fillStyle = slot === chosen ? theme.accent : theme.sunken;
    context.fillRect(GUTTER_PX, row * slot + 1, width - GUTTER_PX, row - 2);
  }
  context.save();
  context.beginPath();
  context.rect(GUTTER_PX, 0, width - GUTTER_PX, height);
  context.clip();
  for (const bar of wheel.bars) if (bar.slot < wheel.num_slots) drawBar(context, bar, row, across, now, hues, width);
  context.restore();
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  const every = row >= 15 ? 1 : row >= 9 ? 4 : 8;
  for (let slot = 0; slot < wheel.num_slots; slot += every) {
    context.fillText(String(slot), GUTTER_PX - 6, row * slot + Math.max(row, 11) / 2);
  }
}

function drawBar(context, bar, row, across, now, hues, width) {
  const theme = colours();
  const from = across(bar.from);
  const to = bar.to === null ? width : across(Math.min(bar.to, now));
  if (to < GUTTER_PX || from > width) return;
  const inset = row >= 9 ? 2 : 0.5;
  const [top, tall] = [row * bar.slot + inset, row - 2 * inset];
  const wide = Math.max(1.5, to - from - 1.5);
  context.fillStyle = theme.hues[hues[bar.scheduler] ?? 0];
  context.beginPath();
  context.roundRect(from, top, wide, tall, bar.to === null ? [4, 0, 0, 4] : Math.min(4, tall / 2));
  context.fill();
  if (bar.outcome !== null && bar.outcome !== "ok") {
    context.fillStyle = theme.bad;
    context.fillRect(from + wide - 4, top, 4, tall);
  }
  const visible = Math.max(from, GUTTER_PX);
  if (row < 15 || bar.num_steps === null || to - visible < 28) return;
  const text = to - visible > 66 ? `${bar.num_steps} steps` : String(bar.num_steps);
  context.fillStyle = theme["on-hue"];
  context.textAlign = "left";
  context.fillText(text, visible + 6, row * bar.slot + row / 2 + 0.5);
}

/** Draw the stages of `bins` (of `binned`) as stacked columns up to `now`. */
export function drawStages(canvas, width, bins, now) {
  const context = sized(canvas, width, STAGES_PX + AXIS_PX);
  const theme = colours();
  const scale = (width - GUTTER_PX) / span(width);
  const across = (at) => width - (now - at) * scale;
  context.font = `11px ${theme.font}`;
  context.textBaseline = "middle";
  context.fillStyle = theme.sunken;
  context.fillRect(GUTTER_PX, 0, width - GUTTER_PX, STAGES_PX);
  grid(context, across, width, STAGES_PX, now);
  const fills = [theme.stages.encode, theme.stages.denoise, theme.stages.decode];
  context.save();
  context.beginPath();
  context.rect(GUTTER_PX, 0, width - GUTTER_PX, STAGES_PX);
  context.clip();
  for (const [bin, shares] of bins) {
    const x = across(bin * BIN_S);
    if (x < GUTTER_PX - BIN_S * scale || x > width) continue;
    let top = STAGES_PX;
    // Denoising, which is most, lies below: what is small is seen on top of it.
    for (const stage of [1, 0, 2]) {
      const tall = shares[stage] * STAGES_PX;
      context.fillStyle = fills[stage];
      context.fillRect(x, (top -= tall), Math.max(1, BIN_S * scale - 1), tall);
    }
  }
  context.restore();
}

function grid(context, across, width, height, now) {
  const theme = colours();
  context.fillStyle = theme.muted;
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  context.textAlign = "center";
  context.beginPath();
  for (let back = 5; back < span(width); back += 5) {
    const x = Math.round(across(now - back)) + 0.5;
    context.moveTo(x, 0);
    context.lineTo(x, height + 3);
    context.fillText(`−${back} s`, x, height + AXIS_PX / 2 + 2);
  }
  context.stroke();
  context.textAlign = "right";
  context.fillText("now", width, height + AXIS_PX / 2 + 2);
}
