// The judge's evidence of one canary over time: E of each guard, responses of both arms, the interval of the increase of errors.

import { formatCount, formatTime } from "../registry/registry_format.js";
import { pluralize } from "../shared/format.js";
import { linear, logarithmic, niceTop, pathOf, picture, svg } from "../shared/svg.js";
import { AXIS_PX, GUTTER_PX, HEIGHT_PX, RIGHT_PX, TOP_PX, timeAxis, timeScale, valueAxis } from "./plot_frame.js";

const E_RANGE = [0.01, 1000]; // at least

/** The events of a deployment that have evidence, as [{at, evidence}]. Pure. */
export const evidencePoints = (deployment) =>
  deployment.events
    .filter(({ evidence }) => evidence !== null)
    .map(({ change, evidence }) => ({ at: change.at, evidence }));

/** How large E must be for a fail: 1/alpha. Pure. */
export const threshold = ({ judge_settings }) => 1 / judge_settings.alpha;

/** The names of the guards, in the order of their colours. Pure. */
export const guardNames = (points) => [
  ...new Set(points.flatMap(({ evidence }) => Object.keys(evidence.verdict.e_by_guard))),
];

/** The three plots of `points`, each `width` px wide: [{title, about, picture, legend: [class, text][]}]. `hues` has a class for each arm. */
export function evidencePlots(deployment, points, width, hues) {
  return [
    evidencePlot(deployment, points, width),
    responsesPlot(points, width, hues),
    intervalPlot(deployment, points, width, hues),
  ];
}

/** "1,204", "3.2", "0.04". */
export const formatE = (e) =>
  e >= 1e6 ? e.toExponential(1) : e >= 100 ? formatCount(Math.round(e)) : String(Number(e.toPrecision(2)));

function evidencePlot(deployment, points, width) {
  const limit = threshold(deployment);
  const names = guardNames(points);
  const results = points.map(({ at, evidence }) => ({ at, ...evidence.verdict }));
  const values = results
    .flatMap(({ e, e_by_guard }) => [e, ...Object.values(e_by_guard).map((result) => result.e)])
    .filter((e) => e > 0);
  const top = Math.min(10 ** Math.ceil(Math.log10(Math.max(E_RANGE[1], ...values))), 1e9);
  const toY = logarithmic([E_RANGE[0], top], [HEIGHT_PX - 1, TOP_PX]);
  const toX = timeScale(points, width);
  const decades = [];
  for (let power = Math.log10(E_RANGE[0]); power <= Math.log10(top); power += top > 1e4 ? 3 : 1)
    decades.push([10 ** power, power > 3 ? `10${superscript(power)}` : formatE(10 ** power)]);
  const parts = [...valueAxis(decades, toY, width), ...timeAxis(points, toX, width)];
  parts.push(svg("line", { class: "limit", x1: GUTTER_PX, x2: width - RIGHT_PX, y1: toY(limit), y2: toY(limit) }));
  parts.push(
    svg("text", {
      class: "limit-label",
      x: GUTTER_PX + 4,
      y: toY(limit) - 4,
      text: `rolled back at ${formatE(limit)}`,
    }),
  );
  parts.push(
    svg("path", {
      class: "series total",
      d: pathOf(
        results.map(({ at, e }) => [toX(at), toY(e)]),
        true,
      ),
    }),
  );
  names.forEach((name, index) => {
    const series = results
      .filter(({ e_by_guard }) => name in e_by_guard)
      .map(({ at, e_by_guard }) => ({ at, ...e_by_guard[name] }));
    const hue = hueOf(index);
    parts.push(
      svg("path", {
        class: `series ${hue}`,
        d: pathOf(
          series.map(({ at, e }) => [toX(at), toY(e)]),
          true,
        ),
      }),
    );
    for (const { at, e, effect, floor } of series) {
      const title = svg("title", {
        text: `${name}: ${formatE(e)}${effect > floor ? "" : ", does not count"}, ${formatTime(at)}`,
      });
      parts.push(
        svg("circle", { class: `dot ${hue} ${effect > floor ? "" : "open"}`, cx: toX(at), cy: toY(e), r: 3 }, title),
      );
    }
  });
  const last = results.at(-1);
  const said = names.map((name) => `${name} ${formatE(last.e_by_guard[name]?.e ?? 0)}`).join(", ");
  return {
    title: "Evidence that the canary is worse",
    about:
      "1 says nothing, more speaks against the canary; the scale is logarithmic. An open dot does not count: the difference is within what is allowed.",
    picture: picture(
      width,
      HEIGHT_PX + AXIS_PX,
      `Evidence at the end: all ${formatE(last.e)}, ${said}; it is rolled back at ${formatE(limit)}.`,
      ...parts,
    ),
    legend: [...names.map((name, index) => [hueOf(index), name]), ["total", "mean of those that count"]],
  };
}

