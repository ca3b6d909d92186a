// The slots as elements over the drawn wheel: labels that can be read, and buttons that a keyboard and a screen reader find.

import { make, write } from "./elements.js";
import { named, seconds, urgency } from "./words.js";

export class Slots {
  #list;
  #slots = []; // {button, what, step, due, said}
  #onChoose;
  #engine;
  chosen = null;

  /** `onChoose` is called when another slot, or none, is chosen. */
  constructor(list, engine, onChoose) {
    this.#list = list;
    this.#engine = engine;
    this.#onChoose = onChoose;
    list.setAttribute("aria-label", `Slots of ${engine}`);
    list.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Put the elements where `places` says. */
  arrange(places) {
    while (this.#slots.length < places.spots.length) this.#add();
    for (const { button } of this.#slots.splice(places.spots.length)) button.parentElement.remove();
    this.#list.classList.toggle("ring", places.kind === "ring");
    places.spots.forEach(({ x, y }, slot) => {
      const { style } = this.#slots[slot].button.parentElement;
      style.left = `${x - places.label / 2}px`;
      style.top = `${y - places.size / 2}px`;
      style.width = `${places.label}px`;
      style.setProperty("--size", `${places.size}px`);
    });
  }

  /** Write what the seats are now; only what has changed is touched. */
  update(seats, now) {
    const seated = new Map(seats.map((seat) => [seat.slot, seat]));
    this.#slots.forEach((element, slot) => {
      const seat = seated.get(slot);
      const key = seat ? `${seat.request_id}/${seat.index}` : "";
      write(element.what, seat ? (seat.paused ? "paused" : seat.scheduler) : "");
      write(element.step, seat ? `${seat.call}/${seat.num_calls}` : "");
      const pressing = seat ? urgency(seat, now) : null;
      write(element.due, pressing ? (seat.due_at < now ? "late" : seconds(seat.due_at - now)) : "");
      if (element.due.dataset.urgency !== (pressing ?? "")) element.due.dataset.urgency = pressing ?? "";
      // The name says what stays: one that changed at every step would be read aloud, or old. What changes is its description.
      if (element.said !== key) element.button.setAttribute("aria-label", `Slot ${slot}: ${seat ? named(seat) : "free"}`);
      element.said = key;
    });
  }

  #add() {
    const slot = this.#slots.length;
    const [due, what, step] = ["due", "what", "step number"].map((name) => make("span", { class: name }));
    const on = { click: () => this.#choose(slot) };
    const button = make("button", { type: "button", class: "slot", tabIndex: slot === 0 ? 0 : -1, ariaPressed: "false", on }, due, what, step);
    const changing = [step, what, due];
    changing.forEach((part, place) => (part.id = `${this.#engine}-${slot}-${place}`));
    button.setAttribute("aria-describedby", changing.map(({ id }) => id).join(" "));
    this.#list.append(make("li", {}, button));
    this.#slots.push({ button, due, what, step, said: null });
  }

  #choose(slot) {
    this.chosen = this.chosen === slot ? null : slot;
    this.#slots.forEach(({ button }, number) => button.setAttribute("aria-pressed", String(number === this.chosen)));
    this.#enter(slot);
    this.#onChoose();
  }

  /** One slot at a time is reached by Tab; arrows, Home and End go from one to the next. */
  #move(event) {
    const last = this.#slots.length - 1;
    const at = this.#slots.findIndex(({ button }) => button === event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const slot = (to + last + 1) % (last + 1);
    this.#enter(slot);
    this.#slots[slot].button.focus();
  }

  #enter(slot) {
    this.#slots.forEach(({ button }, number) => (button.tabIndex = number === slot ? 0 : -1));
  }
}
