// The page /deployments: what each endpoint has; of the one selected its traffic, its canary's evidence, and what happened to it.

import { formatShare, formatState, lineageUrl, stateChip, table } from "../registry/registry_format.js";
import { fetchJson, RegistryPage, renderIfChanged } from "../registry/registry_page.js";
import { button, byId, make, setText } from "../shared/dom.js";
import { pluralize } from "../shared/format.js";
import { askToDeploy, askToPromote, askToRollBack } from "./deployment_dialog.js";
import { describeStep, evidenceTable, historyRow, plotElement, verdictElements } from "./deployment_parts.js";
import { evidencePlots, evidencePoints, threshold } from "./evidence_plots.js";
import { describeShadow, shadowPlots, shadowPoints } from "./shadow_plots.js";
import { CONFIGURATION, drawTraffic, trafficChanges, UNKNOWN, versionHues } from "./traffic.js";

const INTERVAL_S = 2; // at most two requests, of which the second one only after a change
const PAGE_SIZE = 20; // deployments
const MAX_ROWS = 200; // events
const RANGES = [
  ["1 hour", 3600],
  ["1 day", 86400],
  ["1 week", 604800],
  ["1 month", 2678400],
  ["1 year", 31622400],
];
const MIN_PLOT_PX = 260;
const PLOT_GAP_PX = 24;
const SHADOW_HUE = 8; // of a version that got no traffic, and so has no colour there

let endpoints = [];
let history = null; // of the selected endpoint: {endpoint, data, next, seen}
let wantsOlder = false;
let rangeS = null; // null: chosen by the page
let judgedId = null; // null: the latest with evidence

const selected = () =>
  endpoints.find(({ endpoint }) => endpoint === decodeURIComponent(location.hash.slice(1))) ?? endpoints[0];

const page = new RegistryPage(async () => {
  if (byId("not-carried-out").dataset.asked === undefined) {
    const { carries_out_deployments } = await fetchJson("/v1/registry/served");
    byId("not-carried-out").hidden = carries_out_deployments;
    byId("not-carried-out").dataset.asked = "";
  }
  endpoints = (await fetchJson("/v1/deployments")).data;
  byId("deploy").hidden = false;
  showEndpoints();
  const endpoint = selected();
  byId("endpoint").hidden = endpoint === undefined;
  if (endpoint === undefined) return;
  await updateHistory(endpoint);
  show(endpoint);
}, INTERVAL_S);

/** Fetch the newest page of the history if something has changed, or an older one if that is wanted. */
async function updateHistory({ endpoint, serving, unfinished, latest }) {
  const seen = JSON.stringify([latest, serving?.id, serving?.events.length, unfinished?.id, unfinished?.events.length]);
  const path = `/v1/deployments/history?endpoint=${encodeURIComponent(endpoint)}&limit=${PAGE_SIZE}`;
  if (history?.endpoint !== endpoint) history = { ...(await fetchJson(path)), seen };
  else if (wantsOlder) {
    const older = await fetchJson(`${path}&before=${history.next}`);
    history = { ...history, data: [...history.data, ...older.data], next: older.next };
  } else if (history.seen !== seen) {
    const { data, next } = await fetchJson(path);
    const oldest = data.at(-1).id;
    const known = history.data.filter(({ id }) => id < oldest);
    history = { endpoint, data: [...data, ...known], next: known.length ? history.next : next, seen };
  }
  wantsOlder = false;
}

