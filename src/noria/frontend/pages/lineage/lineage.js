// The page /lineage: asks for what made a thing and what was made from it, or what made an image file, and shows the graph and its boxes.

import { lineageUrl } from "../registry/registry_format.js";
import { fetchJson, RegistryPage } from "../registry/registry_page.js";
import { button, byId, make, setText } from "../shared/dom.js";
import { pluralize } from "../shared/format.js";
import { LineageGraph } from "./lineage_graph.js";
import { detailsOf, KINDS, titleOf } from "./lineage_texts.js";

const MAX_NODES = 200; // in each direction
const MAX_START_VERSIONS = 20;
const MAX_LISTED = 30; // neighbours in the details
const IMAGE_ID = "image";

let graph = null; // {nodes, edges, subjects, is_cut}
let file = null; // an image that was given instead of a text

const drawing = new LineageGraph(byId("graph"), { onSelect: showDetails, onTrace: traceFrom });
const subject = () => new URLSearchParams(location.search).get("of") ?? "";

const page = new RegistryPage(async () => {
  byId("of").value = file ? "" : subject();
  byId("graph-area").hidden = true;
  if (file) showGraph(await traceImage(file));
  else if (subject())
    showGraph(await fetchJson(`/v1/registry/trace?of=${encodeURIComponent(subject())}&limit=${MAX_NODES}`));
  else await showStart();
});

async function traceImage(image) {
  const { graph: found, ...facts } = await fetchJson(`/v1/registry/trace?limit=${MAX_NODES}`, {
    method: "POST",
    body: image,
  });
  const node = { type: "image", id: IMAGE_ID, name: image.name, ...facts };
  const edges = found.subjects.map((id) => ({ product: IMAGE_ID, source: id, role: "made by" }));
  return { ...found, nodes: [node, ...found.nodes], edges: [...edges, ...found.edges], subjects: [IMAGE_ID] };
}

/** Links to begin with: endpoints and the latest versions. */
async function showStart() {
  const endpoints = (await fetchJson("/v1/deployments")).data.map(({ endpoint }) => [endpoint, `endpoint:${endpoint}`]);
  const versions = (await fetchJson(`/v1/registry/versions?limit=${MAX_START_VERSIONS}`)).data.map(
    ({ name, version }) => [name, `model:${version.digest}`],
  );
  const lists = [
    ["Endpoints", endpoints],
    ["Latest versions", versions],
  ].filter(([, links]) => links.length);
  byId("start-links").replaceChildren(
    ...lists.map(([title, links]) =>
      make(
        "div",
        {},
        make("h3", { text: title }),
        make(
          "ul",
          { class: "links" },
          ...links.map(([text, of]) => make("li", {}, make("a", { href: lineageUrl(of), text }))),
        ),
      ),
    ),
    ...(lists.length ? [] : [make("p", { class: "muted", text: "The registry has no models yet." })]),
  );
  byId("start").hidden = false;
}

function showGraph(found) {
  graph = found;
  byId("start").hidden = true;
  byId("graph-area").hidden = false;
  byId("cut").hidden = !graph.is_cut;
  setText(
    byId("cut"),
    `There is more: at most ${MAX_NODES} boxes are shown each way. Trace from a box at the edge to see what is beyond it.`,
  );
  drawing.show(graph);
  const shown = Object.entries(KINDS).filter(([type]) => graph.nodes.some((node) => node.type === type));
  byId("kinds").replaceChildren(
    ...shown.map(([type, text]) => make("li", {}, make("i", { class: `swatch ${type}` }), text)),
  );
  const text = graph.edges.length
    ? `${pluralize(graph.nodes.length, "box", "boxes")} around ${nameOf(graph.subjects[0])}.`
    : `Nothing is recorded about ${nameOf(graph.subjects[0])}.`;
  setText(byId("announcements"), text);
  document.title = `Noria: lineage of ${nameOf(graph.subjects[0])}`;
}

const nodeOf = (id) => graph.nodes.find((node) => node.id === id);
const nameOf = (id) => titleOf(nodeOf(id)).title;

function showDetails(id, { open }) {
  const node = nodeOf(id);
  setText(byId("details-title"), `${KINDS[node.type]} ${titleOf(node).title}`);
  const facts = detailsOf(node).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const list = make(
    "dl",
    {},
    ...facts.flatMap(([name, value]) => [
      make("dt", { text: name }),
      make("dd", {}, typeof value === "number" ? String(value) : value),
    ]),
  );
  const others = [
    ["Sources", graph.edges.filter(({ product }) => product === id).map(({ source, role }) => [source, role])],
    ["Products", graph.edges.filter(({ source }) => source === id).map(({ product, role }) => [product, role])],
  ].filter(([, links]) => links.length);
  const actions =
    id === IMAGE_ID || graph.subjects.includes(id)
      ? []
      : [button("Trace from here", () => traceFrom(id), { class: "primary" })];
  byId("details-body").replaceChildren(
    list,
    ...others.map(([title, links]) => neighbourList(title, links)),
    ...actions,
  );
  if (open) byId("details").focus();
}

function neighbourList(title, links) {
  const items = links.slice(0, MAX_LISTED).map(([id, role]) => {
    const { kind, title: name } = titleOf(nodeOf(id));
    return make(
      "li",
      {},
      button(`${kind} ${name}`, () => drawing.select(id, { focus: true }), { class: "link" }),
      " ",
      make("span", { class: "small muted", text: role }),
    );
  });
  if (links.length > items.length)
    items.push(make("li", { class: "small muted", text: `and ${links.length - items.length} more in the graph` }));
  return make("div", {}, make("h3", { text: title }), make("ul", { class: "neighbours" }, ...items));
}

/** Trace `of`: it becomes part of the page's address. */
function trace(of) {
  file = null;
  history.pushState(null, "", lineageUrl(of));
  page.update();
}

function traceFrom(id) {
  if (id !== IMAGE_ID) trace(id);
}

function takeFile(given) {
  if (!given) return;
  file = given;
  history.pushState(null, "", "lineage");
  page.update();
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const of = byId("of").value.trim();
  if (of) trace(of);
  else byId("of").focus();
});
byId("choose").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", ({ currentTarget }) => {
  takeFile(currentTarget.files[0]);
  currentTarget.value = "";
});
byId("details").addEventListener("keydown", (event) => {
  if (event.key === "Escape") byId("graph").querySelector('[aria-pressed="true"]')?.focus();
});
for (const name of ["dragover", "drop"]) {
  window.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (name === "drop") takeFile(event.dataTransfer.files[0]);
  });
}
window.addEventListener("popstate", () => {
  file = null;
  page.update();
});
