// The form of settings: made of what the served models offer, read as a wish, filled from one; a refusal is shown at its field.

import { make } from "./elements.js";
import { sizesWithin } from "./sizes.js";

const NUMBERS = ["width", "height", "inference_steps", "guidance_scale", "n", "deadline_ms"];
const TEXTS = ["prompt", "negative_prompt", "model", "scheduler", "seed", "format", "priority"];
const SLIDERS = ["inference_steps", "guidance_scale"];
const SLIDER_REACH = 4; // times the default: beyond that nobody draws, but the number beside it can
const STEPS = { inference_steps: 1, guidance_scale: 0.5 };

const byId = (id) => document.getElementById(id);

export class Form {
  #root;
  #models = [];

  /** `onSubmit(wish)` is called for each press of Draw. */
  constructor(root, onSubmit) {
    this.#root = root;
    root.addEventListener("submit", (event) => {
      event.preventDefault();
      this.clearErrors();
      if (this.ready) onSubmit(this.wish());
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) root.requestSubmit();
    });
    root.addEventListener("input", ({ target }) => this.#changed(target));
    byId("model").addEventListener("change", () => this.#choose(byId("model").value));
    byId("seed-random").addEventListener("click", () => this.useSeed(""));
  }

  /** Whether it is known what may be asked for, and somebody is there to draw it. */
  get ready() {
    return !byId("draw").disabled;
  }

  set ready(ready) {
    if (!ready && document.activeElement === byId("draw")) byId("prompt").focus(); // a disabled button loses the keyboard's place
    byId("draw").disabled = !ready;
  }

  /** The chosen model, as GET /v1/models has it; undefined before `offer`. */
  get model() {
    return this.#models.find(({ id }) => id === byId("model").value);
  }

  /** Whether there are several models. */
  get hasChoice() {
    return this.#models.length > 1;
  }

  /** Take over `models`, the entries of GET /v1/models; what was written stays, if the model is still there. */
  offer(models) {
    const [before, version] = [this.model?.id, this.model?.noria.version];
    this.#models = models;
    byId("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
    byId("model-field").hidden = models.length < 2;
    if (models.some(({ id, noria }) => id === before && noria.version === version)) byId("model").value = before;
    else this.#choose(models[0].id);
  }

  /** What is written, by the names of POST /t2i; null where a field is empty. */
  wish() {
    const wish = {};
    for (const name of TEXTS) wish[name] = byId(name).value.trim() || null;
    for (const name of NUMBERS) wish[name] = byId(name).value === "" ? null : Number(byId(name).value);
    wish.prompt = byId("prompt").value;
    wish.negative_prompt = byId("negative_prompt").value || null;
    return wish;
  }

  /** Write `settings`, fields of POST /t2i; those that it has not become the model's own. */
  fill(settings) {
    this.clearErrors();
    this.#choose(this.#models.some(({ id }) => id === settings.model) ? settings.model : byId("model").value);
    for (const name of ["negative_prompt", "seed", "deadline_ms", "priority"]) byId(name).value = "";
    for (const name of [...TEXTS, ...NUMBERS]) {
      if (name !== "model" && settings[name] !== undefined && settings[name] !== null) byId(name).value = settings[name];
    }
    byId("urgency").open ||= Boolean(byId("priority").value || byId("deadline_ms").value);
    this.#sync();
  }

  /** Draw with this seed from now on; "" is a new one each time. */
  useSeed(seed) {
    byId("seed").value = seed;
    this.#clearError("seed");
  }

  /** Show a refusal in the server's words, at the field that it names, and go there. */
  showError({ param, message }) {
    const field = param && this.#root.elements.namedItem(param);
    const place = byId(field && byId(`${param}-error`) ? `${param}-error` : "wish-error");
    place.textContent = message;
    place.hidden = false;
    if (!field) return;
    field.setAttribute("aria-invalid", "true");
    const folded = field.closest("details");
    if (folded) folded.open = true;
    field.focus();
  }

  clearErrors() {
    for (const name of [...TEXTS, ...NUMBERS, "wish"]) this.#clearError(name);
  }

  #clearError(name) {
    byId(name).removeAttribute("aria-invalid");
    const place = byId(`${name}-error`);
    place.hidden = true;
    place.textContent = "";
  }

  #changed(target) {
    if (target.id.endsWith("-slide")) byId(target.id.replace("-slide", "")).value = target.value;
    const name = target.id.replace("-slide", "");
    if (byId(`${name}-error`)) this.#clearError(name);
    this.#sync();
  }

  #choose(id) {
    byId("model").value = id;
    const { settings, schedulers, default_scheduler: usual } = this.model.noria;
    for (const name of NUMBERS) {
      const { min, max, multiple, default: own } = settings[name];
      const field = byId(name);
      Object.assign(field, { min, max, value: own ?? "" });
      field.step = STEPS[name] === 0.5 ? "any" : multiple;
      const hint = byId(`${name}-hint`);
      if (hint) hint.textContent = `${min} to ${max}; the model's own is ${own}`;
    }
    for (const name of SLIDERS) {
      const { min, max, default: own } = settings[name];
      Object.assign(byId(`${name}-slide`), { min, max: Math.min(max, own * SLIDER_REACH || max), step: STEPS[name] });
    }
    byId("guidance_scale-hint").textContent += "; 1 or less is none, and half the work";
    const { width } = settings;
    byId("size-hint").textContent = `${width.min} to ${width.max} pixels a side, in multiples of ${width.multiple}`;
    byId("scheduler").replaceChildren(
      ...schedulers.map(({ name, description }) => new Option(`${name} — ${description}`, name, name === usual, name === usual)),
    );
    byId("presets").replaceChildren(...sizesWithin(settings).map((size) => this.#preset(size)));
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
    const words = make("span", { text: `${width} × ${height}` });
    return make("button", { type: "button", title: name, data: { size: `${width}x${height}` }, on: { click } }, shape, words);
  }

  #sync() {
    for (const name of SLIDERS) byId(`${name}-slide`).value = byId(name).value;
    const size = `${byId("width").value}x${byId("height").value}`;
    for (const button of byId("presets").children) button.setAttribute("aria-pressed", String(button.dataset.size === size));
  }
}
