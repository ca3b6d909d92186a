// The page /: waits for a server that is ready, then generates images with the settings of the form, several requests at once.

import { savedKey, serverUrl } from "../shared/api.js";
import { byId } from "../shared/dom.js";
import { isUnreachable, ServedModels } from "../shared/served_models.js";
import { filesNeededBy, SNIPPETS } from "../shared/snippets.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { GenerationCard } from "./generation_card.js";
import { listenForChoice, listenForFiles } from "./image_file.js";
import { readImageMetadata } from "./image_metadata.js";

const gallery = new Gallery(useImage);
const form = new Form(byId("request-form"), {
  onSubmit: generate,
  onTakeSettings: (file) => readSettings(file, byId("image-report")),
  refreshModels,
  announce,
});
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
  byId("first-command").textContent = firstCommand(noria);
  const { width, height, inference_steps: steps, guidance_scale: guidance } = noria.settings;
  byId("facts").textContent =
    `Serving ${models.map((model) => model.id).join(", ")}. ${id} is a ${noria.pipeline}, version ${noria.version}. Its defaults are ` +
    `${width.default} × ${height.default} pixels, ${steps.default} steps, guidance ${guidance.default} and the scheduler ${noria.default_scheduler}.`;
}

function firstCommand(noria = null) {
  return SNIPPETS.curl({ prompt: byId("prompt").defaultValue, ...filesNeededBy(noria) }, serverUrl, savedKey() !== "");
}

async function generate(settings) {
  const { settings: bounds, max_references: maxReferences } = form.model.noria;
  const { width, height } = form.imageSize ?? { width: bounds.width.default, height: bounds.height.default };
  const size = { width: settings.width || width, height: settings.height || height };
  const { partial_images: previews, inference_steps: steps } = bounds;
  const options = {
    size,
    previews: previews.max,
    steps: steps.default,
    showsModel: form.hasSeveralModels,
    takesReferences: maxReferences > 0,
  };
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
  useImage,
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

function readSettings(file, report) {
  const onError = (error) => error.status === 401 && servedModels.askForKey(error.message);
  return readImageMetadata(file, report, (settings) => form.setSettings(settings), onError);
}

async function useImage({ file }) {
  if (await form.startImage.choose(file)) byId("image").focus();
}

async function refreshModels() {
  const models = form.ready && (await servedModels.fetch());
  if (models) form.updateLoras(models);
}
window.addEventListener("focus", refreshModels); // who adds a LoRA does so in another window

const readDropped = ([file]) => readSettings(file, byId("metadata-report"));
listenForFiles([
  [byId("reference_images"), (files) => form.references.add(files)],
  [byId("image"), ([file]) => form.startImage.choose(file)],
  [byId("drop"), readDropped],
  [byId("controls"), ([file], target) => form.chooseControl(file, target)],
]);
listenForChoice(byId("metadata-choose"), byId("metadata-file"), readDropped);
byId("first-command").textContent = firstCommand();
servedModels.wait();
