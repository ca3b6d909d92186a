// The plots of the page /drift: a distribution beside its reference, the distribution over time, and the PSI over time.

import { colours, resizeCanvas } from "../shared/dom.js";
import { linear, niceTop, pathOf, picture, svg, timeTicks } from "../shared/svg.js";
import { cellNames, heatColumns, psiPoints, sharesOf } from "./drift_state.js";

const WIDTH = 400;
const MARGIN = { left: 38, right: 8 };
const HEAT_HEIGHT = 84;
const MAX_ROWS = 9; // of a plot of categories
const MAX_LABELS = 8;
const MAX_PSI = 1; // of the axis: a distribution with more has little in common with its reference

const percent = (share) => `${Math.round(1000 * share) / 10} %`;

/** The distribution now as bars, the reference as an outline. */
export function distributionPlot(detail) {
  const { series, current, reference } = detail;
  const [now, before] = [sharesOf(current), reference && sharesOf(reference)];
  const description = `Distribution of ${series.variable}${before ? " beside its reference" : ""}; the numbers are in the table below.`;
  return series.kind === "category"
    ? rows(detail, now, before, description)
    : columns(detail, now, before, description);
}

function columns({ cells }, now, before, description) {
  const [height, bottom] = [150, 128];
  const top = niceTop(Math.max(...now, ...(before ?? []), 0.01));
  const y = linear([0, top], [bottom, 8]);
  const step = (WIDTH - MARGIN.left - MARGIN.right) / cells.length;
  const x = (index) => MARGIN.left + index * step;
  const bars = now.map((share, index) =>
    svg(
      "rect",
      { class: "bar", x: x(index) + 1, y: y(share), width: Math.max(step - 2, 1), height: bottom - y(share) },
      svg("title", { text: percent(share) }),
    ),
  );
  const outline = before && [
    [x(0), bottom],
    ...before.flatMap((share, index) => [
      [x(index), y(share)],
      [x(index + 1), y(share)],
    ]),
    [x(cells.length), bottom],
  ];
  const every = Math.ceil(cells.length / MAX_LABELS);
  const labels = cells.slice(0, -1).map((cell, index) =>
    svg("text", {
      class: "tick",
      x: x(index + 1),
      y: height - 6,
      "text-anchor": "middle",
      text: index % every ? "" : cell,
    }),
  );
  return picture(
    WIDTH,
    height,
    description,
    ...[0, top / 2, top].map((share) =>
      svg("line", { class: "axis", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(share), y2: y(share) }),
    ),
    ...[0, top].map((share) =>
      svg("text", { class: "tick", x: MARGIN.left - 5, y: y(share) + 4, "text-anchor": "end", text: percent(share) }),
    ),
    ...bars,
    ...(outline ? [svg("path", { class: "reference", d: pathOf(outline) })] : []),
    ...labels,
  );
}

function rows({ cells }, now, before, description) {
  const used = cells.map((_, index) => index).filter((index) => now[index] > 0 || (before && before[index] > 0));
  const shown = used.slice(0, MAX_ROWS);
  const [left, row] = [130, 20];
  const top = niceTop(Math.max(...now, ...(before ?? []), 0.01));
  const x = linear([0, top], [left, WIDTH - MARGIN.right - 44]);
  const parts = shown.flatMap((index, line) => {
    const y = line * row + 3;
    const name = cells[index].length > 20 ? `${cells[index].slice(0, 19)}…` : cells[index];
    return [
      svg("text", { class: "tick", x: left - 6, y: y + 11, "text-anchor": "end", text: name }),
      svg("rect", { class: "bar", x: left, y, width: x(now[index]) - left, height: 14 }),
      ...(before
        ? [svg("rect", { class: "reference", x: left, y, width: Math.max(x(before[index]) - left, 1), height: 14 })]
        : []),
      svg("text", {
        class: "tick",
        x: Math.max(x(now[index]), before ? x(before[index]) : 0) + 5,
        y: y + 11,
        text: percent(now[index]),
      }),
    ];
  });
  return picture(WIDTH, Math.max(shown.length, 1) * row + 6, description, ...parts);
}

