// The page /text: sends the texts of the form to a text encoder and shows what comes back; again after each pause in typing.

import { ApiError, fetchWithKey, savedKey, serverUrl, toApiError } from "../shared/api.js";
import { byId, copyButtons, make, setText } from "../shared/dom.js";
import { pluralize } from "../shared/format.js";
import { isUnreachable, ServedModels } from "../shared/served_models.js";
import { textSnippets } from "../shared/snippets.js";
import { RESULTS, timeCard, tokenCard } from "./text_results.js";
import { parseServerTiming, splitLines, TASKS } from "./text_tasks.js";

const MAX_TEXTS = 32; // more rows and columns are no map to read
const PAUSE_MS = 600; // in typing

let models = [];
let running = new AbortController();
let pause = null;

const servedModels = new ServedModels("encoder", {
  field: byId("texts"),
  setReady: (ready) => (byId("run").disabled = !ready),
  show: showModels,
});

const model = () => models.find(({ id }) => id === byId("model").value);
const task = () => TASKS[model().noria.task];

function showModels(served) {
  const before = byId("model").value;
  models = served;
  byId("model").replaceChildren(...models.map(({ id, noria }) => new Option(`${id}: ${TASKS[noria.task].name}`, id)));
  byId("model-field").hidden = models.length < 2;
  if (models.some(({ id }) => id === before)) byId("model").value = before;
  selectModel();
}

/** Adapt the form to the selected model, with its task's example unless the texts were edited, and send them. */
function selectModel() {
  const { id, noria } = model();
  const { verb, name, example, query = "" } = task();
  const isExample = Object.values(TASKS).some((each) => each.example.join("\n") === byId("texts").value);
  if (isExample || !byId("texts").value.trim()) byId("texts").value = example.join("\n");
  byId("query-field").hidden = !query;
  byId("query").value ||= query;
  byId("run").textContent = verb;
  const size = noria.task.endsWith("embedding")
    ? `${noria.dimensions} numbers`
    : pluralize(noria.labels.length, "label");
  byId("facts").textContent =
    `${id} is a ${noria.architecture}, version ${noria.version}, for ${name}: ${size}, at most ${noria.max_length} tokens a text.`;
  run();
}

/** What the form asks for; throws an ApiError if the page does not send it. */
function request() {
  const [texts, query] = [splitLines(byId("texts").value), byId("query").value.trim()];
  const max = Math.min(MAX_TEXTS, model().noria.max_texts);
  const isReranking = Boolean(task().query);
  if (!texts.length) throw new ApiError(0, { message: "Write at least one text." });
  if (texts.length > max)
    throw new ApiError(0, { message: `There are ${texts.length} texts; this page takes at most ${max}.` });
  if (isReranking && !query) throw new ApiError(0, { message: "Write a query." });
  return { texts, query, model: model(), isReranking };
}

/** Send the request of the form. If it is `typed`, the form may be unfinished: no mistake of its own is shown. */
async function run({ typed = false } = {}) {
  clearTimeout(pause);
  if (byId("run").disabled && typed) return;
  running.abort();
  running = new AbortController();
  const { signal } = running;
  try {
    const asked = request();
    showSnippets(asked);
    byId("results").setAttribute("aria-busy", "true");
    const cards = await resultCards(asked, signal);
    byId("results").replaceChildren(...cards);
    showError(null);
    if (!typed) byId("announcements").textContent = `Results of ${pluralize(asked.texts.length, "text")}.`;
  } catch (error) {
    if (signal.aborted || (typed && error.status === 0 && !error.code)) return;
    byId("results").replaceChildren();
    showError(error);
  } finally {
    if (!signal.aborted) byId("results").removeAttribute("aria-busy");
  }
}

async function resultCards(asked, signal) {
  const { path, body } = task();
  const { texts, query, isReranking } = asked;
  const { id, noria } = asked.model;
  const started = performance.now();
  const response = await post(path, body({ model: id, query, texts }), signal);
  const value = await response.json();
  const total = (performance.now() - started) / 1000;
  const tokenized = isReranking ? [query, ...texts] : texts;
  const tokens = await (await post("/tokenize", { inputs: tokenized, model: id }, signal)).json(); // afterwards: it would delay what is timed
  const numCut = Number(response.headers.get("x-noria-truncated") ?? 0);
  const timing = parseServerTiming(response.headers.get("server-timing"));
  const entities = noria.task === "token_classification" ? value : null;
  return [
    ...(numCut
      ? [
          make("p", {
            class: "note warn",
            text: `${numCut} of ${pluralize(texts.length, "text")} cut: the model takes ${noria.max_length} tokens.`,
          }),
        ]
      : []),
    ...RESULTS[noria.task](asked, value),
    timeCard(timing, total, Number(response.headers.get("x-noria-mean-batch") ?? 1)),
    tokenCard(tokenized, tokens, { model: asked.model, maxLength: isReranking ? null : noria.max_length, entities }),
  ];
}

/** POST as JSON; throws the ApiError that ended it. */
async function post(path, body, signal) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  const response = await fetchWithKey(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { code: "unreachable", message: "the server cannot be reached." });
  });
  if (!response.ok) throw await toApiError(response);
  return response;
}

function showError(error) {
  byId("form-error").hidden = error === null;
  setText(byId("form-error"), error?.message ?? "");
  if (error?.status === 401) servedModels.askForKey(error.message);
  else if (error && isUnreachable(error)) servedModels.wait();
}

function showSnippets({ texts, query, model: { id } }) {
  const { path, body } = task();
  const snippets = textSnippets(path, body({ model: id, query, texts }));
  const written = Object.entries(snippets).map(([name, write]) => [name, () => write(serverUrl, savedKey() !== "")]);
  const buttons = copyButtons(
    "copies-label",
    written,
    (name) => (byId("announcements").textContent = `Copied as ${name}.`),
  );
  byId("copies").replaceChildren(buttons);
  setText(byId("command"), snippets.curl(serverUrl, savedKey() !== ""));
}

const form = byId("request-form");
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("run").disabled) run();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
form.addEventListener("input", ({ target }) => {
  if (target !== byId("texts") && target !== byId("query")) return;
  clearTimeout(pause);
  pause = setTimeout(() => models.length && run({ typed: true }), PAUSE_MS);
});
byId("model").addEventListener("change", selectModel);
servedModels.wait();
