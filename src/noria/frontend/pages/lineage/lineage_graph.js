// The graph of a lineage: boxes, which are buttons, over lines as SVG. One box is in the tab order; arrow keys follow the lines.

import { make } from "../shared/dom.js";
import { svg } from "../shared/svg.js";
import { layOut } from "./lineage_layout.js";
import { titleOf } from "./lineage_texts.js";

const SIZE = { width: 176, height: 58, gapX: 18, gapY: 36 };
const MARGIN_PX = 12;

export class LineageGraph {
  #root;
  #onSelect;
  #onTrace;
  #boxes = new Map(); // by id
  #lines = []; // {edge, element}
  #layout = null;
  #edges = [];
  #current = null;

  /** `onSelect(id, {open})` when a box is selected, `open` if its details are wanted; `onTrace(id)` to trace from a box. */
  constructor(root, { onSelect, onTrace }) {
    [this.#root, this.#onSelect, this.#onTrace] = [root, onSelect, onTrace];
    root.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Draw a graph as GET /v1/registry/trace returns it, and select its first subject. */
  show({ nodes, edges, subjects }) {
    const byId = new Map(nodes.map((node) => [node.id, node]));
    this.#edges = edges.filter(({ product, source }) => byId.has(product) && byId.has(source));
    this.#layout = layOut([...byId.keys()], this.#edges, SIZE);
    const { width, height, places, courses } = this.#layout;
    this.#lines = courses.map(({ edge, points }) => ({
      edge,
      element: svg("path", {
        class: `line ${["canary", "shadow", "step"].includes(edge.role) ? edge.role : ""}`,
        d: curve(points),
        "marker-end": "url(#arrow)",
      }),
    }));
    const labels = courses
      .filter(({ edge }) => ["canary", "shadow"].includes(edge.role))
      .map(({ edge, points }) => roleLabel(edge.role, points));
    const [outerWidth, outerHeight] = [width + 2 * MARGIN_PX, height + 2 * MARGIN_PX];
    const arrow = svg(
      "marker",
      {
        id: "arrow",
        viewBox: "0 0 8 8",
        refX: 7,
        refY: 4,
        markerWidth: 9,
        markerHeight: 9,
        markerUnits: "userSpaceOnUse",
        orient: "auto",
      },
      svg("path", { class: "head", d: "M0 0L8 4L0 8z" }),
    );
    const lines = svg(
      "svg",
      {
        viewBox: `${-MARGIN_PX} ${-MARGIN_PX} ${outerWidth} ${outerHeight}`,
        width: outerWidth,
        height: outerHeight,
        "aria-hidden": "true",
      },
      svg("defs", {}, arrow),
      ...this.#lines.map(({ element }) => element),
      ...labels,
    );
    this.#boxes = new Map(
      this.#layout.layers.flat().map((id) => [id, this.#box(byId.get(id), places.get(id), subjects.includes(id))]),
    );
    const canvas = make("div", { class: "graph-canvas" }, lines, ...this.#boxes.values());
    canvas.style.width = `${outerWidth}px`;
    canvas.style.height = `${outerHeight}px`;
    this.#root.replaceChildren(canvas);
    this.select(subjects[0]);
    this.#scrollTo(subjects[0], { page: false });
  }

  /** Select a box; with `focus` it gets the focus. */
  select(id, { focus = false, open = false } = {}) {
    if (!this.#boxes.has(id)) return;
    for (const [other, box] of this.#boxes) {
      box.tabIndex = other === id ? 0 : -1;
      box.setAttribute("aria-pressed", String(other === id));
    }
    for (const { edge, element } of this.#lines)
      element.classList.toggle("lit", edge.product === id || edge.source === id);
    this.#current = id;
    if (focus) {
      this.#boxes.get(id).focus({ preventScroll: true });
      this.#scrollTo(id);
    }
    this.#onSelect(id, { open });
  }

  #box(node, { x, y }, isSubject) {
    const { kind, title, detail } = titleOf(node);
    const box = make("button", {
      type: "button",
      class: `box ${node.type}${isSubject ? " subject" : ""}`,
      tabIndex: -1,
      title: `${kind} ${title}`,
      data: { id: node.id },
    });
    box.append(
      make("span", { class: "kind", text: kind }),
      make("span", { class: "box-title", text: title }),
      make("span", { class: "box-detail", text: detail }),
    );
    box.style.left = `${x - SIZE.width / 2 + MARGIN_PX}px`;
    box.style.top = `${y - SIZE.height / 2 + MARGIN_PX}px`;
    box.style.width = `${SIZE.width}px`;
    box.style.height = `${SIZE.height}px`;
    const related = (end) =>
      this.#edges.filter((edge) => edge[end === "product" ? "source" : "product"] === node.id).length;
    box.setAttribute(
      "aria-description",
      `made from ${related("source")}, used for ${related("product")}${isSubject ? ", the subject of this graph" : ""}`,
    );
    box.addEventListener("click", ({ detail: clicks }) => this.select(node.id, { open: clicks === 0 })); // 0: by a key
    box.addEventListener("focus", () => this.#current !== node.id && this.select(node.id));
    return box;
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "c") return void this.#onTrace(this.#current);
    const next = this.#neighbour(event.key);
    if (next === undefined) return;
    event.preventDefault();
    if (next !== null) this.select(next, { focus: true });
  }

  /** The id that a key leads to from the current one; null: there is none that way, undefined: the key leads nowhere. */
  #neighbour(key) {
    const [{ layers, places }, id] = [this.#layout, this.#current];
    const layer = layers.find((each) => each.includes(id));
    const ids = this.#edges
      .filter(({ product, source }) => (key === "ArrowDown" ? product : source) === id && product !== source)
      .map(({ product, source }) => (key === "ArrowDown" ? source : product));
    const distance = (other) => Math.abs(places.get(other).x - places.get(id).x);
    switch (key) {
      case "ArrowDown":
      case "ArrowUp":
        return ids.toSorted((a, b) => distance(a) - distance(b))[0] ?? null;
      case "ArrowLeft":
        return layer[layer.indexOf(id) - 1] ?? null;
      case "ArrowRight":
        return layer[layer.indexOf(id) + 1] ?? null;
      case "Home":
        return layers[0][0];
      case "End":
        return layers.at(-1).at(-1);
    }
  }

  /** Scroll the graph until a box is in its middle, and the page until it is visible. */
  #scrollTo(id, { page = true } = {}) {
    const { x, y } = this.#layout.places.get(id);
    this.#root.scrollTo({
      left: x + MARGIN_PX - this.#root.clientWidth / 2,
      top: y + MARGIN_PX - this.#root.clientHeight / 2,
    });
    if (page) this.#boxes.get(id).scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

/** A smooth line down through the points: centres of boxes, or places between them. */
function curve(points) {
  const half = SIZE.height / 2;
  const isDown = points[0][1] <= points.at(-1)[1];
  const [start, end] = isDown ? [half, -half - 2] : [-half, half + 2];
  const path = points.map(([x, y], index) => [x, y + (index === 0 ? start : index === points.length - 1 ? end : 0)]);
  let d = `M${path[0][0]} ${path[0][1]}`;
  for (let at = 1; at < path.length; at++) {
    const [[x1, y1], [x2, y2]] = [path[at - 1], path[at]];
    const middle = (y1 + y2) / 2;
    d += `C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`;
  }
  return d;
}

function roleLabel(role, points) {
  const [[x1, y1], [x2, y2]] = points;
  return svg("text", {
    class: "role",
    x: x1 + (x2 - x1) * 0.62,
    y: y1 + SIZE.height / 2 + (y2 - y1 - SIZE.height) * 0.62 + 4,
    "text-anchor": "middle",
    text: role,
  });
}
