// The frame of a plot over time: its size in px, its axes.

import { linear, svg, timeTicks } from "../shared/svg.js";

export const [HEIGHT_PX, AXIS_PX, GUTTER_PX, RIGHT_PX, TOP_PX] = [150, 20, 46, 10, 8];

/** A scale of the times of `points`, [{at}], to px from the left of a plot `width` px wide. */
export function timeScale(points, width) {
  const [from, to] = [points[0].at, points.at(-1).at];
  return linear(from === to ? [from - 1, to] : [from, to], [GUTTER_PX + 5, width - RIGHT_PX - 5]);
}

/** The axis of times, below the plot. */
export function timeAxis(points, toX, width) {
  const parts = [svg("line", { class: "axis", x1: GUTTER_PX, x2: width - RIGHT_PX, y1: HEIGHT_PX, y2: HEIGHT_PX })];
  for (const [at, text] of timeTicks(points[0].at, points.at(-1).at, 4))
    parts.push(svg("text", { class: "tick", x: toX(at), y: HEIGHT_PX + 15, "text-anchor": "middle", text }));
  return parts;
}

/** Lines across the plot with their texts, from [[value, text]]. */
export function valueAxis(ticks, toY, width) {
  return ticks.flatMap(([value, text]) => [
    svg("line", { class: "grid", x1: GUTTER_PX, x2: width - RIGHT_PX, y1: toY(value), y2: toY(value) }),
    svg("text", { class: "tick", x: GUTTER_PX - 5, y: toY(value) + 4, "text-anchor": "end", text }),
  ]);
}
