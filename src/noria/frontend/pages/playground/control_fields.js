// The ControlNets of a request in the form: a row for each, with its image, scale and part of the steps. Hidden for models without any.

import { button, byId, hide, make } from "../shared/dom.js";
import { formatSize } from "../shared/format.js";
import { listenForChoice, openImageFile } from "./image_file.js";
import { fill } from "./lora_fields.js";

const STEP = 0.05;

export class ControlFields {
  #names = [];
  #max = 0; // of a request
  #maxScale = 0;
  #opened = new Map(); // by row: its image, as `openImageFile` returns it
  #callbacks;

  /**
   * `callbacks`: onChange() after every change of an image; onInput() after another one; onError(param, message); announce(text);
   * limits(): of images of the selected model; otherNames(): of the files of the request besides those of controls.
   */
  constructor(callbacks) {
    this.#callbacks = callbacks;
    listenForChoice(byId("control-add"), byId("control-file"), ([file]) => this.choose(file));
  }

  /** Offer the ControlNets of the selected model, `noria` in GET /v1/models. Rows of others are removed. */
  offer({ controlnets, max_controls: max, max_control_scale: maxScale }) {
    [this.#names, this.#max, this.#maxScale] = [controlnets, max, maxScale];
    for (const row of this.#rows) {
      const select = row.querySelector("select");
      if (controlnets.includes(select.value)) fill(select, controlnets);
      else this.#drop(row);
    }
    byId("controls").hidden = controlnets.length === 0;
    this.#limit();
  }

  /** Use `file` for another control; or, if it is dropped on `target` in the row of one, for that. */
  async choose(file, target = null) {
    const row = target?.closest(".control");
    if (!row && this.#rows.length >= this.#max) {
      this.#callbacks.onError("controls", `A request has at most ${this.#max} ControlNets: remove one.`);
      return;
    }
    const opened = await this.#open(file);
    if (!opened) return;
    if (row?.isConnected) this.#setImage(row, opened);
    else this.#add({ name: this.#names[0] }, opened).querySelector("select").focus();
    this.#callbacks.onChange();
    this.#callbacks.announce(`${file.name} is the image of a ControlNet.`);
  }

  /** The controls, as in POST /t2i, with files as their images; null without any. */
  get value() {
    const controls = this.#rows.map((row) => {
      const numbers = [...row.querySelectorAll("input")]
        .filter(({ value }) => value !== "")
        .map(({ name, value }) => [name, Number(value)]);
      return {
        name: row.querySelector("select").value,
        image: this.#opened.get(row).file,
        ...Object.fromEntries(numbers),
      };
    });
    return controls.length ? controls : null;
  }

  /** The size of the first image, which is that of the result unless another is asked for; null without any. */
  get size() {
    const [row] = this.#rows;
    return row ? { width: this.#opened.get(row).width, height: this.#opened.get(row).height } : null;
  }

  /** Use these controls in place of those there are. Those that the model does not have are left out. */
  async set(controls) {
    for (const row of this.#rows) this.#drop(row);
    for (const control of controls ?? []) {
      const opened = this.#names.includes(control.name) && (await this.#open(control.image));
      if (opened) this.#add(control, opened);
    }
    this.#limit();
  }

  get #rows() {
    return [...byId("control-rows").children];
  }

  async #open(file) {
    const { limits, onError, otherNames } = this.#callbacks;
    const names = [...otherNames(), ...[...this.#opened.values()].map((each) => each.file.name)];
    let [named, count] = [file, 1];
    while (names.includes(named.name)) named = new File([file], `control-${count++}-${file.name}`, { type: file.type }); // code names all
    try {
      return await openImageFile(named, limits());
    } catch (error) {
      onError("controls", error.message);
      return null;
    }
  }

  #add({ name, scale = 1, start = 0, end = 1 }, opened) {
    const select = make("select", { ariaLabel: "ControlNet" });
    fill(select, this.#names, name);
    const remove = button("×", () => this.#remove(row), {
      class: "remove",
      title: "Remove",
      ariaLabel: "Remove this ControlNet",
    });
    const number = (label, meaning, field, value, max) => {
      const input = make("input", {
        type: "number",
        name: field,
        inputMode: "decimal",
        min: 0,
        max,
        step: STEP,
        value,
        ariaLabel: meaning,
      });
      return make("label", { class: "small", text: label, title: meaning }, input);
    };
    const row = make(
      "div",
      { class: "control", role: "group", ariaLabel: "A ControlNet and its image" },
      make("div", { class: "row" }, select, remove),
      make(
        "div",
        { class: "chosen" },
        make("img", { alt: "" }),
        make("div", {}, make("a", { title: "Save the image" }), make("p", { class: "small muted number" })),
      ),
      make(
        "div",
        { class: "row" },
        number("Scale", "How strongly it steers", "scale", scale, this.#maxScale),
        number("From", "The part of the steps from which it steers: 0 is the first", "start", start, 1),
        number("To", "The part of the steps up to which it steers: 1 is the last", "end", end, 1),
      ),
    );
    row.addEventListener("input", () => this.#callbacks.onInput());
    byId("control-rows").append(row);
    this.#setImage(row, opened);
    this.#limit();
    return row;
  }

  #setImage(row, opened) {
    if (this.#opened.has(row)) URL.revokeObjectURL(this.#opened.get(row).url);
    this.#opened.set(row, opened);
    const { file, url, width, height } = opened;
    Object.assign(row.querySelector("img"), { src: url, alt: `The image ${file.name}` });
    Object.assign(row.querySelector("a"), { href: url, download: file.name, textContent: file.name });
    row.querySelector("p").textContent = `${width} × ${height} · ${formatSize(file.size)}`;
  }

  #remove(row) {
    hide(row, byId("control-add"));
    this.#drop(row);
    this.#limit();
    byId("control-add").focus();
    this.#callbacks.onChange();
    this.#callbacks.announce("The ControlNet is removed.");
  }

  #drop(row) {
    URL.revokeObjectURL(this.#opened.get(row).url);
    this.#opened.delete(row);
    row.remove();
  }

  #limit() {
    byId("control-add").disabled = this.#rows.length >= this.#max;
  }
}
