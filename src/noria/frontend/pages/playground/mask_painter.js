// A dialog in which the user paints the mask of an image: with a mouse, a finger, a pen or the keyboard.
//
// A mask is a list of strokes in pixels of the image, so that each can be undone whatever the screen's size; it becomes a file of the
// image's size at the end. A stroke: {erase, radius, points: [[x, y], …]}, or "clear".

import { byId, colours, resizeCanvas } from "../shared/dom.js";
import { formatPercent } from "../shared/format.js";

const MIN_RADIUS_PX = 0.5; // of the image
const FRAME_PX = 300; // above and below the canvas: title, hint and tools
const OPACITY = 0.65;
const STRIPE_PX = 12;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const strokesOf = new WeakMap(); // of painted files, to go on with them

/** Whether `file` was painted here, so that one can go on. */
export const isPainted = (file) => strokesOf.has(file);

export class MaskPainter {
  #dialog = byId("painter");
  #canvas = byId("painter-canvas");
  #layer = document.createElement("canvas").getContext("2d", { willReadFrequently: true }); // the mask at the canvas's size
  #source = null; // {image, width, height}
  #strokes = [];
  #stroke = null; // the one being painted
  #cursor = null; // in pixels of the image; null: not shown
  #scale = 1; // pixels of the layer for one of the image
  #onMask = null;

