// The playground: waits for a server that can draw, then turns the form's wishes into drawings, as many at once as one likes.

import { Drawing } from "./drawing.js";
import { hide } from "./elements.js";
import { call, refusal, savedKey, saveKey } from "./events.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { listenForFiles } from "./recall.js";
import { SNIPPETS } from "./snippets.js";

const POLL_MS = 1500;
const GONE = new Set(["unreachable", "lost", "engine_unavailable", "engine_lost"]); // nobody may be there to draw

const byId = (id) => document.getElementById(id);
const gallery = new Gallery();
const form = new Form(byId("wish"), draw);
let number = 0;
let waiting = false; // for an engine

/** Tell whoever listens, without taking the keyboard's place. */
function say(text) {
  byId("news").textContent = text;
}

function notice(text) {
  byId("notice").hidden = !text;
  if (byId("notice").textContent !== text) byId("notice").textContent = text;
}

/** The state of the server, in the header. */
function chip(text, tone) {
  byId("served").textContent = text;
  byId("served").className = `status chip ${tone}`;
}

/** Learn what may be asked for; asks again until somebody is there who draws. */
async function prepare() {
  if (waiting) return;
  waiting = true;
  form.ready = false;
  try {
    while (!(await offered())) await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  } finally {
    waiting = false;
  }
}

/** Whether there is nothing to wait for: the models are known, or a key is needed first. */
async function offered() {
  try {
    const state = await (await fetch("/readyz")).json();
    if (!state.ready) {
      const engines = state.engines.map((engine, index) => `engine ${index} is ${engine.state}`).join(", ");
      notice(`No engine is ready yet: ${engines || "none is known"}. This page goes on by itself.`);
      chip("loading", "warn");
      return false;
    }
    const response = await call("/v1/models");
    if (response.status === 401) {
      askForKey((await refusal(response)).message);
      return true;
    }
    if (!response.ok) return false;
    serve((await response.json()).data);
    return true;
  } catch {
    chip("not reached", "bad");
    notice("The server cannot be reached. This page goes on by itself when it is back.");
    return false;
  }
}

function serve(models) {
  notice("");
  hide(byId("key"), byId("prompt"));
  form.offer(models);
  form.ready = true;
  const { id, noria } = models[0];
  chip(models.length > 1 ? `${id} and ${models.length - 1} more` : id, "good");
  byId("first-command").textContent = firstCommand();
  const { width, height, inference_steps: steps, guidance_scale: guidance } = noria.settings;
  byId("facts").textContent =
    `Serving ${models.map((model) => model.id).join(", ")}. ${id} is a ${noria.pipeline}, version ${noria.version}: ${width.default} × ${height.default} pixels, ` +
    `${steps.default} steps, guidance ${guidance.default} and the scheduler ${noria.default_scheduler} unless you say otherwise.`;
}

function askForKey(why) {
  notice(savedKey() ? why : "");
  form.ready = false;
  chip("needs a key", "warn");
  byId("key").hidden = false;
  byId("key-value").focus();
}

function useKey() {
  saveKey(byId("key-value").value);
  byId("key-value").value = "";
  prepare();
}

const firstCommand = () => SNIPPETS.curl({ prompt: byId("prompt").defaultValue }, location.origin, savedKey() !== "");

async function draw(wish) {
  const { settings } = form.model.noria;
  const size = { width: wish.width || settings.width.default, height: wish.height || settings.height.default };
  const expected = { size, previews: settings.partial_images.max, steps: settings.inference_steps.default, tellsModel: form.hasChoice };
  const drawing = new Drawing(++number, wish, expected, hear);
  gallery.add(drawing);
  drawing.element.scrollIntoView({ block: "nearest" }); // below the form, where there is no room beside it
  say(`Drawing ${drawing.number} is asked for.`);
  try {
    await drawing.run();
  } catch (error) {
    failed(drawing, error);
  }
}

/** The form's fault, which no engine has accepted, is shown in the form, the rest where the images would have been. */
function failed(drawing, error) {
  const atForm = drawing.state === "waiting" && (error.status === 401 || error.param);
  if (atForm) drawing.remove();
  else drawing.fail(error);
  if (error.status === 401) askForKey(error.message);
  else if (atForm) form.showError(error);
  if (GONE.has(error.code)) prepare();
}

const hear = {
  said: say,
  open: (image) => gallery.open(image),
  removed: (drawing) => gallery.removed(drawing),
  useSeed(seed) {
    form.useSeed(seed);
    say(`The next drawing has the seed ${seed}.`);
  },
  recall(wish) {
    form.fill(wish);
    say("The settings are in the form.");
    byId("prompt").focus();
  },
  retry(drawing) {
    drawing.remove();
    draw(drawing.wish);
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
listenForFiles(
  (settings) => form.fill(settings),
  (error) => error.status === 401 && askForKey(error.message),
);
byId("first-command").textContent = firstCommand();
prepare();