/** What an arm, "control" or "canary", did: {number, text: "1,204, 3 errors, 20 rejections, 7 later responses of the same users not counted"}. Pure. */
export function armCounts(evidence, arm) {
  const [number, repeats] = [evidence[`num_${arm}`], evidence[`${arm}_repeats`]];
  const parts = [
    formatCount(number),
    pluralize(evidence[`${arm}_errors`], "error"),
    pluralize(evidence[`${arm}_rejections`], "rejection"),
  ];
  if (repeats) parts.push(`${pluralize(repeats, "later response")} of the same users not counted`);
  return { number, text: parts.join(", ") };
}

function responsesPlot(points, width, hues) {
  const toX = timeScale(points, width);
  const top = niceTop(
    Math.max(...points.map(({ evidence }) => Math.max(evidence.num_control, evidence.num_canary)), 1),
  );
  const toY = linear([0, top], [HEIGHT_PX - 1, TOP_PX]);
  const parts = [
    ...valueAxis(
      [0, top / 2, top].map((value) => [value, formatCount(value)]),
      toY,
      width,
    ),
    ...timeAxis(points, toX, width),
  ];
  const arms = ["control", "canary"];
  for (const arm of arms) {
    const counts = points.map(({ at, evidence }) => ({ at, ...armCounts(evidence, arm) }));
    parts.push(
      svg("path", { class: `series ${hues[arm]}`, d: pathOf(counts.map(({ at, number }) => [toX(at), toY(number)])) }),
    );
    for (const { at, number, text } of counts) {
      const title = svg("title", { text: `${arm}: ${text}, ${formatTime(at)}` });
      parts.push(svg("circle", { class: `dot ${hues[arm]}`, cx: toX(at), cy: toY(number), r: 3 }, title));
    }
  }
  const last = points.at(-1).evidence;
  const legend = arms.map((arm) => [hues[arm], `${arm}: ${armCounts(last, arm).text}`]);
  const description = `Responses at the end: ${legend.map(([, text]) => text).join("; ")}.`;
  return {
    title: "Responses of both",
    about: "Those that are compared, since the canary began.",
    picture: picture(width, HEIGHT_PX + AXIS_PX, description, ...parts),
    legend,
  };
}

function intervalPlot(deployment, points, width, hues) {
  const toX = timeScale(points, width);
  const allowed = deployment.judge_settings.max_error_increase;
  const intervals = points.map(({ at, evidence }) => ({
    at,
    interval: evidence.verdict.interval,
    effect: evidence.verdict.e_by_guard.errors?.effect ?? 0,
  }));
  const reach = Math.min(
    1,
    Math.max(
      2 * allowed,
      ...intervals
        .slice(-3)
        .flatMap(({ interval, effect }) => [...interval, effect])
        .map(Math.abs),
    ),
  );
  const toY = linear([-reach, reach], [HEIGHT_PX - 1, TOP_PX]);
  const points100 = (value) => `${value > 0 ? "+" : ""}${Number((100 * value).toPrecision(2))}`.replace("-", "−");
  const parts = [
    ...valueAxis(
      [-reach, 0, reach].map((value) => [value, points100(value)]),
      toY,
      width,
    ),
    ...timeAxis(points, toX, width),
  ];
  const upper = intervals.map(({ at, interval }) => [toX(at), toY(interval[1])]);
  const lower = intervals.map(({ at, interval }) => [toX(at), toY(interval[0])]).reverse();
  parts.push(svg("path", { class: `band ${hues.canary}`, d: `${pathOf([...upper, ...lower])}Z` }));
  parts.push(svg("line", { class: "limit", x1: GUTTER_PX, x2: width - RIGHT_PX, y1: toY(allowed), y2: toY(allowed) }));
  parts.push(
    svg("text", {
      class: "limit-label",
      x: GUTTER_PX + 4,
      y: toY(allowed) - 4,
      text: `passes below ${points100(allowed)}`,
    }),
  );
  parts.push(
    svg("path", {
      class: `series ${hues.canary}`,
      d: pathOf(intervals.map(({ at, effect }) => [toX(at), toY(effect)])),
    }),
  );
  for (const { at, interval, effect } of intervals) {
    const title = svg("title", {
      text: `${points100(effect)} points, from ${points100(interval[0])} to ${points100(interval[1])}, ${formatTime(at)}`,
    });
    parts.push(svg("circle", { class: `dot ${hues.canary}`, cx: toX(at), cy: toY(effect), r: 3 }, title));
  }
  const { interval, effect } = intervals.at(-1);
  const said = `${points100(effect)} points, from ${points100(interval[0])} to ${points100(interval[1])}`;
  return {
    title: "Increase of errors",
    about: "In points, with its interval, which holds however often one looks.",
    picture: picture(width, HEIGHT_PX + AXIS_PX, `Increase of the error rate at the end: ${said}.`, ...parts),
    legend: [[hues.canary, said]],
  };
}

const hueOf = (index) => `hue-${8 - (index % 8)}`; // of a guard: the other end of the colours of versions
const superscript = (power) => [...String(power)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
