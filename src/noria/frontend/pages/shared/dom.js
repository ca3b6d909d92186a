// Helpers for elements and canvases. Colours and motion follow the system's settings while the page is open.

import { formatDuration } from "./format.js";

export const byId = (id) => document.getElementById(id);

/** Create a `tag` with its properties, `class`, `text`, `data` (data attributes), `on` (listeners by event) and `children`. */
export function make(tag, { class: name, text, data, on, ...properties } = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  if (data) Object.assign(element.dataset, data);
  for (const [event, listener] of Object.entries(on ?? {})) element.addEventListener(event, listener);
  element.append(...children);
  return element;
}

/** Set an element's text, if it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Hide `element`; move the focus to `next` if it was inside. */
export function hide(element, next) {
  const hadFocus = element.contains(document.activeElement);
  element.hidden = true;
  if (hadFocus) next.focus();
}

/** Create a button that calls `onClick`. */
export const button = (text, onClick, properties = {}) =>
  make("button", { type: "button", text, ...properties, on: { click: onClick } });

/** Copy `text` to the clipboard, also where the browser has no clipboard API for pages without TLS. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const before = document.activeElement;
  const area = make("textarea", { value: text, class: "visually-hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  before?.focus();
}

/** Create a group of buttons that copy: `snippets` has names, and functions that return the text. Calls `onCopied(name)`. */
export function copyButtons(id, snippets, onCopied) {
  const choices = snippets.map(([name, write]) =>
    button(name, async ({ currentTarget: pressed }) => {
      await copy(write());
      onCopied(name);
      pressed.classList.add("copied");
      setTimeout(() => pressed.classList.remove("copied"), 1500);
    }),
  );
  const group = make(
    "div",
    { class: "actions copies", role: "group" },
    make("span", { class: "small muted", text: "Copy as", id }),
    ...choices,
  );
  group.setAttribute("aria-labelledby", id);
  return group;
}

/** Create a bar of stages, and their durations as text. A stage: [name, CSS class, meaning, seconds]. */
export function stageBar(stages) {
  const bar = make("div", { class: "bar", ariaHidden: "true" });
  const numbers = make("dl", { class: "stages" });
  for (const [name, className, meaning, seconds] of stages) {
    const part = make("span", { class: `stage ${className}` });
    part.style.flexGrow = Math.max(seconds, 0) * 1e6; // below 1 in all, the parts would not fill the bar
    bar.append(part);
    const [term, duration] = [
      make("dt", { class: `stage ${className}`, text: name }),
      make("dd", { class: "number", text: formatDuration(seconds) }),
    ];
    numbers.append(make("div", { title: meaning }, term, duration));
  }
  return [bar, numbers];
}

/** The bytes of a base64 string. */
export const decodeBase64 = (b64) => Uint8Array.from(atob(b64), (character) => character.charCodeAt(0));

const COLOUR_NAMES = [
  "surface",
  "sunken",
  "ink",
  "muted",
  "line",
  "control",
  "accent",
  "good",
  "warn",
  "bad",
  "on-hue",
];
const STAGES = ["image-encode", "text-encode", "denoise", "decode"];
const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

let cached = null;
darkScheme.addEventListener("change", () => (cached = null));

/** The variables of style.css for canvases: {ink, muted, …, stages: {denoise, …}, hues: [unknown, hue 1, …], font}. */
export function colours() {
  if (cached) return cached;
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  cached = Object.fromEntries(COLOUR_NAMES.map((name) => [name, of(name)]));
  cached.stages = Object.fromEntries(STAGES.map((name) => [name, of(`stage-${name}`)]));
  cached.hues = [cached.control, ...Array.from({ length: 8 }, (_, k) => of(`hue-${k + 1}`))];
  cached.font = style.getPropertyValue("--font");
  return cached;
}

/** Whether the system asks for less motion. */
export const prefersReducedMotion = () => reducedMotion.matches;

/** Resize `canvas` to `width` × `height` CSS px at the screen's resolution; returns its cleared context, in CSS px. */
export function resizeCanvas(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio || 1, 2);
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