function showEndpoints() {
  renderIfChanged(
    byId("endpoints"),
    [
      endpoints.map(({ endpoint, serving, unfinished }) => [
        endpoint,
        serving?.version,
        unfinished?.version,
        unfinished?.state,
        unfinished?.traffic,
      ]),
      selected()?.endpoint,
    ],
    () => {
      if (!endpoints.length)
        return [
          make("p", {
            class: "note",
            text: "Nothing is deployed. Each model of the configuration answers the requests that name it. Deploy a version of the registry: noria deploy ENDPOINT MODEL.",
          }),
        ];
      return endpoints.map(({ endpoint, serving, unfinished }) => {
        const link = make(
          "a",
          { href: `#${encodeURIComponent(endpoint)}`, data: { key: endpoint } },
          make("strong", { text: endpoint }),
          make("span", { class: "small", text: nameOf(serving) }),
        );
        if (unfinished)
          link.append(
            make("span", {
              class: "small",
              text: `+ ${nameOf(unfinished)} ${unfinished.state === "canary" ? formatShare(unfinished.traffic) : unfinished.state}`,
            }),
          );
        if (endpoint === selected().endpoint) link.setAttribute("aria-current", "true");
        return link;
      });
    },
  );
}

const nameOf = (deployment) =>
  deployment ? `${deployment.version.model}@${deployment.version.number}` : CONFIGURATION;

function show(endpoint) {
  const { serving, unfinished, follows } = endpoint;
  setText(byId("endpoint-name"), endpoint.endpoint);
  renderIfChanged(
    byId("endpoint-chips"),
    [nameOf(serving), nameOf(unfinished), unfinished?.state, unfinished?.traffic, follows],
    () => {
      const chips = [stateChip("serving", `${nameOf(serving)} serves`)];
      if (unfinished)
        chips.push(
          stateChip(
            unfinished.state,
            unfinished.state === "canary"
              ? `${nameOf(unfinished)} is a canary with ${formatShare(unfinished.traffic)}`
              : `${nameOf(unfinished)} is ${unfinished.state === "shadow" ? "a shadow" : "pending"}`,
          ),
        );
      if (follows) chips.push(make("span", { class: "chip", text: `follows ${follows}` }));
      return [
        ...chips,
        make("a", { class: "small", href: lineageUrl(`endpoint:${endpoint.endpoint}`), text: "lineage" }),
      ];
    },
  );
  byId("promote").hidden = !["canary", "shadow"].includes(unfinished?.state);
  byId("rollback").hidden = !unfinished && !serving;
  showTraffic();
  showShadow();
  showJudge(endpoint);
  showHistory();
}

// ── Traffic ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

/** The shortest range that has the latest deployment whole, or the one that was chosen. */
function shownRange(now) {
  const since = now - history.data[0].created.at;
  return rangeS ?? (RANGES.find(([, seconds]) => seconds >= 1.1 * since) ?? RANGES.at(-1))[1];
}

function showTraffic() {
  const now = Date.now() / 1000;
  const [range, width, isComplete] = [shownRange(now), byId("traffic").clientWidth, history.next === null];
  const changes = trafficChanges(history.data, isComplete);
  const hues = versionHues(changes);
  renderIfChanged(byId("traffic"), [changes, range, width, Math.floor((now * width) / range / 2)], () => [
    drawTraffic(changes, hues, { from: now - range, to: now, width, isComplete }),
  ]);
  const from = changes.findLastIndex(({ at }) => at <= now - range);
  const shown = new Set(changes.slice(Math.max(from, 0)).flatMap(({ shares }) => shares.map(({ version }) => version)));
  if (from < 0) shown.add(isComplete ? CONFIGURATION : UNKNOWN);
  renderIfChanged(byId("traffic-legend"), [...shown], () =>
    [...shown].map((version) =>
      make(
        "li",
        {},
        make("i", { class: `swatch hue-${hues.get(version)}` }),
        version === CONFIGURATION
          ? "the configuration’s model"
          : version === UNKNOWN
            ? "older deployments, not loaded"
            : version,
      ),
    ),
  );
  renderIfChanged(byId("ranges"), range, () =>
    RANGES.map(([text, seconds]) => {
      const chosen = button(
        text,
        () => {
          rangeS = seconds;
          showTraffic();
        },
        { data: { key: text } },
      );
      chosen.setAttribute("aria-pressed", String(seconds === range));
      return chosen;
    }),
  );
}

