// The page /live: one stream, one state, a panel for each engine, one loop of animation frames.

import { fetchWithKey, savedKey, saveKey, serverUrl } from "../shared/api.js";
import { copy, hide, prefersReducedMotion, setText } from "../shared/dom.js";
import { summarizeEngine } from "../shared/format.js";
import { filesNeededBy, SNIPPETS, textSnippets } from "../shared/snippets.js";
import { EnginePanel } from "./engine_panel.js";
import { LiveStream } from "./live_stream.js";
import { sendSampleTraffic } from "./sample_traffic.js";
import { initialState, reduce } from "./state.js";

const SUMMARY_INTERVAL_S = 20;
const REDUCED_MOTION_FRAME_S = 0.5;
const HIDDEN_S = 15; // after so long in a hidden tab the stream is closed

const PHASES = {
  connecting: ["connecting", ""],
  open: ["live", "good"],
  broken: ["reconnecting", "bad"],
  locked: ["needs a key", "warn"],
  off: ["switched off", "warn"],
  paused: ["paused", "warn"],
};

const query = (selector) => document.querySelector(selector);
const servesImages = query(`nav [data-kind="diffusion"]`) !== null; // the server leaves out what is for models that it has not
const panels = new Map();
let state = initialState;
let summarizedAt = -Infinity;
let hiddenTimer = null;
let sampling = null;

const stream = new LiveStream(handleEvent);

function handleEvent(event) {
  const before = state;
  state = reduce(state, event);
  if (event.name === "engine_view") panels.get(event.data.engine)?.thumbnails.update(event.data);
  if (state.connection.phase !== before.connection.phase || state.connection.retry_at !== before.connection.retry_at)
    showConnection();
  if (event.name === "engines") showEngines();
  const live = state.connection.phase === "open";
  for (const engine of state.engines) {
    if (event.name !== "engine_view" || event.data.engine === engine.name)
      panels.get(engine.name).update(engine, state.hues, live);
  }
  const allReported = state.engines.every((engine) => engine.state !== "ready" || engine.view !== null);
  if (event.name === "engine_view" && allReported && event.at - summarizedAt > SUMMARY_INTERVAL_S) {
    summarizedAt = event.at;
    const visibleEngines = state.engines.filter(({ view }) => view !== null);
    setText(query("#summary"), visibleEngines.map(({ name, view }) => summarizeEngine(name, view)).join(" "));
  }
}

function showEngines() {
  const names = new Set(state.engines.map(({ name }) => name));
  for (const [name, panel] of panels) {
    if (names.has(name)) continue;
    panel.root.remove();
    panels.delete(name);
  }
  for (const { name } of state.engines) {
    if (panels.has(name)) continue;
    panels.set(name, new EnginePanel(name));
    query("#engines").append(panels.get(name).root);
  }
}

function showConnection() {
  const { phase, message } = state.connection;
  const [text, tone] = PHASES[phase];
  setText(query("#page-status"), text);
  query("#page-status").className = `chip status ${tone}`;
  if (phase === "locked") showKeyForm(savedKey() ? message : "");
  else if (phase !== "connecting") hide(query("#key-form"), query("#main")); // while connecting, the key may still be wrong
  query("#sample").disabled = phase === "locked";
  if (phase === "open") {
    hide(query("#connection-error"), query("#main"));
    showCommand();
  }
  if (phase === "broken" || phase === "off") {
    query("#connection-error").className = phase === "off" ? "note warn" : "note bad";
    query("#connection-error").hidden = false;
    setText(query("#summary"), phase === "off" ? message : `The stream broke: ${message}`);
  }
  if (phase === "off") setText(query("#connection-error-text"), message);
}

function showKeyForm(why) {
  query("#key-form").hidden = false;
  setText(query("#key-error"), why);
  query("#key").focus();
}

function showReconnect(at) {
  const { phase, message, retry_at } = state.connection;
  if (phase !== "broken") return;
  setText(
    query("#connection-error-text"),
    `No updates: ${message} Trying again in ${Math.max(0, Math.ceil(retry_at - at))} s.`,
  );
}

let drawnAt = 0;
function frame(milliseconds) {
  const at = milliseconds / 1000;
  const paused = state.connection.phase === "paused";
  if (!paused && (!prefersReducedMotion() || at - drawnAt >= REDUCED_MOTION_FRAME_S)) drawPanels(at);
  requestAnimationFrame(frame);
}

function drawPanels(at) {
  drawnAt = at;
  for (const panel of panels.values()) panel.frame(at);
  showReconnect(at);
}

query("#retry").addEventListener("click", () => stream.open());

query("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(query("#key").value);
  stream.open();
});

function pause() {
  stream.close();
  handleEvent({ name: "connection", connection: { phase: "paused" } });
  drawPanels(performance.now() / 1000); // the last view
}

query("#pause").addEventListener("click", ({ currentTarget: button }) => {
  const paused = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(paused));
  if (paused) pause();
  else stream.open();
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (query("#pause").getAttribute("aria-pressed") === "true") return;
  if (document.hidden) hiddenTimer = setTimeout(pause, HIDDEN_S * 1000);
  else if (state.connection.phase === "paused") stream.open();
});

query("#sample").addEventListener("click", async ({ currentTarget: button }) => {
  if (sampling) return sampling.abort();
  sampling = new AbortController();
  setText(button, "Stop sample traffic");
  const onProgress = ({ sent, generated, failed }, total) =>
    setText(
      query("#sample-status"),
      `${sent} of ${total} requests sent, ${generated} done${failed ? `, ${failed} failed` : ""}.`,
    );
  try {
    await sendSampleTraffic(onProgress, sampling.signal, { texts: !servesImages });
  } catch (error) {
    if (error.name !== "AbortError") setText(query("#sample-status"), `Not sent: ${error.message}`);
  } finally {
    sampling = null;
    setText(button, "Send sample traffic");
  }
});

const EXAMPLE = { prompt: "a red circle above a blue square", inference_steps: 40 };
const TEXT_EXAMPLE = { inputs: ["a red circle above a blue square", "the train to Paris"] };
let files = {}; // that the default model needs beside the prompt
function curlCommand() {
  const needsKey = savedKey() !== "";
  return servesImages
    ? SNIPPETS.curl({ ...EXAMPLE, ...files }, serverUrl, needsKey)
    : textSnippets("/", TEXT_EXAMPLE).curl(serverUrl, needsKey);
}
async function showCommand() {
  setText(query("#curl"), curlCommand());
  if (!servesImages) return;
  const models = await fetchWithKey("/v1/models")
    .then((response) => response.json())
    .catch(() => ({})); // without them the prompt is shown alone
  files = filesNeededBy(models.data?.find((model) => model.noria?.kind === "diffusion")?.noria);
  setText(query("#curl"), curlCommand());
}
setText(query("#curl"), curlCommand());
query("#copy").addEventListener("click", async () => {
  try {
    await copy(curlCommand());
    setText(query("#copied"), "Copied.");
  } catch {
    setText(query("#copied"), "The browser does not let this page copy; select the text.");
  }
});

requestAnimationFrame(frame);
stream.open();
