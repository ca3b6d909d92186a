// Texts of the registry's pages, as pure functions from data, and elements for what all of them show.

import { make } from "../shared/dom.js";
import { pluralize } from "../shared/format.js";

const AGES = [
  [86400, "day"],
  [3600, "hour"],
  [60, "minute"],
];

/** "2026-11-21 02:37:04 UTC" of a Unix time. */
export const formatTime = (at) => `${new Date(1000 * at).toISOString().slice(0, 19).replace("T", " ")} UTC`;

/** "3 days ago", "just now". */
export function formatAge(at, now) {
  for (const [seconds, unit] of AGES)
    if (now - at >= seconds) return `${pluralize(Math.floor((now - at) / seconds), unit)} ago`;
  return "just now";
}

/** "25 %", "12.5 %" of a share. */
export const formatShare = (share) => `${Number((100 * share).toPrecision(4))} %`;

/** "sha256:0123456789ab…". */
export const shortDigest = (digest) => `${digest.slice(0, 19)}…`;

/** "12.3 min" of seconds. */
export function formatLong(seconds) {
  const [value, unit] =
    seconds < 100
      ? [seconds, "s"]
      : seconds < 6000
        ? [seconds / 60, "min"]
        : seconds < 172800
          ? [seconds / 3600, "h"]
          : [seconds / 86400, "days"];
  return `${Number(value.toPrecision(3))} ${unit}`;
}

/** "1,204". */
export const formatCount = (number) => number.toLocaleString("en");

/** The name of a state in words: "rolled back". */
export const formatState = (state) => state.replace("_", " ");

const TONES = {
  serving: "good",
  canary: "warn",
  shadow: "warn",
  pending: "warn",
  failed: "bad",
  rolled_back: "bad",
  complete: "good",
  fail: "bad",
  pass: "good",
};

/** A chip with a state. */
export const stateChip = (state, text = formatState(state)) =>
  make("span", { class: `chip ${TONES[state] ?? ""}`, text });

/** A time, as its age; its title is the time itself. */
export function ageOf(at) {
  return make("time", {
    text: formatAge(at, Date.now() / 1000),
    dateTime: new Date(1000 * at).toISOString(),
    title: formatTime(at),
  });
}

/** Who, and why if that is said. */
export const byWhom = ({ by, why }) => [
  make("span", { text: `by ${by || "unknown"}` }),
  ...(why ? [" ", make("q", { class: "why", text: why })] : []),
];

/** The digest, shortened; its title is all of it. */
export const digestCode = (digest) => make("code", { class: "digest", title: digest, text: shortDigest(digest) });

/** The address of the page that traces `of`. */
export const lineageUrl = (of) => `lineage?of=${encodeURIComponent(of)}`;

/** The address of the page of an endpoint's deployments. */
export const endpointUrl = (endpoint) => `deployments#${encodeURIComponent(endpoint)}`;

/**
 * A table with a name; on narrow screens each row is a block, and each cell has its column's name. `rows`: lists of cells, each an element, a
 * text or a list of both; the first one is the row's head. "–": nothing.
 */
export function table(label, heads, rows, className = "stack") {
  const head = make(
    "thead",
    {},
    make("tr", { role: "row" }, ...heads.map((text) => make("th", { scope: "col", role: "columnheader", text }))),
  );
  const body = rows.map(([first, ...cells]) => {
    const header = make("th", { scope: "row", role: "rowheader" }, ...[first].flat());
    const others = cells.map((cell, index) =>
      make(
        "td",
        { role: "cell", class: cell === "–" ? "none" : "", data: { label: heads[index + 1] } },
        ...[cell].flat(),
      ),
    );
    return make("tr", { role: "row" }, header, ...others);
  });
  const whole = make("table", { class: className, role: "table" }, head, make("tbody", { role: "rowgroup" }, ...body));
  const area = make("div", { class: "scroll", tabIndex: 0, role: "region" }, whole);
  area.setAttribute("aria-label", label);
  return area;
}