/** The PSI over time, with the threshold. */
export function psiPlot(detail, from, to) {
  const [height, bottom, points] = [96, 76, psiPoints(detail)];
  const threshold = detail.psi_threshold;
  const largest = Math.max(2 * threshold, ...points.map(([, psi]) => psi));
  const top = Math.min(niceTop(largest), MAX_PSI);
  const [x, height01] = [linear([from, to], [MARGIN.left, WIDTH - MARGIN.right]), linear([0, 1], [bottom, 8])];
  const y = (psi) => height01(Math.sqrt(Math.max(psi, 0) / top)); // small values near the threshold matter most
  const latest = points.length ? points.at(-1)[1].toFixed(3) : "not known";
  const plotted = points.map(([at, psi]) => [x(at), y(psi)]);
  return picture(
    WIDTH,
    height,
    `PSI of ${detail.series.variable} over time; the latest is ${latest}, the threshold ${threshold}.`,
    ...[0, top].map((psi) =>
      svg("line", { class: "axis", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(psi), y2: y(psi) }),
    ),
    ...[
      [0, "0"],
      [threshold, String(threshold)],
      [top, largest > top ? `≥ ${top}` : String(top)],
    ].map(([psi, text]) =>
      svg("text", { class: "tick", x: MARGIN.left - 5, y: y(psi) + 4, "text-anchor": "end", text }),
    ),
    svg("line", { class: "limit", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(threshold), y2: y(threshold) }),
    ...(plotted.length > 1 ? [svg("path", { class: "line", d: pathOf(plotted) })] : []),
    ...(plotted.length ? [svg("circle", { class: "dot", cx: plotted.at(-1)[0], cy: plotted.at(-1)[1], r: 3.5 })] : []),
    ...timeTicks(from, to, 4).map(([at, text]) =>
      svg("text", { class: "tick", x: x(at), y: height - 4, "text-anchor": "middle", text }),
    ),
  );
}

/** Draw the distribution over time: a column of cells for each time, the darker the larger their share. */
export function drawHeatMap(canvas, detail, from, to) {
  const width = canvas.clientWidth || WIDTH;
  const context = resizeCanvas(canvas, width, HEAT_HEIGHT);
  const scale = width / WIDTH;
  const x = linear([from, to], [MARGIN.left * scale, width - MARGIN.right * scale]);
  const [found, { accent, sunken }] = [heatColumns(detail), colours()];
  const length = found.length > 1 ? found[1].start - found[0].start : detail.window_s;
  const height = HEAT_HEIGHT / detail.cells.length;
  const top = Math.max(...found.flatMap(({ shares }) => shares ?? []), 0.01);
  context.fillStyle = sunken;
  context.fillRect(x(from), 0, x(to) - x(from), HEAT_HEIGHT);
  context.fillStyle = accent;
  const isCategory = detail.series.kind === "category";
  for (const { start, shares } of found) {
    for (const [cell, share] of (shares ?? []).entries()) {
      context.globalAlpha = Math.sqrt(share / top);
      const y = isCategory ? cell * height : HEAT_HEIGHT - (cell + 1) * height; // the most frequent, or the largest, at the top
      context.fillRect(x(start), y, Math.max(x(start + length) - x(start) - 0.5, 1), height);
    }
  }
  context.globalAlpha = 1;
}

/** The numbers of a distribution: [cell, share now, share of the reference or "–"]. */
export function tableRows({ series, cells, current, reference }) {
  const [now, before] = [sharesOf(current), reference && sharesOf(reference)];
  return cellNames(series.kind, cells)
    .map((name, index) => [
      name,
      percent(now[index]),
      before ? percent(before[index]) : "–",
      now[index] || before?.[index],
    ])
    .filter(([, , , isUsed]) => isUsed)
    .map((row) => row.slice(0, 3));
}
