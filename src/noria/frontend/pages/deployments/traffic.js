// Which version got which share of an endpoint's requests when, computed from the events of its deployments, as a bar over time.

import { formatShare, formatTime } from "../registry/registry_format.js";
import { linear, picture, svg, timeTicks } from "../shared/svg.js";

const HEIGHT_PX = 74;
const AXIS_PX = 20;
const MIN_LABEL_PX = 64;
export const CONFIGURATION = "configuration";
export const UNKNOWN = "not loaded";

/**
 * The shares between changes: [{at, shares: [{version, arm, share}]}], the oldest first; each holds until the next. `deployments`: any order;
 * `isComplete`: there are no older ones, so that before the first the configuration's model answered. Pure.
 */
export function trafficChanges(deployments, isComplete) {
  const events = deployments.flatMap((deployment) => deployment.events.map((event) => ({ deployment, event })));
  events.sort(
    (a, b) =>
      a.event.change.at - b.event.change.at || a.deployment.id - b.deployment.id || a.event.number - b.event.number,
  );
  let [serving, control, canary] = [null, isComplete ? CONFIGURATION : UNKNOWN, null];
  const shadows = new Set(); // they get copies only
  const changes = [];
  for (const { deployment, event } of events) {
    if (event.type === "follow") continue;
    const { id, version } = deployment;
    if (event.type === "shadow") shadows.add(id);
    else if (event.type !== "step") shadows.delete(id);
    if (shadows.has(id)) continue;
    if (event.type === "serving") [serving, control, canary] = [id, version, canary?.id === id ? null : canary];
    else if (event.type === "canary" || event.type === "step") canary = { id, version, share: event.traffic };
    else if (canary?.id === id) canary = null;
    else if (serving === id) [serving, control] = [null, CONFIGURATION];
    const shares = [{ version: control, arm: "control", share: 1 - (canary?.share ?? 0) }];
    if (canary) shares.push({ version: canary.version, arm: "canary", share: canary.share });
    if (changes.at(-1)?.at === event.change.at) changes.pop(); // of one transaction only the end counts
    if (JSON.stringify(changes.at(-1)?.shares) !== JSON.stringify(shares))
      changes.push({ at: event.change.at, shares });
  }
  return changes;
}

/** The versions in the order in which they appear, each with the number of its colour; 0 is grey. Pure. */
export function versionHues(changes) {
  const hues = new Map([
    [CONFIGURATION, 0],
    [UNKNOWN, 0],
  ]);
  for (const { shares } of changes)
    for (const { version } of shares) if (!hues.has(version)) hues.set(version, ((hues.size - 2) % 8) + 1);
  return hues;
}

/** The bar from `from` to `to` as a picture of `width` px. */
export function drawTraffic(changes, hues, { from, to, width, isComplete }) {
  const toX = linear([from, to], [0, width]);
  const parts = [svg("rect", { class: "ground", x: 0, y: 0, width, height: HEIGHT_PX })];
  const ends = changes
    .slice(1)
    .map(({ at }) => at)
    .concat(to);
  const first = changes[0]?.at ?? to;
  if (first > from)
    parts.push(
      ...segment(
        toX(from),
        toX(first),
        [{ version: isComplete ? CONFIGURATION : UNKNOWN, arm: "control", share: 1 }],
        hues,
        from,
        first,
      ),
    );
  changes.forEach(({ at, shares }, index) => {
    if (ends[index] > from && at < to) parts.push(...segment(toX(at), toX(ends[index]), shares, hues, at, ends[index]));
  });
  for (const [at, text] of timeTicks(from, to, Math.max(2, Math.floor(width / 90)))) {
    const x = toX(at);
    parts.push(svg("line", { class: "grid", x1: x, x2: x, y1: HEIGHT_PX, y2: HEIGHT_PX + 4 }));
    if (x > 16 && x < width - 16)
      parts.push(svg("text", { class: "tick", x, y: HEIGHT_PX + 16, "text-anchor": "middle", text }));
  }
  const now = changes.at(-1)?.shares ?? [];
  const description = `Share of each version from ${formatTime(from)} to ${formatTime(to)}; at the end: ${now.map(({ version, share }) => `${version} ${formatShare(share)}`).join(", ") || CONFIGURATION}.`;
  return picture(width, HEIGHT_PX + AXIS_PX, description, ...parts);
}

function segment(x1, x2, shares, hues, from, to) {
  const parts = [];
  let bottom = HEIGHT_PX;
  for (const { version, arm, share } of shares) {
    const height = share * HEIGHT_PX;
    const [x, y, width] = [x1, bottom - height, Math.max(x2 - x1, 1)];
    const title = svg("title", {
      text: `${version}, ${arm}: ${formatShare(share)}, ${formatTime(from)} to ${formatTime(to)}`,
    });
    parts.push(svg("rect", { class: `share ${arm} hue-${hues.get(version)}`, x, y, width, height }, title));
    if (width > MIN_LABEL_PX && height > 15) {
      const text = `${version}${share < 1 ? ` ${formatShare(share)}` : ""}`;
      const visible = text.slice(0, Math.floor((width - 12) / 6.4));
      parts.push(
        svg("text", {
          class: "share-label",
          x: Math.max(x, 0) + 6,
          y: y + Math.min(height / 2 + 4, 16),
          text: visible === text ? text : `${visible.slice(0, -1)}…`,
        }),
      );
    }
    bottom -= height;
  }
  return parts;
}
