// What a shadow did beside its control, over time: copies, errors, computing time, distance of outputs.

import { formatCount, formatTime } from "../registry/registry_format.js";
import { pluralize } from "../shared/format.js";
import { linear, niceTop, pathOf, picture, svg } from "../shared/svg.js";
import { AXIS_PX, GUTTER_PX, HEIGHT_PX, RIGHT_PX, TOP_PX, timeAxis, timeScale, valueAxis } from "./plot_frame.js";

/** The events of a deployment in which copies were answered or dropped, as [{at, ...counts}]. Pure. */
export const shadowPoints = (deployment) =>
  deployment.events
    .filter(({ shadow }) => shadow && (shadow.counts.num_answers || shadow.counts.num_dropped))
    .map(({ change, shadow }) => ({ at: change.at, ...shadow.counts }));

/** "10 % of the requests, for 500 answers". Pure. */
export function describeShadow({ percent, max_s, max_answers }) {
  const end =
    max_s !== null
      ? `, for ${formatCount(max_s)} s`
      : max_answers !== null
        ? `, for ${pluralize(max_answers, "answer")}`
        : "";
  return `${percent} % of the requests${end}`;
}

/** The plots of `points`, each `width` px wide: [{title, about, picture, legend: [class, text][]}]. `hues` has a class for each arm. */
export function shadowPlots(points, width, hues) {
  const plots = [
    plot(
      points,
      width,
      "Copies of requests",
      "Since the shadow began. Dropped ones were never computed.",
      formatCount,
      [
        [hues.canary, "answered", ({ num_answers }) => num_answers],
        ["total", "dropped", ({ num_dropped }) => num_dropped],
      ],
    ),
    plot(points, width, "Errors", "Of the same requests, answered by both.", formatCount, [
      [hues.canary, "shadow", ({ num_errors }) => num_errors],
      [hues.control, "control", ({ num_control_errors }) => num_control_errors],
    ]),
  ];
  const timed = points.filter(({ num_timed, control_s }) => num_timed && control_s);
  if (timed.length)
    plots.push(
      plot(
        timed,
        width,
        "Computing time",
        "Of the shadow, in multiples of the control’s, without the wait in queues.",
        significant,
        [[hues.canary, "shadow", ({ shadow_s, control_s }) => shadow_s / control_s]],
        1,
      ),
    );
  const compared = points.filter(({ num_distances }) => num_distances);
  if (compared.length) {
    plots.push(
      plot(
        compared,
        width,
        "Distance of outputs",
        "Of images the pixels’, 0 to 1; of numbers the cosine’s, 0 to 2.",
        significant,
        [
          [hues.canary, "mean", ({ distance, num_distances }) => distance / num_distances],
          ["total", "largest", ({ max_distance }) => max_distance],
        ],
      ),
    );
  }
  return plots;
}

const significant = (value) => String(Number(value.toPrecision(2)));

/** Lines over time from 0; `series` are [class, name, value of a point]; `limit` is a line across. */
function plot(points, width, title, about, format, series, limit = 0) {
  const toX = timeScale(points, width);
  const top = niceTop(Math.max(limit, ...series.flatMap(([, , read]) => points.map(read))) || 1);
  const toY = linear([0, top], [HEIGHT_PX - 1, TOP_PX]);
  const parts = [
    ...valueAxis(
      [0, top / 2, top].map((value) => [value, format(value)]),
      toY,
      width,
    ),
    ...timeAxis(points, toX, width),
  ];
  if (limit)
    parts.push(svg("line", { class: "limit", x1: GUTTER_PX, x2: width - RIGHT_PX, y1: toY(limit), y2: toY(limit) }));
  for (const [hue, name, read] of series) {
    parts.push(
      svg("path", { class: `series ${hue}`, d: pathOf(points.map((point) => [toX(point.at), toY(read(point))])) }),
    );
    for (const point of points) {
      const hint = svg("title", { text: `${name}: ${format(read(point))}, ${formatTime(point.at)}` });
      parts.push(svg("circle", { class: `dot ${hue}`, cx: toX(point.at), cy: toY(read(point)), r: 3 }, hint));
    }
  }
  const legend = series.map(([hue, name, read]) => [hue, `${name}: ${format(read(points.at(-1)))}`]);
  const said = legend.map(([, text]) => text).join("; ");
  return {
    title,
    about,
    picture: picture(width, HEIGHT_PX + AXIS_PX, `${title} at the end: ${said}.`, ...parts),
    legend,
  };
}