  constructor() {
    const canvas = this.#canvas;
    canvas.addEventListener("pointerdown", (event) => this.#onDown(event));
    canvas.addEventListener("pointermove", (event) => this.#onMove(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.#end());
    canvas.addEventListener("pointerleave", () => this.#moveCursor(this.#stroke ? this.#cursor : null));
    canvas.addEventListener("blur", () => this.#end());
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    byId("painter-paint").addEventListener("click", () => this.#setErasing(false));
    byId("painter-erase").addEventListener("click", () => this.#setErasing(true));
    byId("painter-undo").addEventListener("click", () => this.#undo());
    byId("painter-clear").addEventListener("click", () => this.#add("clear"));
    byId("painter-cancel").addEventListener("click", () => this.#dialog.close());
    byId("painter-use").addEventListener("click", () => this.#use());
    this.#dialog.addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z") return;
      event.preventDefault();
      this.#undo();
    });
    new ResizeObserver(() => this.#resize()).observe(document.documentElement);
  }

  /** Paint on `source`, {image, width, height}, going on with `mask` if it was painted here; calls `onMask(file)`: null without paint. */
  open(source, mask, onMask) {
    [this.#source, this.#strokes, this.#onMask] = [source, [...(strokesOf.get(mask) ?? [])], onMask];
    this.#cursor = this.#stroke = null;
    this.#setErasing(false);
    this.#dialog.showModal();
    this.#resize();
    this.#showShare();
    this.#canvas.focus();
  }

  get #radius() {
    const { width, height } = this.#source;
    return Math.max(MIN_RADIUS_PX, (Math.min(width, height) * Number(byId("painter-size").value)) / 200); // a diameter in per cent
  }

  get #isErasing() {
    return byId("painter-erase").getAttribute("aria-pressed") === "true";
  }

  #setErasing(erase) {
    byId("painter-erase").setAttribute("aria-pressed", String(erase));
    byId("painter-paint").setAttribute("aria-pressed", String(!erase));
  }

  #positionOf({ clientX, clientY }) {
    const { left, top, width } = this.#canvas.getBoundingClientRect();
    const ratio = this.#source.width / width;
    return [(clientX - left) * ratio, (clientY - top) * ratio];
  }

  #onDown(event) {
    if (event.button !== 0 || !event.isPrimary) return;
    this.#canvas.setPointerCapture(event.pointerId);
    this.#begin(this.#positionOf(event));
  }

  #onMove(event) {
    if (!event.isPrimary) return;
    for (const each of event.getCoalescedEvents?.() ?? []) this.#moveCursor(this.#positionOf(each));
    this.#moveCursor(this.#positionOf(event));
  }

  /** Arrows move the brush by half of its size, with Shift by a pixel; Space puts it down and lifts it. */
  #onKey(event) {
    const { width, height } = this.#source;
    this.#cursor ??= [width / 2, height / 2];
    if (event.key === " ") {
      if (this.#stroke) this.#end();
      else this.#begin(this.#cursor);
    } else if (MOVES[event.key]) {
      const by = event.shiftKey ? 1 : Math.max(1, this.#radius);
      const [x, y] = MOVES[event.key].map((direction, axis) => this.#cursor[axis] + direction * by);
      this.#moveCursor([Math.min(Math.max(x, 0), width), Math.min(Math.max(y, 0), height)]);
    } else return;
    event.preventDefault();
  }

  #begin(at) {
    this.#stroke = { erase: this.#isErasing, radius: this.#radius, points: [at] };
    this.#strokes.push(this.#stroke);
    this.#moveCursor(at);
  }

  #moveCursor(at) {
    this.#cursor = at;
    if (this.#stroke && at) {
      this.#stroke.points.push(at);
      drawStrokes(
        this.#layer,
        [{ ...this.#stroke, points: this.#stroke.points.slice(-2) }],
        this.#scale,
        stripes(this.#layer, 1 / this.#scale),
      );
    }
    this.#draw();
  }

  #end() {
    if (!this.#stroke) return;
    this.#stroke = null;
    this.#showShare();
  }

  #add(stroke) {
    this.#strokes.push(stroke);
    this.#redraw();
  }

  #undo() {
    this.#stroke = null;
    this.#strokes.pop();
    this.#redraw();
  }

  #redraw() {
    const { width, height } = this.#layer.canvas;
    this.#layer.clearRect(0, 0, width, height);
    drawStrokes(this.#layer, this.#strokes, this.#scale, stripes(this.#layer, 1 / this.#scale));
    this.#draw();
    this.#showShare();
  }

  #resize() {
    if (!this.#dialog.open) return;
    const { width, height } = this.#source;
    const available = [this.#dialog.clientWidth - 32, Math.max(innerHeight - FRAME_PX, 120)];
    const zoom = Math.min(available[0] / width, available[1] / height);
    const size = [width * zoom, height * zoom].map((side) => Math.max(1, Math.round(side)));
    this.#canvas.style.width = `${size[0]}px`;
    resizeCanvas(this.#canvas, ...size);
    Object.assign(this.#layer.canvas, { width: this.#canvas.width, height: this.#canvas.height });
    this.#scale = this.#canvas.width / width;
    this.#redraw();
  }

  #draw() {
    const { image, width } = this.#source;
    const [displayWidth, displayHeight] = [this.#canvas.clientWidth, this.#canvas.clientHeight];
    const context = resizeCanvas(this.#canvas, displayWidth, displayHeight);
    context.drawImage(image, 0, 0, displayWidth, displayHeight);
    context.globalAlpha = OPACITY;
    context.drawImage(this.#layer.canvas, 0, 0, displayWidth, displayHeight);
    context.globalAlpha = 1;
    if (!this.#cursor) return;
    const zoom = displayWidth / width;
    for (const [colour, lineWidth] of [
      ["#000", 3],
      ["#fff", 1.5],
    ]) {
      Object.assign(context, { strokeStyle: colour, lineWidth });
      context.beginPath();
      context.arc(this.#cursor[0] * zoom, this.#cursor[1] * zoom, Math.max(this.#radius * zoom, 2), 0, 2 * Math.PI);
      context.stroke();
    }
  }

  /** Say how much is painted; returns whether anything is. */
  #showShare() {
    const { data } = this.#layer.getImageData(0, 0, this.#canvas.width, this.#canvas.height);
    let painted = 0;
    for (let k = 3; k < data.length; k += 4) painted += data[k] >= 128;
    const share = painted / (data.length / 4);
    byId("painter-share").textContent =
      painted === 0 ? "Nothing is painted yet." : `${share < 0.005 ? "Under 1 %" : formatPercent(share)} is repainted.`;
    const focused = document.activeElement;
    byId("painter-undo").disabled = this.#strokes.length === 0;
    byId("painter-clear").disabled = painted === 0;
    if (focused?.disabled) this.#canvas.focus(); // a disabled button loses the keys
    return painted > 0;
  }

  async #use() {
    const mask = this.#showShare() ? await maskFile(this.#source, this.#strokes) : null;
    if (mask) strokesOf.set(mask, this.#strokes);
    this.#dialog.close();
    this.#onMask(mask);
  }
}

/** A pattern that is seen on any image; `scale`: pixels of the context's unit for one of the pattern. */
export function stripes(context, scale = 1) {
  const tile = Object.assign(document.createElement("canvas"), { width: STRIPE_PX, height: STRIPE_PX });
  const painter = tile.getContext("2d");
  const { accent, surface } = colours();
  for (let y = 0; y < STRIPE_PX; y++) {
    for (let x = 0; x < STRIPE_PX; x++) {
      painter.fillStyle = (x + y) % STRIPE_PX < STRIPE_PX / 4 ? surface : accent;
      painter.fillRect(x, y, 1, 1);
    }
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(scale));
  return pattern;
}

function drawStrokes(context, strokes, scale, colour) {
  for (const stroke of strokes) {
    if (stroke === "clear") {
      context.clearRect(0, 0, context.canvas.width, context.canvas.height);
      continue;
    }
    context.save();
    context.scale(scale, scale);
    context.globalCompositeOperation = stroke.erase ? "destination-out" : "source-over";
    Object.assign(context, { lineCap: "round", lineJoin: "round", lineWidth: 2 * stroke.radius, strokeStyle: colour });
    context.beginPath();
    const [x, y] = stroke.points[0];
    context.moveTo(x, y);
    context.lineTo(x + 1e-3, y); // a line without a length would leave no disc
    for (const point of stroke.points) context.lineTo(...point);
    context.stroke();
    context.restore();
  }
}

/** A PNG of the image's size: white is repainted, black is kept. */
async function maskFile({ width, height }, strokes) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  drawStrokes(context, strokes, 1, "#fff");
  context.globalCompositeOperation = "destination-over";
  context.fillRect(0, 0, width, height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], "mask.png", { type: "image/png" });
}