// ── The shadow ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

function showShadow() {
  const deployment = history.data.find(
    ({ shadow_plan, state }) => shadow_plan !== null && !["pending", "failed"].includes(state),
  );
  byId("shadowed").hidden = deployment === undefined;
  if (deployment === undefined) return;
  const { id, version, state, shadow_plan } = deployment;
  setText(
    byId("shadow-plan"),
    `Deployment ${id}, ${version}, ${formatState(state)}: copies of ${describeShadow(shadow_plan)}.`,
  );
  const points = shadowPoints(deployment);
  const width = plotWidthIn(byId("shadow-plots"), 4);
  renderIfChanged(byId("shadow-plots"), [id, points, width], () =>
    points.length
      ? shadowPlots(points, width, armHues(deployment)).map(plotElement)
      : [make("p", { class: "muted", text: "No copy was answered yet." })],
  );
}

// ── The judge ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

function showJudge(endpoint) {
  const canaries = history.data.filter(
    ({ plan, shadow_plan, state, events }) =>
      plan !== null &&
      (events.some(({ type, evidence }) => type === "canary" || evidence) ||
        (state === "pending" && shadow_plan === null)),
  );
  const deployment = canaries.find(({ id }) => id === judgedId) ?? canaries[0];
  byId("judged").hidden = deployment === undefined;
  if (deployment === undefined) return;
  byId("judged-field").hidden = canaries.length < 2;
  renderIfChanged(byId("judged-deployment"), [canaries.map(({ id, state }) => [id, state]), deployment.id], () =>
    canaries.map(
      ({ id, version, state }) =>
        new Option(`${id}: ${version}, ${formatState(state)}`, id, false, id === deployment.id),
    ),
  );
  showPlan(deployment, endpoint);
  const points = evidencePoints(deployment);
  const verdict = deployment.id === endpoint.unfinished?.id ? endpoint.verdict : points.at(-1)?.evidence.verdict;
  renderIfChanged(byId("verdict"), verdict, () =>
    verdict
      ? verdictElements(verdict, threshold(deployment))
      : [make("p", { class: "muted", text: "The judge has not counted requests yet; it does every few seconds." })],
  );
  const plotWidth = plotWidthIn(byId("plots"), 3);
  renderIfChanged(byId("plots"), [deployment.id, points, plotWidth], () =>
    points.length ? evidencePlots(deployment, points, plotWidth, armHues(deployment)).map(plotElement) : [],
  );
  renderIfChanged(byId("evidence-table"), [deployment.id, points], () =>
    points.length ? [evidenceTable(points)] : [],
  );
}

/** The width of each plot of an element, of which at most `most` are beside each other, in px. */
function plotWidthIn({ clientWidth }, most) {
  const columns = Math.max(1, Math.min(most, Math.floor((clientWidth + PLOT_GAP_PX) / (MIN_PLOT_PX + PLOT_GAP_PX))));
  return Math.floor((clientWidth - PLOT_GAP_PX * (columns - 1)) / columns);
}

/** The colours of the canary's version, and of the control when the canary began. */
function armHues({ version, created }) {
  const changes = trafficChanges(history.data, history.next === null);
  const before =
    changes.findLast(({ at, shares }) => at <= created.at && shares.length === 1)?.shares[0].version ?? CONFIGURATION;
  const hues = versionHues(changes);
  return { canary: `hue-${hues.get(version) ?? SHADOW_HUE}`, control: `hue-${hues.get(before)}` };
}

