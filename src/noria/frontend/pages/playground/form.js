// The form of settings: built from the bounds of the served models; shows the server's errors at their fields.

import { byId, make } from "../shared/dom.js";
import { describeCalls, nonEmptyEntries, sizePresets } from "../shared/request_settings.js";
import { ControlFields } from "./control_fields.js";
import { LoraFields } from "./lora_fields.js";
import { ReferenceImages } from "./reference_images.js";
import { StartImage } from "./start_image.js";

const NUMBERS = ["width", "height", "inference_steps", "calls", "guidance_scale", "n", "deadline_ms", "strength"];
const TEXTS = ["prompt", "negative_prompt", "prompt_syntax", "model", "scheduler", "seed", "format", "priority"];
const SIZES = ["width", "height"];
const SLIDERS = ["inference_steps", "guidance_scale", "strength"];
const SLIDER_MAX_FACTOR = 4; // times the default
const STEPS = { inference_steps: 1, calls: 0.05, guidance_scale: 0.5, strength: 0.05 };

export class Form {
  #root;
  #models = [];
  #loras;
  #controls;

  /**
   * `callbacks`: onSubmit(settings) for each press of Generate; onTakeSettings(file) for the settings in the start image's file;
   * refreshModels(), which resolves when the models are known anew; announce(text).
   */
  constructor(root, { onSubmit, onTakeSettings, refreshModels, announce }) {
    this.#root = root;
    this.#loras = new LoraFields(() => this.#clearError("loras"), refreshModels);
    const onError = (param, message) => this.showError({ param, message });
    const limits = () => this.model?.noria.start_image;
    this.#controls = new ControlFields({
      onChange: () => this.#onSourceChange("controls"),
      onInput: () => this.#clearError("controls"),
      otherNames: () => Object.values(this.startImage.value).map((file) => file?.name),
      ...{ onError, limits, announce },
    });
    this.startImage = new StartImage({
      onChange: (isNew) => this.#onImageChange(isNew),
      ...{ onError, limits, onTakeSettings, announce },
    });
    this.references = new ReferenceImages({
      onInput: () => this.#clearError("reference_images"),
      onChange: () => this.#onSourceChange(),
      ...{ onError, limits, announce },
    });
    root.addEventListener("submit", (event) => {
      event.preventDefault();
      this.clearErrors();
      const missing = this.#missingFile();
      if (missing) this.showError(missing);
      else if (this.ready) onSubmit(this.settings());
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) root.requestSubmit();
    });
    root.addEventListener("input", ({ target }) => this.#onInput(target));
    byId("model").addEventListener("change", () => this.#selectModel(byId("model").value));
    byId("seed-random").addEventListener("click", () => this.useSeed(""));
  }

  /** Whether the models are known and an engine is ready. */
  get ready() {
    return !byId("generate").disabled;
  }

  set ready(ready) {
    if (!ready && document.activeElement === byId("generate")) byId("prompt").focus(); // a disabled button loses the focus
    byId("generate").disabled = !ready;
  }

  /** The selected model, an entry of GET /v1/models; undefined before `setModels`. */
  get model() {
    return this.#models.find(({ id }) => id === byId("model").value);
  }

  get hasSeveralModels() {
    return this.#models.length > 1;
  }

  /** Use `file` as the image of a ControlNet; `target` is the element on which it was dropped. */
  chooseControl(file, target) {
    return this.#controls.choose(file, target);
  }

  /** The size of the image that the result's is by default; null without one. */
  get imageSize() {
    return this.startImage.size ?? this.#controls.size ?? this.references.size;
  }

  /** Offer `models`, the entries of GET /v1/models; keeps the settings if the selected model is among them. */
  setModels(models) {
    const [before, version] = [this.model?.id, this.model?.noria.version];
    this.#models = models;
    byId("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
    byId("model-field").hidden = models.length < 2;
    if (models.some(({ id, noria }) => id === before && noria.version === version)) byId("model").value = before;
    else this.#selectModel(models[0].id);
  }

  /** Offer the LoRAs that `models` have now; all else stays as it is. */
  updateLoras(models) {
    this.#models = this.#models.map(
      (model) => models.find(({ id, noria }) => id === model.id && noria.version === model.noria.version) ?? model,
    );
    this.#loras.offer(this.model.noria);
  }

  /** The settings in the form by the names of POST /t2i; null where a field is empty. */
  settings() {
    const settings = {};
    for (const name of TEXTS) settings[name] = byId(name).value.trim() || null;
    for (const name of NUMBERS) settings[name] = byId(name).value === "" ? null : Number(byId(name).value);
    settings.prompt = byId("prompt").value;
    settings.negative_prompt = byId("negative_prompt").value || null;
    settings.clip_skip = byId("clip_skip").value === "" ? null : Number(byId("clip_skip").value);
    settings.loras = this.#loras.value;
    settings.reference_images = this.references.value;
    settings.refiner = byId("refiner").value === "" ? null : { start: Number(byId("refiner").value) };
    settings.controls = this.#controls.value;
    Object.assign(settings, this.startImage.value);
    if (!settings.image) settings.strength = null;
    return settings;
  }

  /** Write `settings`, fields of POST /t2i; missing ones become the model's defaults, but the images stay if they name none. */
  setSettings(settings) {
    this.clearErrors();
    if (settings.image !== undefined) this.startImage.set(settings).then(() => this.#sync());
    this.#selectModel(this.#models.some(({ id }) => id === settings.model) ? settings.model : byId("model").value);
    if (settings.reference_images !== undefined)
      this.references.set(settings.reference_images).then(() => this.#sync());
    for (const name of ["negative_prompt", "prompt_syntax", "seed", "calls", "deadline_ms", "priority"])
      byId(name).value = "";
    for (const name of [...TEXTS, ...NUMBERS]) {
      if (name !== "model" && settings[name] !== undefined && settings[name] !== null)
        byId(name).value = settings[name];
    }
    this.#loras.value = settings.loras;
    if (this.model.noria.settings.clip_skip) byId("clip_skip").value = settings.clip_skip ?? "";
    if (this.model.noria.refiner) byId("refiner").value = settings.refiner?.start ?? "";
    if (settings.controls !== undefined) this.#controls.set(settings.controls).then(() => this.#sync());
    byId("scheduling").open ||= Boolean(byId("priority").value || byId("deadline_ms").value);
    this.#sync();
  }

  /** Which file the selected model needs besides those that are chosen, as an error of its field; null: none. */
  #missingFile() {
    if (!this.model?.noria.start_image?.needs_mask) return null;
    const { image, mask } = this.startImage.value;
    if (!image) return { param: "image", message: `${this.model.id} repaints a part of an image: choose one.` };
    return mask
      ? null
      : { param: "mask", message: `Paint what ${this.model.id} is to repaint, or choose a file of it.` };
  }

  /** Use this seed from now on; "" is a random one each time. */
  useSeed(seed) {
    byId("seed").value = seed;
    this.#clearError("seed");
  }

  /** Show the server's message at the field that it names, and focus the field. */
  showError({ param, message }) {
    const field = param && this.#root.elements.namedItem(param);
    const errorElement = byId(field && byId(`${param}-error`) ? `${param}-error` : "form-error");
    errorElement.textContent = message;
    errorElement.hidden = false;
    if (!field) return;
    field.setAttribute("aria-invalid", "true");
    const details = field.closest("details");
    if (details) details.open = true;
    field.focus();
  }

  clearErrors() {
    for (const name of [
      ...TEXTS,
      ...NUMBERS,
      "clip_skip",
      "loras",
      "refiner",
      "controls",
      "image",
      "mask",
      "reference_images",
      "form",
    ])
      this.#clearError(name);
  }

  #clearError(name) {
    byId(name)?.removeAttribute("aria-invalid"); // "form" is only the name of an error
    const errorElement = byId(`${name}-error`);
    errorElement.hidden = true;
    errorElement.textContent = "";
  }

  #onInput(target) {
    if (target.id.endsWith("-slide")) byId(target.id.replace("-slide", "")).value = target.value;
    const name = target.id.replace("-slide", "");
    if (byId(`${name}-error`)) this.#clearError(name);
    this.#sync();
  }

  /** The default of a number of the selected model; "" without one. */
  #defaultOf(name) {
    const { settings, start_image: startImage } = this.model.noria;
    if (name === "strength") return startImage?.default_strength ?? "";
    if (name === "calls") return ""; // else a scheduler that makes all calls would be refused a model's default
    if (SIZES.includes(name) && this.imageSize) return ""; // that of the image, which the server fits into the bounds
    return settings[name].default ?? "";
  }

  #selectModel(id) {
    byId("model").value = id;
    const { settings, schedulers, default_scheduler: defaultScheduler } = this.model.noria;
    for (const name of NUMBERS) {
      const { min, max, multiple } = settings[name];
      const field = byId(name);
      Object.assign(field, { min, max, value: this.#defaultOf(name) });
      field.step = STEPS[name] < 1 ? "any" : multiple;
      const hint = byId(`${name}-hint`);
      if (hint) hint.textContent = `${min} to ${max}; default ${this.#defaultOf(name)}`;
    }
    for (const name of SLIDERS) {
      const { min, max } = settings[name];
      const step = STEPS[name];
      // What the slider leaves out the number field beside it allows.
      Object.assign(byId(`${name}-slide`), {
        min: Math.ceil(min / step) * step,
        max: Math.min(max, this.#defaultOf(name) * SLIDER_MAX_FACTOR || max),
        step,
      });
    }
    this.#loras.value = [];
    this.#loras.offer(this.model.noria);
    this.references.offer(this.model.noria);
    const needsMask = this.model.noria.start_image?.needs_mask ?? false;
    byId("image-needed").hidden = byId("mask-needed").hidden = !needsMask;
    byId("mask-none").hidden = needsMask;
    for (const name of ["image", "mask"]) this.#clearError(name);
    // Models with CLIP text encoders.
    for (const name of ["prompt_syntax", "clip_skip"]) {
      byId(`${name}-field`).hidden = !settings.clip_skip;
      byId(name).value = "";
    }
    if (settings.clip_skip) {
      const { max, default: byDefault } = settings.clip_skip;
      byId("clip_skip").max = max;
      byId("clip_skip-hint").textContent =
        `Which layer of the text encoder is read, from the end: 1 to ${max}; default ${byDefault}`;
    }
    byId("refiner-field").hidden = !this.model.noria.refiner;
    byId("refiner").value = "";
    this.#controls.offer(this.model.noria);
    byId("guidance_scale-hint").textContent += "; 1 or less (Z-Image, Krea 2: 0) switches it off and halves the work";
    byId("strength-hint").textContent += ". 0.2 changes details, 1 keeps hardly anything";
    byId("scheduler").replaceChildren(
      ...schedulers.map(
        ({ name, description }) =>
          new Option(`${name} — ${description}`, name, name === defaultScheduler, name === defaultScheduler),
      ),
    );
    byId("presets").replaceChildren(...sizePresets(settings).map((size) => this.#preset(size)));
    this.#sync();
  }

  /** `isNew`: there is another image, or none any more. */
  #onImageChange(isNew) {
    if (isNew) return this.#onSourceChange("image", "mask", "strength");
    for (const name of ["image", "mask", "strength"]) this.#clearError(name);
    this.#sync();
  }

  /** The image that gives the size may be another one, or none; `names` are the fields of the change. */
  #onSourceChange(...names) {
    for (const name of [...names, ...SIZES]) this.#clearError(name);
    for (const name of SIZES) if (this.imageSize || !byId(name).value) byId(name).value = this.#defaultOf(name);
    this.#sync();
  }

  #preset({ name, width, height }) {
    const shape = make("span", { class: "shape" });
    shape.style.aspectRatio = `${width} / ${height}`;
    const click = () => {
      byId("width").value = width;
      byId("height").value = height;
      this.#clearError("width");
      this.#clearError("height");
      this.#sync();
    };
    const label = make("span", { text: `${width} × ${height}` });
    return make(
      "button",
      { type: "button", title: name, data: { size: `${width}x${height}` }, on: { click } },
      shape,
      label,
    );
  }

  #sync() {
    if (!this.model) return;
    const { min, max, multiple } = this.model.noria.settings.width;
    const owner = this.startImage.size
      ? "the start image's"
      : this.#controls.size
        ? "those of the first control image"
        : "about the first reference image's";
    const ofImage = this.imageSize
      ? `. Empty: ${owner}. In another shape ${this.startImage.size || this.#controls.size ? "it is stretched, not cropped" : "it stays as it is"}`
      : "";
    byId("size-hint").textContent = `${min} to ${max} pixels a side, in multiples of ${multiple}${ofImage}`;
    for (const name of SIZES) byId(name).placeholder = this.imageSize ? "image's" : "";
    for (const name of SLIDERS) byId(`${name}-slide`).value = byId(name).value;
    const calls = this.model.noria.settings.calls.default;
    byId("calls").placeholder = `the model's default: ${calls}`;
    byId("calls-hint").textContent = describeCalls({ calls, ...Object.fromEntries(nonEmptyEntries(this.settings())) });
    const size = `${byId("width").value}x${byId("height").value}`;
    for (const button of byId("presets").children)
      button.setAttribute("aria-pressed", String(button.dataset.size === size));
  }
}
