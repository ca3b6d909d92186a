// The page /models: the registry's versions by model, and what this server holds of them and has answered with them.

import {
  ageOf,
  byWhom,
  digestCode,
  endpointUrl,
  formatCount,
  lineageUrl,
  stateChip,
  table,
} from "../registry/registry_format.js";
import { fetchJson, RegistryPage, renderIfChanged } from "../registry/registry_page.js";
import { byId, make } from "../shared/dom.js";
import { formatSize, pluralize } from "../shared/format.js";

const INTERVAL_S = 5; // two requests, one of them to the database
const PAGE_SIZE = 100;
const MINUTE_S = 60;

const pages = []; // of versions; the first is fetched again and again, the next one when it is wanted
let wantsOlder = false;
let served = null;

const page = new RegistryPage(async () => {
  served = await fetchJson("/v1/registry/served");
  showServed(); // also while the registry is away
  if (wantsOlder) {
    pages.push(await fetchJson(`/v1/registry/versions?limit=${PAGE_SIZE}&before=${pages.at(-1).next}`));
    wantsOlder = false;
  } else {
    pages[0] = await fetchJson(`/v1/registry/versions?limit=${PAGE_SIZE}`);
  }
  showModels();
}, INTERVAL_S);

byId("older").addEventListener("click", () => {
  wantsOlder = true;
  page.update();
});

const minute = () => Math.floor(Date.now() / 1000 / MINUTE_S); // ages are shown again each minute

/** "1,204 answered, 3 failed", or "–". */
function describeRequests(requests) {
  const { ok = 0, ...others } = requests?.by_outcome ?? {};
  const failed = Object.values(others).reduce((sum, number) => sum + number, 0);
  if (!ok && !failed) return "–";
  return `${formatCount(ok)} answered${failed ? `, ${formatCount(failed)} not` : ""}`;
}

const requestsOf = (endpoint, version) =>
  served?.requests.find((each) => each.endpoint === endpoint && each.version === version);

function showServed() {
  byId("served").hidden = false;
  renderIfChanged(byId("served-body"), served, () => {
    const held = new Map();
    for (const { engine, state, device, models } of served.engines) {
      for (const model of models) {
        const key = `${model.name} ${model.fingerprint}`;
        held.set(key, held.get(key) ?? { model, engines: [] });
        held
          .get(key)
          .engines.push(`engine ${engine}${device ? ` (${device})` : ""}${state === "ready" ? "" : `, ${state}`}`);
      }
    }
    if (!held.size) return [make("p", { class: "muted", text: "No engine has reported its models yet." })];
    const rows = [...held.values()].map(({ model, engines }) => [
      model.name,
      model.version === null
        ? [
            make("span", { text: "the configuration’s" }),
            make("code", { class: "small block", text: model.fingerprint }),
          ]
        : [
            make("a", { href: endpointUrl(model.name), text: model.version }),
            make("span", { class: "small muted block", text: `deployment ${model.deployment}` }),
          ],
      model.kind,
      engines.map((text) => make("span", { class: "block", text })),
      describeRequests(requestsOf(model.name, model.version)),
      make("code", { class: "small path", text: model.folder }),
    ]);
    const about =
      "Requests are those since the server’s start; of a model of the configuration, those to deployed versions of that name and jobs are included.";
    return [
      table("Models that engines hold", ["Name in requests", "Version", "Kind", "Held by", "Requests", "Folder"], rows),
      make("p", { class: "small muted after", text: about }),
    ];
  });
}

function showModels() {
  const known = new Set();
  const versions = pages.flatMap(({ data }) => data).filter(({ name }) => !known.has(name) && known.add(name));
  renderIfChanged(byId("models"), [versions, served, minute()], () => {
    if (!versions.length)
      return [
        make("p", { class: "note", text: "The registry has no models yet. Add one: noria models add NAME SOURCE." }),
      ];
    const byModel = Map.groupBy(versions, ({ version }) => version.model);
    return [...byModel].map(([model, its]) => modelCard(model, its));
  });
  const { next } = pages.at(-1);
  byId("more").hidden = next === null;
  byId("more-text").textContent = `${pluralize(versions.length, "version")} shown, the latest added of all models.`;
}

function modelCard(model, versions) {
  const rows = versions.toSorted((a, b) => b.version.number - a.version.number).map(versionRow);
  const heads = ["Version", "Added", "Content", "Held by", "Deployments", "Requests", "Lineage"];
  const title = make("h2", { text: model });
  return make("section", { class: "card" }, title, table(`Versions of ${model}`, heads, rows));
}

function versionRow({ name, version, num_deployments, deployments }) {
  const chips = version.aliases.map((alias) => make("span", { class: "chip alias", text: alias }));
  chips.push(...version.tags.map((tag) => make("span", { class: "chip tag", text: tag })));
  if (version.removed) chips.push(make("span", { class: "chip bad", text: "removed" }));
  const removed = version.removed
    ? [make("p", { class: "small" }, "removed ", ageOf(version.removed.at), " ", ...byWhom(version.removed))]
    : [];
  const where = deployments.map(({ endpoint, state, id }) =>
    make(
      "span",
      { class: "block" },
      make("a", { href: endpointUrl(endpoint), text: endpoint, title: `deployment ${id}` }),
      " ",
      stateChip(state),
    ),
  );
  const rest = num_deployments - deployments.length;
  if (rest > 0) where.push(make("span", { class: "small muted", text: `and ${rest} more` }));
  const endpoints = [...new Set(deployments.map(({ endpoint }) => endpoint))];
  const answered = endpoints
    .map((endpoint) => [endpoint, describeRequests(requestsOf(endpoint, name))])
    .filter(([, text]) => text !== "–");
  const cells = [
    [make("p", {}, ageOf(version.added.at), " ", ...byWhom(version.added)), ...removed],
    [
      digestCode(version.digest),
      make("span", {
        class: "small muted block",
        text: `${formatSize(version.size_bytes)} in ${pluralize(version.num_files, "file")}, ${version.kind}`,
      }),
      make("span", { class: "small muted block path", text: version.source }),
    ],
    heldBy(name),
    where.length ? where : "–",
    answered.length
      ? answered.map(([endpoint, text]) => make("span", { class: "block", text: `${text} as ${endpoint}` }))
      : "–",
    make("a", { href: lineageUrl(`model:${version.digest}`), text: "trace", ariaLabel: `Lineage of ${name}` }),
  ];
  return [[make("span", { class: version.removed ? "name removed" : "name", text: name }), " ", ...chips], ...cells];
}

/** Which engines hold a version now, and as which endpoint. */
function heldBy(name) {
  const held = served.engines.flatMap(({ engine, models }) =>
    models.filter(({ version }) => version === name).map((model) => `engine ${engine} as ${model.name}`),
  );
  return held.length ? held.map((text) => make("span", { class: "block", text })) : "–";
}
