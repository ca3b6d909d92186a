// The layout of slots, and the slots as elements over the canvas: readable labels, and buttons for the keyboard and screen readers.

import { make, setText } from "../shared/dom.js";
import { deadlineState, describeImage, describeStyle, formatSeconds } from "../shared/format.js";
import { imageKey } from "./state.js";

const RING_MAX_SLOTS = 12; // more are laid out in rows
const LABEL_PX = 32; // two lines below each circle
const MARGIN_PX = 10;
const HUB_MAX_PX = 62; // radii of the hub, which holds three lines of text
const HUB_MIN_PX = 42;
const RIM_PX = 4;

/**
 * The layout of `numSlots` slots in `width` px: a ring, or rows if there are many. {kind, height, size, label, centers: [{x, y}]},
 * where `size` is the diameter of a circle and `label` the width of its label; a ring has {center, radius, hub}, too. Pure.
 */
export function slotLayout(numSlots, width) {
  return numSlots <= RING_MAX_SLOTS ? ringLayout(numSlots, width) : rowsLayout(numSlots, width);
}

function ringLayout(numSlots, width) {
  const diameter = Math.min(width, 430);
  const doNotOverlap = (size) =>
    numSlots === 1 || 2 * radiusFor(size, diameter) * Math.sin(Math.PI / numSlots) >= size + LABEL_PX;
  const fits = (size) => doNotOverlap(size) && hubFor(size, diameter) >= HUB_MIN_PX;
  let size = 104;
  while (size > 32 && !fits(size)) size -= 2;
  const radius = radiusFor(size, diameter);
  const center = { x: width / 2, y: MARGIN_PX + size / 2 + radius };
  const centers = Array.from({ length: numSlots }, (_, slot) => {
    const angle = (2 * Math.PI * slot) / numSlots - Math.PI / 2;
    return { x: center.x + radius * Math.cos(angle), y: center.y + radius * Math.sin(angle) };
  });
  const lowest = Math.max(...centers.map(({ y }) => y + size / 2 + LABEL_PX), center.y + radius + RIM_PX);
  const hub = Math.min(HUB_MAX_PX, hubFor(size, diameter));
  return { kind: "ring", height: lowest + MARGIN_PX, size, label: size + 36, radius, hub, center, centers };
}

const radiusFor = (size, diameter) => (diameter - size) / 2 - MARGIN_PX - 10;
const hubFor = (size, diameter) => radiusFor(size, diameter) - size / 2 - LABEL_PX - 4; // below the label of the highest slot

function rowsLayout(numSlots, width) {
  const minCellWidth = width < 500 ? 64 : numSlots > 32 ? 72 : 92;
  const maxColumns = Math.max(1, Math.floor(width / minCellWidth));
  const columns = Math.ceil(numSlots / Math.ceil(numSlots / maxColumns));
  const cell = width / columns;
  const size = Math.round(Math.min(76, cell - 22));
  const row = size + LABEL_PX + 12;
  const centers = Array.from({ length: numSlots }, (_, slot) => ({
    x: (0.5 + (slot % columns)) * cell,
    y: MARGIN_PX + size / 2 + Math.floor(slot / columns) * row,
  }));
  return { kind: "rows", height: Math.ceil(numSlots / columns) * row + MARGIN_PX, size, label: cell - 4, centers };
}

export class Slots {
  #list;
  #slots = []; // {button, size, label, step, deadline, labelledKey}
  #onSelect;
  #engine;
  selected = null;

  /** `onSelect` is called when another slot, or none, is selected. */
  constructor(list, engine, onSelect) {
    this.#list = list;
    this.#engine = engine;
    this.#onSelect = onSelect;
    list.setAttribute("aria-label", `Slots of ${engine}`);
    list.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Put one element for each slot of `layout` in its place. */
  arrange(layout) {
    while (this.#slots.length < layout.centers.length) this.#add();
    for (const { button } of this.#slots.splice(layout.centers.length)) button.parentElement.remove();
    this.#list.classList.toggle("ring", layout.kind === "ring");
    layout.centers.forEach(({ x, y }, slot) => {
      const { style } = this.#slots[slot].button.parentElement;
      style.left = `${x - layout.label / 2}px`;
      style.top = `${y - layout.size / 2}px`;
      style.width = `${layout.label}px`;
      style.setProperty("--size", `${layout.size}px`);
    });
  }

  /** Write the images of a view's `slots`; only what has changed is touched. */
  update(slots, now) {
    const imageBySlot = new Map(slots.map((image) => [image.slot, image]));
    const sizeOf = ({ settings }) => `${settings.width}×${settings.height}`;
    const haveSizes = new Set(slots.map(sizeOf)).size > 1; // texts have none
    this.#slots.forEach((element, slot) => {
      const image = imageBySlot.get(slot);
      const key = image ? imageKey(image) : "";
      setText(element.label, image ? (image.paused ? "paused" : describeStyle(image.settings)) : "");
      setText(element.step, image ? `${image.call}/${image.num_calls}` : "");
      setText(element.size, image && haveSizes ? sizeOf(image) : "");
      const state = image ? deadlineState(image, now) : null;
      setText(
        element.deadline,
        state ? (image.deadline_at < now ? "late" : formatSeconds(image.deadline_at - now)) : "",
      );
      if (element.deadline.dataset.deadline !== (state ?? "")) element.deadline.dataset.deadline = state ?? "";
      // The name has what does not change: a name that changed at every step would be read aloud. The rest is the description.
      if (element.labelledKey !== key)
        element.button.setAttribute("aria-label", `Slot ${slot}: ${image ? describeImage(image) : "free"}`);
      element.labelledKey = key;
    });
  }

  #add() {
    const slot = this.#slots.length;
    const [size, deadline, label, step] = ["size", "deadline", "label", "step number"].map((name) =>
      make("span", { class: name }),
    );
    const on = { click: () => this.#select(slot) };
    const properties = { type: "button", class: "slot", tabIndex: slot === 0 ? 0 : -1, ariaPressed: "false", on };
    const button = make("button", properties, size, deadline, label, step);
    const describedBy = [step, label, deadline];
    describedBy.forEach((part, index) => (part.id = `${this.#engine}-${slot}-${index}`));
    button.setAttribute("aria-describedby", describedBy.map(({ id }) => id).join(" "));
    this.#list.append(make("li", {}, button));
    this.#slots.push({ button, size, deadline, label, step, labelledKey: null });
  }

  #select(slot) {
    this.selected = this.selected === slot ? null : slot;
    this.#slots.forEach(({ button }, number) => button.setAttribute("aria-pressed", String(number === this.selected)));
    this.#makeFocusable(slot);
    this.#onSelect();
  }

  /** Tab reaches one slot at a time; arrows, Home and End go to the others. */
  #move(event) {
    const last = this.#slots.length - 1;
    const at = this.#slots.findIndex(({ button }) => button === event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[
      event.key
    ];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const slot = (to + last + 1) % (last + 1);
    this.#makeFocusable(slot);
    this.#slots[slot].button.focus();
  }

  #makeFocusable(slot) {
    this.#slots.forEach(({ button }, number) => (button.tabIndex = number === slot ? 0 : -1));
  }
}
