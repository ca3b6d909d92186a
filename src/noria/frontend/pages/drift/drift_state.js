// What the page /drift shows, as pure functions from the server's answers.

const MAX_COLUMNS = 72; // of a heat map

/** The versions at endpoints that have variables: [{id, endpoint, version, text}], in the server's order. */
export function listVersions(data) {
  const found = new Map();
  for (const { endpoint, version } of data) {
    const id = JSON.stringify([endpoint, version]);
    if (!found.has(id)) found.set(id, { id, endpoint, version, text: `${endpoint} · ${version}` });
  }
  return [...found.values()];
}

/** The version to show: the chosen one if it is there, else the one with the most values now. */
export function chooseVersion(data, wanted) {
  const versions = listVersions(data);
  const chosen = versions.find(({ id }) => id === wanted);
  if (chosen) return chosen;
  const most = data.reduce(
    (best, series) => (best === null || series.num_values > best.num_values ? series : best),
    null,
  );
  return (
    versions.find(({ endpoint, version }) => most && endpoint === most.endpoint && version === most.version) ?? null
  );
}

/** "prompt_chars" as a title. */
export const titleOf = (variable) => variable.replaceAll("_", " ");

/** What is known of the drift of a series: [text, tone of its chip]; null if it cannot be compared. */
export function describeDrift({ kind, drift, reference, num_values }, threshold) {
  if (kind !== "scalar" && kind !== "category") return null;
  if (!reference) return ["no reference", ""];
  if (!drift) return ["reference has other edges", "warn"];
  if (drift.psi === null) return [`too few values (${Math.min(num_values, reference.num_values)} of 200)`, ""];
  return [`PSI ${drift.psi.toFixed(3).replace("-", "−")}`, drift.psi > threshold ? "bad" : "good"];
}

/** The series of one version: those that have shifted first. */
export function seriesOf(data, { endpoint, version }, threshold) {
  const own = data.filter((series) => series.endpoint === endpoint && series.version === version);
  const hasShifted = ({ drift }) => drift !== null && drift.psi > threshold;
  return [...own.filter(hasShifted), ...own.filter((series) => !hasShifted(series))];
}

/** A line about a series. */
export function describeSeries({ kind, num_values, num_invalid, mean, most_frequent, drift }) {
  const parts = [`${num_values} ${num_values === 1 ? "value" : "values"}`];
  if (mean !== null) parts.push(kind === "counter" ? `sum ${round(mean * num_values)}` : `mean ${round(mean)}`);
  if (most_frequent !== null) parts.push(`mostly ${most_frequent}`);
  if (num_invalid) parts.push(`${num_invalid} not finite`);
  const unseen = Object.keys(drift?.unseen ?? {});
  if (unseen.length) parts.push(`new: ${unseen.slice(0, 3).join(", ")}${unseen.length > 3 ? " …" : ""}`);
  if (drift && drift.ks !== null) parts.push(`KS ${drift.ks.toFixed(3)}`);
  if (drift && drift.js !== null) parts.push(`JS ${drift.js.toFixed(3)} bit`);
  return parts.join(", ");
}

const round = (value) => Number(value.toPrecision(3)).toString();

/** A sentence about all series of a version, for the status line. */
export function summarize(data, threshold) {
  const compared = data.filter(({ drift }) => drift !== null && drift.psi !== null);
  const shifted = compared.filter(({ drift }) => drift.psi > threshold);
  const counted = `${data.length} ${data.length === 1 ? "variable is" : "variables are"} counted`;
  if (!compared.length) return `${counted}; none is compared with a reference.`;
  if (!shifted.length) return `${counted}; none of ${compared.length} compared with a reference has shifted.`;
  return `${counted}; shifted: ${shifted.map(({ variable }) => titleOf(variable)).join(", ")}.`;
}

/** Counts as shares of their sum. */
export function sharesOf(counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  return counts.map((count) => (total ? count / total : 0));
}

/** The names of cells for people: the range of each cell of a histogram, the categories as they are. */
export function cellNames(kind, cells) {
  if (kind === "category") return cells;
  return cells.map((cell, index) => {
    if (index === 0) return `≤ ${cell}`;
    return cell === "+Inf" ? `> ${cells[index - 1]}` : `${cells[index - 1]} – ${cell}`;
  });
}

/** Columns of a heat map: at most 72 of equal length over the whole time, [{start, shares or null}]. */
export function heatColumns({ windows, window_s: windowS, cells }) {
  if (!windows.length) return [];
  const first = windows[0].start;
  const span = windows.at(-1).start + windowS - first;
  const width = windowS * Math.max(1, Math.ceil(span / windowS / MAX_COLUMNS));
  const columns = Array.from({ length: Math.ceil(span / width) }, (_, index) => ({
    start: first + index * width,
    counts: null,
  }));
  for (const { start, counts } of windows) {
    const column = columns[Math.floor((start - first) / width)];
    column.counts = (column.counts ?? cells.map(() => 0)).map((count, cell) => count + counts[cell]);
  }
  return columns.map(({ start, counts }) => ({ start, shares: counts && sharesOf(counts) }));
}

/** The points [time, PSI] of a line: of each window with enough values before its end. */
export const psiPoints = ({ windows, window_s: windowS }) =>
  windows.filter(({ psi }) => psi !== null).map(({ start, psi }) => [start + windowS, psi]);
