// The LoRAs of a request in the form: a row for each, with its name and weight. Hidden for models without any.

import { button, byId, make } from "../shared/dom.js";

const STEP = 0.1;

export class LoraFields {
  #names = [];
  #max = 0; // of a request
  #maxWeight = 0;
  #onInput;

  /** `onInput` is called when the user changes something; `refresh()` calls `offer` with what the server has now, and resolves then. */
  constructor(onInput, refresh) {
    this.#onInput = onInput;
    byId("lora-add").addEventListener("click", async () => {
      await refresh();
      if (this.#names.length === 0 || byId("lora-add").disabled) return;
      this.#add({ name: this.#names[0], weight: 1 }).querySelector("select").focus();
      onInput();
    });
  }

  /** Offer the LoRAs of the selected model, `noria` in GET /v1/models. What is chosen stays. */
  offer({ loras, max_loras: max, max_lora_weight: maxWeight }) {
    [this.#names, this.#max, this.#maxWeight] = [loras, max, maxWeight];
    const rows = [...byId("lora-rows").children];
    byId("loras").hidden = loras.length === 0 && rows.length === 0;
    for (const row of rows) fill(row.querySelector("select"), loras);
    this.#limit();
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
    const select = make("select", { ariaLabel: "LoRA" });
    fill(select, this.#names, name);
    const bounds = { min: -this.#maxWeight, max: this.#maxWeight, step: STEP };
    const field = make("input", {
      type: "number",
      inputMode: "decimal",
      ...bounds,
      value: weight,
      ariaLabel: "Weight of the LoRA",
    });
    const remove = button("×", () => this.#remove(row), {
      class: "remove",
      title: "Remove",
      ariaLabel: "Remove this LoRA",
    });
    const row = make("div", { class: "row lora" }, select, field, remove);
    row.addEventListener("input", () => this.#onInput());
    byId("lora-rows").append(row);
    this.#limit();
    return row;
  }

  #remove(row) {
    row.remove();
    this.#limit();
    byId("lora-add").focus();
    this.#onInput();
  }

  #limit() {
    byId("lora-add").disabled = byId("lora-rows").children.length >= this.#max;
  }
}

/** Make `select` offer `names`, and keep its choice even if it is gone: the server says so then. */
export function fill(select, names, chosen = select.value) {
  const offered = names.includes(chosen) ? names : [...names, chosen];
  if (offered.join("\n") === [...select.options].map(({ value }) => value).join("\n")) return; // an open list stays open
  select.replaceChildren(...offered.map((each) => new Option(each, each, false, each === chosen)));
}
