// The page /: waits for a server that is ready, then generates images with the settings of the form, several requests at once.

import { fetchWithKey, savedKey, saveKey, toApiError } from "./api.js";
import { byId, hide, setText } from "./dom.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { GenerationCard } from "./generation_card.js";
import { listenForImageFiles } from "./image_metadata.js";
import { SNIPPETS } from "./snippets.js";

const POLL_MS = 1500;
const UNREACHABLE_CODES = new Set(["unreachable", "lost", "engine_unavailable", "engine_lost"]); // after these, wait for the server

const gallery = new Gallery();
const form = new Form(byId("request-form"), generate);
let number = 0;
let waiting = false; // for the server

/** Announce `text` to screen readers. */
function announce(text) {
  byId("announcements").textContent = text;
}

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

/** Show the state of the server in the header. */
function setStatus(text, tone) {
  byId("server-status").textContent = text;
  byId("server-status").className = `status chip ${tone}`;
}

/** Wait for the server, with the form disabled. */
async function waitForServer() {
  if (waiting) return;
  waiting = true;
  form.ready = false;
  try {
    while (!(await loadModels())) await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  } finally {
    waiting = false;
  }
}

/** Try to load the models; returns true if there is nothing more to wait for: they are shown, or a key is needed first. */
async function loadModels() {
  try {
    const state = await (await fetch("/readyz")).json();
    if (!state.ready) {
      const engines = state.engines.map((engine, index) => `engine ${index} is ${engine.state}`).join(", ");
      notice(`No engine is ready yet: ${engines || "none is known"}. This page continues by itself.`);
      setStatus("loading", "warn");
      return false;
    }
    const response = await fetchWithKey("/v1/models");
    if (response.status === 401) {
      askForKey((await toApiError(response)).message);
      return true;
    }
    if (!response.ok) return false;
    const models = (await response.json()).data.filter(({ noria }) => noria.kind === "diffusion");
    if (models.length) showModels(models);
    else setStatus("serves no image model", "warn");
    return true;
  } catch {
    setStatus("not reached", "bad");
    notice("The server cannot be reached. This page continues by itself when it is back.");
    return false;
  }
}

function showModels(models) {
  notice("");
  hide(byId("key"), byId("prompt"));
  form.setModels(models);
  form.ready = true;
  const { id, noria } = models[0];
  setStatus(models.length > 1 ? `${id} and ${models.length - 1} more` : id, "good");
  byId("first-command").textContent = firstCommand();
  const { width, height, inference_steps: steps, guidance_scale: guidance } = noria.settings;
  byId("facts").textContent =
    `Serving ${models.map((model) => model.id).join(", ")}. ${id} is a ${noria.pipeline}, version ${noria.version}. Its defaults are ` +
    `${width.default} × ${height.default} pixels, ${steps.default} steps, guidance ${guidance.default} and the scheduler ${noria.default_scheduler}.`;
}

function askForKey(why) {
  notice(savedKey() ? why : "");
  form.ready = false;
  setStatus("needs a key", "warn");
  byId("key").hidden = false;
  byId("key-value").focus();
}

function useKey() {
  saveKey(byId("key-value").value);
  byId("key-value").value = "";
  waitForServer();
}

const firstCommand = () => SNIPPETS.curl({ prompt: byId("prompt").defaultValue }, location.origin, savedKey() !== "");

async function generate(settings) {
  const bounds = form.model.noria.settings;
  const size = { width: settings.width || bounds.width.default, height: settings.height || bounds.height.default };
  const { partial_images: previews, inference_steps: steps } = bounds;
  const options = { size, previews: previews.max, steps: steps.default, showsModel: form.hasSeveralModels };
  const card = new GenerationCard(++number, settings, options, callbacks);
  gallery.add(card);
  card.element.scrollIntoView({ block: "nearest" }); // on narrow screens it is below the form
  announce(`Generation ${card.number} is sent.`);
  try {
    await card.run();
  } catch (error) {
    showFailure(card, error);
  }
}

/** Show an error of a field, or of the key, in the form if no engine has accepted the request; else on the card. */
function showFailure(card, error) {
  const isFormError = card.state === "waiting" && (error.status === 401 || error.param);
  if (isFormError) card.remove();
  else card.fail(error);
  if (error.status === 401) askForKey(error.message);
  else if (isFormError) form.showError(error);
  if (UNREACHABLE_CODES.has(error.code)) waitForServer();
}

const callbacks = {
  announce,
  open: (image) => gallery.open(image),
  onRemoved: (card) => gallery.onRemoved(card),
  useSeed(seed) {
    form.useSeed(seed);
    announce(`The next generation uses the seed ${seed}.`);
  },
  onReuseSettings(settings) {
    form.setSettings(settings);
    announce("The settings are in the form.");
    byId("prompt").focus();
  },
  retry(card) {
    card.remove();
    generate(card.settings);
  },
};

byId("key-use").addEventListener("click", useKey);
byId("key-value").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  useKey();
});
window.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("large").open) gallery.running[0]?.cancel();
});
listenForImageFiles(
  (settings) => form.setSettings(settings),
  (error) => error.status === 401 && askForKey(error.message),
);
byId("first-command").textContent = firstCommand();
waitForServer();
