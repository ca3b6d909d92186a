// The results of the page /text as elements: similarities, labels, entities, ranks, tokens and times.

import { make, stageBar } from "../shared/dom.js";
import { formatDuration, pluralize } from "../shared/format.js";
import { cosine, numKept, splitAtEntities } from "./text_tasks.js";

const MAX_LABELS = 5; // of a text
const MAX_TOKENS = 300; // of a text
const NUM_HUES = 8;

/** The elements of a task's result: `value` is the response's. A function ({texts, model}, value) for each task. */
export const RESULTS = {
  embedding: ({ texts }, vectors) => [card("Similarity", ...heatMap(texts, vectors))],
  sparse_embedding: ({ texts }, values) => [
    card(
      "Tokens by weight",
      ...texts.flatMap((text, index) => [make("h3", { class: "quoted", text }), weightList(values[index])]),
    ),
  ],
  token_embedding: ({ texts }, ranks) => [rankCard(texts, ranks)],
  classification: ({ texts }, predictions) => [
    card(
      "Labels",
      ...texts.flatMap((text, index) => [make("h3", { class: "quoted", text }), labelList(predictions[index])]),
    ),
  ],
  token_classification: ({ texts, model }, entities) => [
    card("Entities", ...texts.map((text, index) => entityText(text, entities[index], labelHues(model)))),
  ],
  reranking: ({ texts }, ranks) => [rankCard(texts, ranks)],
};

const card = (title, ...children) => make("section", { class: "card" }, make("h2", { text: title }), ...children);

const rankCard = (texts, ranks) =>
  card("Ranking", make("ol", { class: "scores" }, ...ranks.map(({ index, score }) => scoreItem(texts[index], score))));

/** The tokens with the largest weights of a sparse embedding, by their ids. */
function weightList(values) {
  const largest = values.toSorted((a, b) => b.value - a.value).slice(0, MAX_LABELS);
  return make("ul", { class: "scores" }, ...largest.map(({ index, value }) => scoreItem(`token ${index}`, value)));
}

/** The cosine of each pair of texts as a table, whose cells are tinted by it. */
function heatMap(texts, vectors) {
  const numbered = (text, index) => [make("span", { class: "number", text: `${index + 1} ` }), make("span", { text })];
  const heads = texts.map((text, index) => {
    const [number, name] = numbered(text, index);
    name.className = "visually-hidden";
    return make("th", { scope: "col", title: text }, number, name);
  });
  const rows = texts.map((text, index) => {
    const cells = vectors.map((vector) => {
      const value = cosine(vectors[index], vector);
      const cell = make("td", { class: "number", text: value.toFixed(2).replace("-", "−") });
      cell.style.setProperty("--share", `${Math.round(Math.min(Math.max(value, 0), 1) * 50)}%`);
      return cell;
    });
    return make(
      "tr",
      {},
      make("th", { scope: "row", title: text }, make("div", {}, ...numbered(text, index))),
      ...cells,
    );
  });
  const about = make("p", {
    class: "small muted",
    text: "The cosine of each pair of embeddings: 1 is the same direction.",
  });
  const head = make("thead", {}, make("tr", {}, make("td"), ...heads));
  const table = make("table", { class: "heat" }, head, make("tbody", {}, ...rows));
  const scroll = make("div", { class: "scroll", tabIndex: 0, role: "region" }, table);
  scroll.setAttribute("aria-label", "Similarity of the texts");
  return [about, scroll];
}

function labelList(predictions) {
  const items = predictions.slice(0, MAX_LABELS).map(({ label, score }) => scoreItem(label, score));
  const rest = predictions.length - items.length;
  if (rest > 0) items.push(make("li", { class: "small muted", text: `and ${pluralize(rest, "more label")}` }));
  return make("ul", { class: "scores" }, ...items);
}

/** An item of a list: a name, and its score as a number and a bar. */
function scoreItem(name, score) {
  const bar = make("span", { class: "score-bar", ariaHidden: "true" });
  bar.style.setProperty("--share", `${100 * Math.min(Math.max(score, 0), 1)}%`);
  return make(
    "li",
    {},
    make("span", { class: "score-name", text: name }),
    bar,
    make("span", { class: "number", text: formatScore(score) }),
  );
}

const formatScore = (score) => score.toFixed(3).replace("-", "−");

/** The number of the colour of each label without "B-" or "I-", in the model's order. */
function labelHues(model) {
  const names = [...new Set(model.noria.labels.filter((label) => label !== "O").map(nameOf))];
  return new Map(names.map((name, index) => [name, (index % NUM_HUES) + 1]));
}

const nameOf = (label) => label.replace(/^[BI]-/, "");

