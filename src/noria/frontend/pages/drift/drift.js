// The page /drift: the variables of one version at one endpoint.

import { fetchJson, RegistryPage, renderIfChanged } from "../registry/registry_page.js";
import { byId, make, setText } from "../shared/dom.js";
import { distributionPlot, drawHeatMap, psiPlot, tableRows } from "./drift_plots.js";
import {
  chooseVersion,
  describeDrift,
  describeSeries,
  listVersions,
  seriesOf,
  summarize,
  titleOf,
} from "./drift_state.js";

const INTERVAL_S = 10;
const QUERY = "version";

let wanted = new URLSearchParams(location.search).get(QUERY);
let heatMaps = [];

async function load() {
  const list = await fetchJson("/v1/statistics");
  const chosen = chooseVersion(list.data, wanted);
  byId("nothing").hidden = chosen !== null;
  byId("legend").hidden = byId("choice").hidden = chosen === null;
  if (chosen === null) return;
  showChoice(listVersions(list.data), chosen);
  const shown = seriesOf(list.data, chosen, list.psi_threshold);
  setText(byId("current-text"), `the last ${formatSpan(list.current_windows * list.window_s)}`);
  setText(byId("summary"), summarize(shown, list.psi_threshold));
  const details = [];
  for (const { endpoint, version, variable } of shown) {
    details.push(await fetchJson(`/v1/statistics/series?${new URLSearchParams({ endpoint, version, variable })}`));
  }
  show(details, chosen);
}

function showChoice(versions, chosen) {
  const select = byId("version");
  renderIfChanged(select, versions, () => versions.map(({ id, text }) => make("option", { value: id, text })));
  select.value = chosen.id;
}

const formatSpan = (seconds) =>
  seconds >= 7200 ? `${Math.round(seconds / 3600)} hours` : `${Math.max(1, Math.round(seconds / 60))} min`;

function show(details, chosen) {
  const [from, to] = timesOf(details);
  const open = new Set(
    [...document.querySelectorAll(".variable details[open]")].map(({ dataset }) => dataset.variable),
  );
  renderIfChanged(byId("variables"), [details, chosen.id], () => {
    heatMaps = [];
    return details.map((detail) => card(detail, from, to, open.has(detail.series.variable)));
  });
  drawHeatMaps();
}

/** From the first window of all variables to the end of the last. */
function timesOf(details) {
  const windows = details.flatMap(({ windows: each }) => each.map(({ start }) => start));
  const length = details[0]?.window_s ?? 1;
  return [Math.min(...windows), Math.max(...windows) + length];
}

function card(detail, from, to, isOpen) {
  const { series } = detail;
  const drift = describeDrift(series, detail.psi_threshold);
  const parts = [
    make(
      "div",
      { class: "row" },
      make("h2", { text: titleOf(series.variable) }),
      ...(drift ? [make("span", { class: `chip ${drift[1]}`, text: drift[0] })] : []),
    ),
    make("p", { class: "facts small muted", text: describeSeries(series) }),
  ];
  if (series.kind === "scalar" || series.kind === "category") {
    const heatMap = make("canvas", { role: "img", ariaLabel: `Distribution of ${series.variable} over time` });
    heatMaps.push(() => drawHeatMap(heatMap, detail, from, to));
    parts.push(
      distributionPlot(detail),
      make("h3", { text: "Over time" }),
      heatMap,
      ...(series.reference
        ? [make("h3", { text: "PSI over time" }), psiPlot(detail, from, to), reference(series.reference)]
        : [hint(series)]),
      numbers(detail, isOpen),
    );
  }
  return make("section", { class: "card variable" }, ...parts);
}

function reference({ version, num_values, at, by, why }) {
  const since = new Date(1000 * at).toISOString().slice(0, 16).replace("T", " ");
  return make("p", {
    class: "small muted after",
    text: `Reference: ${version}, ${num_values} values, chosen ${since} UTC by ${by}${why ? `: ${why}` : ""}`,
  });
}

function hint({ endpoint }) {
  return make(
    "p",
    { class: "small muted after" },
    "To compare, choose a reference: ",
    make("code", { text: `noria stats baseline ${endpoint}` }),
  );
}

function numbers(detail, isOpen) {
  const head = ["cell", "now", "reference"].map((text, index) =>
    make("th", { scope: "col", class: index ? "number" : "", text }),
  );
  const rows = tableRows(detail).map((cells) =>
    make(
      "tr",
      {},
      ...cells.map((text, index) =>
        make(index ? "td" : "th", { ...(index ? {} : { scope: "row" }), class: index ? "number" : "", text }),
      ),
    ),
  );
  const scroll = make(
    "div",
    { class: "scroll", tabIndex: 0, role: "region", ariaLabel: `Numbers of ${detail.series.variable}` },
    make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)),
  );
  return make(
    "details",
    { open: isOpen, data: { variable: detail.series.variable } },
    make("summary", { text: "As a table", data: { key: detail.series.variable } }),
    scroll,
  );
}

function drawHeatMaps() {
  for (const draw of heatMaps) draw();
}

const page = new RegistryPage(load, INTERVAL_S);
byId("version").addEventListener("change", ({ target }) => {
  wanted = target.value;
  history.replaceState(null, "", `?${new URLSearchParams({ [QUERY]: wanted })}`);
  page.update();
});
addEventListener("resize", drawHeatMaps);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHeatMaps);
