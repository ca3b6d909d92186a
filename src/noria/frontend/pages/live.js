// The page /live: one stream, one state, one panel for each engine, one loop of frames.

import { copy, hide, write } from "./elements.js";
import { savedKey, saveKey } from "./events.js";
import { Panel } from "./panel.js";
import { SNIPPETS } from "./snippets.js";
import { initial, reduce } from "./state.js";
import { Stream } from "./stream.js";
import { calm } from "./theme.js";
import { sendSamples } from "./traffic.js";
import { summary } from "./words.js";

const SUMMARY_EVERY_S = 20;
const CALM_FRAME_S = 0.5; // who wants no movement gets a picture twice a second
const HIDDEN_S = 15; // a tab that nobody sees costs the server nothing after that

const PHASES = {
  connecting: ["connecting", ""],
  open: ["live", "good"],
  broken: ["reconnecting", "bad"],
  locked: ["needs a key", "warn"],
  off: ["switched off", "warn"],
  paused: ["paused", "warn"],
};

const find = (selector) => document.querySelector(selector);
const panels = new Map();
let state = initial;
let summarised = -Infinity;
let hidden = null;
let sampling = null;

const stream = new Stream(take);

function take(event) {
  const before = state;
  state = reduce(state, event);
  if (event.name === "wheel") panels.get(event.data.engine)?.pictures.take(event.data);
  if (state.connection.phase !== before.connection.phase || state.connection.again_at !== before.connection.again_at) showConnection();
  if (event.name === "engines") showEngines();
  const live = state.connection.phase === "open";
  for (const engine of state.engines) {
    if (event.name !== "wheel" || event.data.engine === engine.name) panels.get(engine.name).update(engine, state.hues, live);
  }
  const told = state.engines.every(({ state: is, wheel }) => is !== "ready" || wheel !== null);
  if (event.name === "wheel" && told && event.at - summarised > SUMMARY_EVERY_S) {
    summarised = event.at;
    const shown = state.engines.filter(({ wheel }) => wheel !== null);
    write(find("#summary"), shown.map(({ name, wheel }) => summary(name, wheel)).join(" "));
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
    panels.set(name, new Panel(name));
    find("#engines").append(panels.get(name).root);
  }
}

function showConnection() {
  const { phase, message } = state.connection;
  const [text, tone] = PHASES[phase];
  write(find("#connection"), text);
  find("#connection").className = `chip status ${tone}`;
  if (phase === "locked") askForKey(savedKey() ? message : "");
  else if (phase !== "connecting") hide(find("#locked"), find("#main")); // a key that is being tried may be wrong
  find("#sample").disabled = phase === "locked";
  if (phase === "open") {
    hide(find("#trouble"), find("#main"));
    write(find("#curl"), command());
  }
  if (phase === "broken" || phase === "off") {
    find("#trouble").className = phase === "off" ? "note warn" : "note bad";
    find("#trouble").hidden = false;
    write(find("#summary"), phase === "off" ? message : `The stream broke: ${message}`);
  }
  if (phase === "off") write(find("#trouble-text"), message);
}

function askForKey(why) {
  find("#locked").hidden = false;
  write(find("#key-error"), why);
  find("#key").focus();
}

function showTrouble(at) {
  const { phase, message, again_at } = state.connection;
  if (phase !== "broken") return;
  write(find("#trouble-text"), `No news of the wheel: ${message} Trying again in ${Math.max(0, Math.ceil(again_at - at))} s.`);
}

let drawn = 0;
function frame(milliseconds) {
  const at = milliseconds / 1000;
  const paused = state.connection.phase === "paused";
  if (!paused && (!calm() || at - drawn >= CALM_FRAME_S)) draw(at);
  requestAnimationFrame(frame);
}

function draw(at) {
  drawn = at;
  for (const panel of panels.values()) panel.frame(at);
  showTrouble(at);
}

find("#retry").addEventListener("click", () => stream.open());

find("#locked").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(find("#key").value);
  stream.open();
});

function pause() {
  stream.close();
  take({ name: "connection", connection: { phase: "paused" } });
  draw(performance.now() / 1000); // what was said last
}

find("#pause").addEventListener("click", ({ currentTarget: button }) => {
  const paused = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(paused));
  if (paused) pause();
  else stream.open();
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (find("#pause").getAttribute("aria-pressed") === "true") return;
  if (document.hidden) hidden = setTimeout(pause, HIDDEN_S * 1000);
  else if (state.connection.phase === "paused") stream.open();
});

find("#sample").addEventListener("click", async ({ currentTarget: button }) => {
  if (sampling) return sampling.abort();
  sampling = new AbortController();
  write(button, "Stop sample traffic");
  const say = ({ sent, drawn: done, failed }, total) =>
    write(find("#sampling"), `${sent} of ${total} requests sent, ${done} drawn${failed ? `, ${failed} not` : ""}.`);
  try {
    await sendSamples(say, sampling.signal);
  } catch (error) {
    if (error.name !== "AbortError") write(find("#sampling"), `Not sent: ${error.message}`);
  } finally {
    sampling = null;
    write(button, "Send sample traffic");
  }
});

const EXAMPLE = { prompt: "a red circle above a blue square", inference_steps: 40 };
const command = () => SNIPPETS.curl(EXAMPLE, location.origin, savedKey() !== "");
write(find("#curl"), command());
find("#copy").addEventListener("click", async () => {
  try {
    await copy(command());
    write(find("#copied"), "Copied.");
  } catch {
    write(find("#copied"), "The browser does not let pages copy here; select the text.");
  }
});

requestAnimationFrame(frame);
stream.open();
