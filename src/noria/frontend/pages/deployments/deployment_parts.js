// The parts of the page /deployments that need no state: a verdict, a plot, a step, the table of evidence, a row of the history.

import {
  ageOf,
  byWhom,
  formatLong,
  formatShare,
  formatState,
  formatTime,
  lineageUrl,
  stateChip,
  table,
} from "../registry/registry_format.js";
import { make } from "../shared/dom.js";
import { armCounts, formatE, guardNames } from "./evidence_plots.js";

export function verdictElements({ outcome, reason, e }, limit) {
  const evidence = make("span", {
    class: "muted",
    text: `Evidence that the canary is worse: ${formatE(e)} of ${formatE(limit)}.`,
  });
  return [
    make(
      "p",
      { class: "verdict" },
      stateChip(outcome),
      make("span", { text: `${reason[0].toUpperCase()}${reason.slice(1)}.` }),
      evidence,
    ),
  ];
}

export function plotElement({ title, about, picture, legend }) {
  const items = legend.map(([hue, text]) => make("li", {}, make("i", { class: `swatch ${hue}` }), text));
  return make(
    "figure",
    {},
    make("figcaption", {}, make("h4", { text: title }), make("p", { class: "small muted", text: about })),
    picture,
    make("ul", { class: "legend" }, ...items),
  );
}

/** How long the step that is now takes. */
export function describeStep({ step_s }, { status, elapsed_s }) {
  if (status === "ramping")
    return `for ${formatLong(step_s)}; ${formatLong(Math.min(elapsed_s, step_s))} at the last event`;
  return (
    { waiting: "waits until the judge passes", paused: "paused while the registry is away", holding: "stays here" }[
      status
    ] ?? formatState(status)
  );
}

export function evidenceTable(points) {
  const names = guardNames(points);
  const heads = ["Time", "Control", "Canary", ...names.map((name) => `Evidence: ${name}`), "Evidence", "Judge"];
  const rows = points.toReversed().map(({ at, evidence }) => {
    const { verdict } = evidence;
    const counts = ["control", "canary"].map((arm) => armCounts(evidence, arm));
    const texts = [
      ...counts.map(({ text }) => text),
      ...names.map((name) => (name in verdict.e_by_guard ? formatE(verdict.e_by_guard[name].e) : "–")),
      formatE(verdict.e),
      verdict.outcome,
    ];
    return [formatTime(at), ...texts];
  });
  return make(
    "details",
    {},
    make("summary", { text: "The evidence as a table" }),
    table("Evidence, the latest first", heads, rows, "number"),
  );
}

const WORDS = {
  pending: () => "asked for",
  shadow: () => "shadow, which gets copies of requests",
  ended: () => "ended as a shadow",
  canary: ({ traffic }) => `canary with ${formatShare(traffic)}`,
  step: ({ traffic, status, isSame }) =>
    isSame
      ? `${formatState(status ?? "step")}, still ${formatShare(traffic)}`
      : `${formatShare(traffic)} of the requests`,
  serving: () => "serves all requests",
  failed: () => "could not be loaded",
  rolled_back: () => "rolled back",
  replaced: () => "replaced",
  follow: () => "changes what it follows",
};

export function historyRow({ deployment: { id, version }, event }) {
  const what = ["step", "follow"].includes(event.type)
    ? make("span", { text: WORDS[event.type](event) })
    : stateChip(event.type, WORDS[event.type](event));
  return [
    [
      make("span", { class: "number", text: formatTime(event.change.at) }),
      " ",
      make("span", { class: "small muted age" }, ageOf(event.change.at)),
    ],
    [
      make("span", { class: "number", text: `${id}: ` }),
      make("a", {
        href: lineageUrl(`deployment:${id}`),
        text: version,
        ariaLabel: `${version}, lineage of deployment ${id}`,
      }),
    ],
    what,
    byWhom(event.change),
  ];
}