function entityText(text, entities, hues) {
  const parts = splitAtEntities(text, entities).map(([part, entity]) => {
    if (!entity) return part;
    const note = make("small", { class: "number", text: ` ${entity.entity_group} ${formatScore(entity.score)}` });
    return make("mark", { class: `hue-${hues.get(entity.entity_group) ?? 0}` }, part, note);
  });
  return make(
    "p",
    { class: "entities" },
    ...parts,
    ...(entities.length ? [] : [make("small", { class: "muted", text: " no entity" })]),
  );
}

/**
 * The tokens of texts, from POST /tokenize. `names` has what each text is called; `maxLength`: after so many tokens a text is cut,
 * null if that depends on another; `entities` has those of each text, or null.
 */
export function tokenCard(names, tokens, { model, maxLength, entities = null }) {
  const about = make("p", { class: "small muted token-detail", text: ABOUT_TOKENS });
  const hues = entities && labelHues(model);
  const lists = tokens.map((own, index) => {
    const kept = maxLength === null ? own.length : numKept(own, maxLength);
    const hueOf = ({ special, start, stop }) =>
      hues && !special
        ? (hues.get(entities[index].find((each) => each.start < stop && start < each.end)?.entity_group) ?? null)
        : null;
    return tokenList(names[index], own, { kept, hueOf, describe: (text) => (about.textContent = text) });
  });
  const parts = tokens.flatMap((own, index) => [
    make("h3", { class: "quoted", text: names[index] }),
    countLine(own),
    lists[index],
  ]);
  return card("Tokens", ...parts, about);
}

const ABOUT_TOKENS = "Point at a token, or go to it with Tab and the arrow keys, to see its id.";

function countLine(tokens) {
  const special = tokens.filter((token) => token.special).length;
  return make("p", { class: "small muted", text: `${pluralize(tokens.length, "token")}, ${special} of them special` });
}

function tokenList(name, tokens, { kept, hueOf, describe }) {
  const chips = tokens.slice(0, MAX_TOKENS).map((token, index) => {
    const isCut = index >= kept && !token.special;
    const joins = index > 0 && !token.special && token.start === tokens[index - 1].stop;
    const classes = [
      "token",
      token.special && "special",
      isCut && "cut",
      joins && "joined",
      hueOf(token) && `hue-${hueOf(token)}`,
    ];
    const facts = [`id ${token.id}`, token.special && "special", isCut && "cut off"].filter(Boolean).join(", ");
    const properties = { type: "button", title: facts, tabIndex: index === 0 ? 0 : -1 };
    const chip = make("button", { ...properties, class: classes.filter(Boolean).join(" "), text: token.text });
    const show = () => describe(`“${token.text}”: ${facts}`);
    for (const event of ["pointerenter", "focus", "click"]) chip.addEventListener(event, show);
    return chip;
  });
  const list = make("ol", { class: "tokens" }, ...chips.map((chip) => make("li", {}, chip)));
  if (tokens.length > chips.length)
    list.append(make("li", { class: "small muted", text: `and ${tokens.length - chips.length} more` }));
  list.setAttribute("aria-label", `Tokens of ${name}`);
  list.addEventListener("keydown", (event) => moveFocus(event, chips));
  return list;
}

/** Tab reaches one chip of a list; arrows, Home and End go to the others. */
function moveFocus(event, chips) {
  const at = chips.indexOf(event.target);
  const to = {
    ArrowRight: at + 1,
    ArrowDown: at + 1,
    ArrowLeft: at - 1,
    ArrowUp: at - 1,
    Home: 0,
    End: chips.length - 1,
  }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  chips[at].tabIndex = -1;
  const chip = chips[(to + chips.length) % chips.length];
  chip.tabIndex = 0;
  chip.focus();
}

/** Where the time of a request went: `timing` is of its header Server-Timing, `total` was measured here; in seconds. */
export function timeCard(timing, total, meanBatch) {
  const { tokenize, queue, infer, postprocess, predicted } = timing;
  const stages = [
    ["tokenize", "tokenize", "texts to token ids", tokenize],
    ["queue", "queue", "waiting for a batch", queue],
    ["infer", "infer", "the model computes the batch", infer],
    ["postprocess", "postprocess", "numbers to the response", postprocess],
    ["rest", "rest", "HTTP, the network and this browser", Math.max(total - tokenize - queue - infer - postprocess, 0)],
  ];
  const batchText =
    meanBatch > 1.05 ? `in batches of ${meanBatch.toFixed(1)} texts on average` : "each text alone in its batch";
  const text = `${formatDuration(total)} in all, ${batchText}. Queue and infer took ${formatDuration(queue + infer)}; the prediction was ${formatDuration(predicted)}.`;
  return card(
    "Time",
    make("div", { class: "timing" }, ...stageBar(stages), make("p", { class: "small muted number", text })),
  );
}
