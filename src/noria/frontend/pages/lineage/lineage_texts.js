// Texts and details of the nodes of a lineage. Whatever events say is shown as text.

import {
  ageOf,
  endpointUrl,
  formatLong,
  formatState,
  formatTime,
  shortDigest,
  stateChip,
} from "../registry/registry_format.js";
import { make } from "../shared/dom.js";
import { pluralize } from "../shared/format.js";

const MAX_ENTRIES = 100; // parameters or metrics that are shown
const LATE_S = 3600; // a run whose events say another time than that of their arrival

export const KINDS = {
  image: "image",
  endpoint: "endpoint",
  deployment: "deployment",
  model: "model version",
  run: "run",
  dataset: "dataset version",
};

/** What a box says: {kind, title, detail}. */
export function titleOf(node) {
  switch (node.type) {
    case "image":
      return { kind: "image", title: node.name, detail: node.version ?? node.model ?? "" };
    case "endpoint":
      return { kind: "endpoint", title: node.name, detail: "" };
    case "deployment":
      return {
        kind: `deployment ${node.number}`,
        title: node.version,
        detail: `${formatState(node.state)} on ${node.endpoint}`,
      };
    case "model":
      return { kind: "model", title: node.names.join(", ") || "not in the registry", detail: shortDigest(node.digest) };
    case "run":
      return { kind: node.parent_id ? "step" : "run", title: node.job_name, detail: node.status };
    default:
      return {
        kind: "dataset",
        title: node.name,
        detail: node.digest ? shortDigest(node.digest) : node.version || "version not stated",
      };
  }
}

const code = (text) => make("code", { class: "path", text });

/** What is known of a node: [name, text or element][]. */
export function detailsOf(node) {
  switch (node.type) {
    case "image":
      return [
        ["File", node.name],
        ["Asked for", node.model],
        ["Version", node.version],
        ["Deployment", node.deployment],
        ["Digest", node.digest && code(node.digest)],
        ["Fingerprint", node.fingerprint && code(node.fingerprint)],
      ];
    case "endpoint":
      return [
        ["Name", node.name],
        ["More", make("a", { href: endpointUrl(node.name), text: "its deployments" })],
      ];
    case "deployment":
      return [
        ["State", stateChip(node.state)],
        ["Version", node.version],
        ["Endpoint", make("a", { href: endpointUrl(node.endpoint), text: node.endpoint })],
        ["Asked for", whenAnd(node.created.at)],
        ["By", node.created.by],
        ["Why", node.created.why],
      ];
    case "model":
      return [
        ["Versions", node.names.join(", ")],
        ["SHA-256", code(node.digest)],
        ["More", make("a", { href: "models", text: "all versions" })],
      ];
    case "run":
      return runDetails(node);
    default:
      return [
        ["Namespace", node.namespace],
        ["Name", node.name],
        ["Version", node.version || "not stated"],
        ["SHA-256", node.digest ? code(node.digest) : "not stated"],
        [
          "Found at",
          node.uris.length
            ? make("span", {}, ...node.uris.map((uri) => make("code", { class: "path block", text: uri })))
            : null,
        ],
      ];
  }
}

function runDetails(node) {
  const { started_at: started, ended_at: ended } = node;
  return [
    ["Job", `${node.job_namespace}/${node.job_name}`],
    ["Status", stateChip(node.status)],
    ["Started", started === null ? "not stated" : whenAnd(started)],
    ["Took", ended === null || started === null ? null : formatLong(ended - started)],
    ["Parameters", entries(node.params)],
    ["Metrics", entries(node.metrics)],
    ["Error", node.error],
    ["Run", code(node.run_id)],
    ["Sent by", node.sender],
    ["Received", started !== null && Math.abs(node.received_at - started) > LATE_S ? whenAnd(node.received_at) : null],
    [
      "Struck out",
      node.struck_out
        ? `${node.struck_out.num_events} events, by ${node.struck_out.last.by}${node.struck_out.last.why ? `: ${node.struck_out.last.why}` : ""}`
        : null,
    ],
    ["Shortened", node.is_shortened ? "more or longer values are in its events" : null],
  ];
}

const whenAnd = (at) =>
  make("span", {}, formatTime(at), " ", make("span", { class: "small muted" }, "(", ageOf(at), ")"));

function entries(values) {
  const all = Object.entries(values);
  if (!all.length) return null;
  const items = all
    .slice(0, MAX_ENTRIES)
    .map(([name, value]) =>
      make(
        "span",
        { class: "block" },
        make("span", { class: "muted", text: `${name} ` }),
        typeof value === "string" ? value : JSON.stringify(value),
      ),
    );
  if (all.length > items.length)
    items.push(make("span", { class: "small muted", text: `and ${pluralize(all.length - items.length, "other")}` }));
  return make("span", {}, ...items);
}
