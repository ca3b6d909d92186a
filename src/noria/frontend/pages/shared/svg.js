// Plots as SVG: elements, scales and axes. Colours are in the style sheets.

const NAMESPACE = "http://www.w3.org/2000/svg";
const TICKS_S = [
  1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000,
  31536000,
];

/** Create an SVG element with its attributes; `text` is its text. */
export function svg(tag, { text, ...attributes } = {}, ...children) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

/** A picture of `width` × `height` px with a description. */
export const picture = (width, height, description, ...children) =>
  svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": description }, ...children);

/** A linear scale from `domain` to `range`; clamps. */
export function linear([from, to], [start, end]) {
  const length = to - from || 1;
  return (value) => start + Math.min(Math.max((value - from) / length, 0), 1) * (end - start);
}

/** A logarithmic scale; clamps. */
export function logarithmic([from, to], range) {
  const scale = linear([Math.log10(from), Math.log10(to)], range);
  return (value) => scale(value > 0 ? Math.log10(value) : -Infinity);
}

/** The path through points [x, y], in steps if `isStep`: a value holds until the next. */
export function pathOf(points, isStep = false) {
  return points
    .map(([x, y], index) =>
      index === 0 ? `M${round(x)} ${round(y)}` : isStep ? `H${round(x)}V${round(y)}` : `L${round(x)} ${round(y)}`,
    )
    .join("");
}

const round = (value) => Math.round(10 * value) / 10;

/** About `num` round times, from `from` to `to`, as [time, text]: ages, the shorter the time shown, the finer. */
export function timeTicks(from, to, num) {
  const step = TICKS_S.find((seconds) => (to - from) / seconds <= num) ?? TICKS_S.at(-1);
  const ticks = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push([at, formatTick(at, step)]);
  return ticks;
}

function formatTick(at, step) {
  const text = new Date(1000 * at).toISOString();
  if (step >= 86400) return text.slice(5, 10);
  const clock = text.slice(11, step < 60 ? 19 : 16);
  return clock === "00:00" ? text.slice(5, 10) : clock;
}

/** A round number for the top of an axis that begins at 0. */
export function niceTop(value) {
  const magnitude = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((factor) => factor * magnitude).find((top) => top >= value) ?? value;
}
