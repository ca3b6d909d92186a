// The LoRAs of a request in the form: a row for each, with its name and weight. Hidden for models without any.

import { button, byId, make } from "./dom.js";

const MAX_LORAS = 8; // of a request

export class LoraFields {
  #names = [];

  /** `onInput` is called when the user changes something. */
  constructor(onInput) {
    this.onInput = onInput;
    byId("lora-add").addEventListener("click", () => {
      this.#add({ name: this.#names[0], weight: 1 }).querySelector("select").focus();
      onInput();
    });
  }

  /** Offer `names`, those of the selected model; removes what is chosen. */
  offer(names) {
    this.#names = names;
    byId("loras").hidden = names.length === 0;
    this.value = [];
  }

  /** The LoRAs, as in POST /t2i; null without any. */
  get value() {
    const rows = [...byId("lora-rows").children].map((row) => {
      const weight = row.querySelector("input").value;
      return { name: row.querySelector("select").value, ...(weight === "" ? {} : { weight: Number(weight) }) };
    });
    return rows.length ? rows : null;
  }

  /** Those that the model does not have are left out. */
  set value(loras) {
    byId("lora-rows").replaceChildren();
    for (const lora of loras ?? []) if (this.#names.includes(lora.name)) this.#add(lora);
    this.#limit();
  }

  #add({ name, weight = 1 }) {
    const select = make("select", { ariaLabel: "LoRA" }, ...this.#names.map((each) => new Option(each, each, false, each === name)));
    const field = make("input", { type: "number", inputMode: "decimal", min: -10, max: 10, step: 0.1, value: weight, ariaLabel: "Weight of the LoRA" });
    const remove = button("×", () => this.#remove(row), { class: "remove", title: "Remove", ariaLabel: "Remove this LoRA" });
    const row = make("div", { class: "row lora" }, select, field, remove);
    row.addEventListener("input", () => this.onInput());
    byId("lora-rows").append(row);
    this.#limit();
    return row;
  }

  #remove(row) {
    row.remove();
    this.#limit();
    byId("lora-add").focus();
    this.onInput();
  }

  #limit() {
    byId("lora-add").disabled = byId("lora-rows").children.length >= MAX_LORAS;
  }
}
