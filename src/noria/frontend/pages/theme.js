// The colours of style.css for canvases, and whether things may move. Both follow the system's settings while the page is open.

const NAMES = ["surface", "sunken", "ink", "muted", "line", "control", "accent", "good", "warn", "bad", "on-hue"];
const STAGES = ["encode", "denoise", "decode"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(prefers-reduced-motion: reduce)");

let read = null;
dark.addEventListener("change", () => (read = null));

/** {ink, muted, …, stages: {encode, …}, hues: [unknown, hue 1, …]} as CSS colours. */
export function colours() {
  if (read) return read;
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  read = Object.fromEntries(NAMES.map((name) => [name, of(name)]));
  read.stages = Object.fromEntries(STAGES.map((name) => [name, of(`stage-${name}`)]));
  read.hues = [read.control, ...Array.from({ length: 8 }, (_, k) => of(`hue-${k + 1}`))];
  read.font = style.getPropertyValue("--font");
  return read;
}

/** Whether things should stand still: who gets sick of movement has said so. */
export const calm = () => still.matches;

/** `canvas` as large as `width` × `height` CSS px, for the screen's own pixels; its context, in CSS px. */
export function sized(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio || 1, 2);
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