/** The plan as a list of steps, with what is done, what is now and how long that takes. */
function showPlan({ plan, state, events }, endpoint) {
  const last = events.findLast(({ step }) => step !== null);
  const current = endpoint.unfinished?.state === "canary" && state === "canary" ? endpoint.unfinished.ramp : null;
  renderIfChanged(byId("plan"), [plan, state, last?.step, last?.status, current], () => {
    const items = plan.percents.map((percent, index) => {
      const [isDone, isNow] = [
        state === "serving" || state === "replaced" || index < (last?.step ?? -1),
        state === "canary" && index === last?.step,
      ];
      const item = make(
        "li",
        { class: isDone ? "done" : isNow ? "now" : state === "rolled_back" && index === last?.step ? "failed" : "" },
        make("strong", { text: `${percent} %` }),
      );
      if (isNow) {
        const isLast = index === plan.percents.length - 1;
        item.append(
          make("span", {
            class: "small",
            text: isLast ? "stays here" : describeStep(plan, current ?? { status: last.status, elapsed_s: 0 }),
          }),
        );
        item.setAttribute("aria-current", "step");
      } else if (percent === 100 && !isDone)
        item.append(make("span", { class: "small muted", text: "when the judge passes" }));
      else if (isDone) item.append(make("span", { class: "visually-hidden", text: "done" }));
      return item;
    });
    return [make("ol", { class: "steps", ariaLabel: "Steps of the ramp" }, ...items)];
  });
}

// ── History and buttons ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

function showHistory() {
  const events = history.data.flatMap(({ events: its, ...deployment }) =>
    its.map((event, index) => ({ deployment, event: { ...event, isSame: its[index - 1]?.traffic === event.traffic } })),
  );
  events.sort(
    (a, b) =>
      b.event.change.at - a.event.change.at || b.deployment.id - a.deployment.id || b.event.number - a.event.number,
  );
  const shown = events
    .filter(({ event }) => event.type !== "step" || !event.isSame || event.change.why)
    .slice(0, MAX_ROWS);
  renderIfChanged(byId("history"), [shown, Math.floor(Date.now() / 60000)], () => [
    table("Changes, the latest first", ["Time", "Deployment", "What", "By whom and why"], shown.map(historyRow)),
  ]);
  byId("more").hidden = history.next === null;
  const left = events.length > shown.length ? " Events that only added evidence are left out." : "";
  setText(
    byId("more-text"),
    `${pluralize(history.data.length, "deployment")} and at most ${MAX_ROWS} events are shown.${left}`,
  );
}

const onDone = (text) => () => {
  setText(byId("announcements"), text);
  page.update();
};

byId("older").addEventListener("click", () => {
  wantsOlder = true;
  page.update();
});
byId("judged-deployment").addEventListener("change", ({ currentTarget }) => {
  judgedId = Number(currentTarget.value);
  showJudge(selected());
});
byId("deploy").addEventListener("click", () =>
  askToDeploy(selected()?.endpoint, ({ endpoint }) => {
    location.hash = encodeURIComponent(endpoint);
    page.update();
  }),
);
byId("promote").addEventListener("click", () => {
  const { endpoint, unfinished, verdict } = selected();
  askToPromote(
    endpoint,
    {
      version: nameOf(unfinished),
      traffic: unfinished.state === "canary" ? formatShare(unfinished.traffic) : null,
      verdict,
    },
    onDone(`${nameOf(unfinished)} is promoted.`),
  );
});
byId("rollback").addEventListener("click", () => {
  const { endpoint, unfinished, serving } = selected();
  const consequence = unfinished
    ? `It gets no more requests; ${serving ? nameOf(serving) : "the configuration’s model"} answers all of them.`
    : "The version that served before is deployed again; if there was none, the configuration’s model answers.";
  askToRollBack(endpoint, nameOf(unfinished ?? serving), consequence, onDone("Rolled back."));
});
window.addEventListener("hashchange", () => {
  [judgedId, rangeS] = [null, null];
  page.update();
});
new ResizeObserver(() => {
  if (history?.endpoint !== selected()?.endpoint || byId("endpoint").hidden) return;
  showTraffic();
  showShadow();
  showJudge(selected());
}).observe(byId("main"));
