// The page /: waits for a server that is ready, then generates images with the settings of the form, several requests at once.

import { savedKey } from "./api.js";
import { byId } from "./dom.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { GenerationCard } from "./generation_card.js";
import { listenForImageFiles } from "./image_metadata.js";
import { isUnreachable, ServedModels } from "./served_models.js";
import { SNIPPETS } from "./snippets.js";

const gallery = new Gallery();
const form = new Form(byId("request-form"), generate);
let number = 0;
const servedModels = new ServedModels("diffusion", {
  field: byId("prompt"),
  setReady: (ready) => (form.ready = ready),
  show: showModels,
});

/** Announce `text` to screen readers. */
function announce(text) {
  byId("announcements").textContent = text;
}

function showModels(models) {
  form.setModels(models);
  const { id, noria } = models[0];
  byId("first-command").textContent = firstCommand();
  const { width, height, inference_steps: steps, guidance_scale: guidance } = noria.settings;
  byId("facts").textContent =
    `Serving ${models.map((model) => model.id).join(", ")}. ${id} is a ${noria.pipeline}, version ${noria.version}. Its defaults are ` +
    `${width.default} × ${height.default} pixels, ${steps.default} steps, guidance ${guidance.default} and the scheduler ${noria.default_scheduler}.`;
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
  if (error.status === 401) servedModels.askForKey(error.message);
  else if (isFormError) form.showError(error);
  if (isUnreachable(error)) servedModels.wait();
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

window.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("large").open) gallery.running[0]?.cancel();
});
listenForImageFiles(
  (settings) => form.setSettings(settings),
  (error) => error.status === 401 && servedModels.askForKey(error.message),
);
byId("first-command").textContent = firstCommand();
servedModels.wait();
