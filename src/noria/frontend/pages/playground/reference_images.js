// The reference images of a request in the form, for models that take some: dropped, pasted or chosen. Kept in this tab only.

import { button, byId, make } from "../shared/dom.js";
import { formatSize, pluralize } from "../shared/format.js";
import { listenForChoice, openImageFile } from "./image_file.js";

export class ReferenceImages {
  #images = []; // as `openImageFile` returns them
  #max = 0;
  #callbacks;

  /** `callbacks`: onInput() before a change, onChange() after it; onError(param, message); announce(text); limits(): those of the selected model. */
  constructor(callbacks) {
    this.#callbacks = callbacks;
    listenForChoice(byId("references-choose"), byId("references-file"), (files) => this.add(files));
  }

  /** Offer what the selected model takes, `noria` in GET /v1/models. What is chosen stays, for another model that takes some. */
  offer({ max_references: max }) {
    this.#max = max;
    byId("reference_images").hidden = max === 0;
    byId("image-anywhere").hidden = max > 0;
    this.#show();
  }

  get isOffered() {
    return this.#max > 0;
  }

  /** The files, as in POST /t2i; null without any. */
  get value() {
    const files = this.#images.map(({ file }) => file);
    return this.isOffered && files.length ? files : null;
  }

  /** The size of the first one; null without any. */
  get size() {
    return this.value && { width: this.#images[0].width, height: this.#images[0].height };
  }

  /** Add `files` to those there are. */
  async add(files) {
    this.#callbacks.onInput();
    for (const file of files) if (!(await this.#add(file))) break;
    this.#changed(
      `There ${this.#images.length === 1 ? "is" : "are"} ${pluralize(this.#images.length, "reference image")}.`,
    );
  }

  /** Use `files`, or none. Does not call onChange. */
  async set(files) {
    this.#close(this.#images.splice(0));
    for (const file of files ?? []) if (!(await this.#add(file))) break;
    this.#show();
  }

  async #add(file) {
    try {
      const limits = this.#callbacks.limits();
      const bytes = this.#images.reduce((sum, image) => sum + image.file.size, file.size);
      if (this.#images.length >= this.#max) throw new Error(`This model takes at most ${this.#max}: remove one first.`);
      if (bytes > limits.max_bytes)
        throw new Error(
          `They have ${formatSize(bytes)}; at most ${formatSize(limits.max_bytes)} are allowed together.`,
        );
      const isNamed = this.#images.some((image) => image.file.name === file.name); // code names all of them
      const named = isNamed ? new File([file], `${this.#images.length + 1}-${file.name}`, { type: file.type }) : file;
      this.#images.push(await openImageFile(named, limits));
      return true;
    } catch (error) {
      this.#callbacks.onError("reference_images", error.message);
      return false;
    }
  }

  #close(images) {
    for (const { url } of images) URL.revokeObjectURL(url);
  }

  #remove(image) {
    this.#callbacks.onInput();
    this.#images = this.#images.filter((each) => each !== image);
    this.#close([image]);
    byId("references-choose").focus();
    this.#changed(`${image.file.name} is removed.`);
  }

  #changed(text) {
    this.#show();
    this.#callbacks.onChange();
    this.#callbacks.announce(text);
  }

  #show() {
    byId("references-chosen").replaceChildren(...this.#images.map((image) => this.#row(image)));
    byId("references-choose").disabled = this.#images.length >= this.#max;
    byId("references-hint").textContent =
      `Up to ${this.#max}. The model is shown ${this.#max > 1 ? "them" : "it"} beside the prompt, which can say what to change.`;
  }

  #row(image) {
    const { file, url, width, height } = image;
    const facts = make("p", { class: "small muted number", text: `${width} × ${height} · ${formatSize(file.size)}` });
    const link = make("a", { href: url, download: file.name, text: file.name });
    const remove = button("Remove", () => this.#remove(image), { ariaLabel: `Remove ${file.name}` });
    return make(
      "li",
      { class: "chosen" },
      make("img", { src: url, alt: "" }),
      make("div", {}, link, facts, make("div", { class: "actions" }, remove)),
    );
  }
}
