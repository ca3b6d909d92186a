// One engine on the page: its wheel, its queue, its figures, its time-lines. Canvases are drawn at every frame; text is written with the
// first frame after a view, so that a slot's label and its circle always say the same.

import { make, write } from "./elements.js";
import { Pictures } from "./pictures.js";
import { places } from "./places.js";
import { Slots } from "./slots.js";
import { keyOf } from "./state.js";
import { calm } from "./theme.js";
import { binned, drawBars, drawStages, span } from "./timeline.js";
import { Wheel } from "./wheel.js";
import { count, describedSlot, figures, mix, notice, progress, seconds, start as begins } from "./words.js";

const DELAY_S = 0.25; // what is shown is that old, so that it is known before it is drawn
const STALL_S = 0.5; // after so long without a frame, as in a tab that was hidden, nobody saw who came and went
const AHEAD_S = 0.5; // a wheel that is not heard of stands still so long after its last view; one that is, may have no news
const NUM_WAITING = 12;
const TONES = { ready: "good", loading: "warn" };

export class Panel {
  pictures = new Pictures();
  #engine = null;
  #hues = {};
  #live = true;
  #written = true; // whether the text says what the last view said
  #places = null;
  #widths = {};
  #bins = new Map();
  #binned = null; // the turns that `#bins` are of
  #last = 0;
  #tabled = 0;

  constructor(name) {
    this.root = document.querySelector("#engine").content.firstElementChild.cloneNode(true);
    const find = (selector) => this.root.querySelector(selector);
    this.root.setAttribute("aria-label", name);
    write(find("h2"), name);
    find("details .scroll").setAttribute("aria-label", `The slots of ${name} as a table`);
    this.find = find;
    this.wheel = new Wheel(find(".wheel"));
    this.slots = new Slots(find(".slots"), name, () => this.#choose());
    find("details").addEventListener("toggle", () => this.#table(true));
    const watch = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => this.#resize(target, contentRect.width)));
    for (const selector of [".place", "figure"]) watch.observe(find(selector));
  }

  /** Show `engine`, of the page's state; `live` is whether its stream is open. */
  update(engine, hues, live) {
    this.#engine = engine;
    this.#hues = hues;
    this.#live = live && engine.state === "ready";
    const { wheel, state, device } = engine;
    const chip = this.find(".state");
    write(chip, state === "unknown" ? "not reached" : state);
    chip.className = `chip state ${TONES[state] ?? "bad"}`;
    write(this.find(".device"), device ? `on ${device}` : "");
    const said = notice(engine);
    this.find(".notice").hidden = said === null;
    this.find(".notice").classList.toggle("bad", state !== "ready" && state !== "loading");
    write(this.find(".notice"), said ?? "");
    this.find(".board").hidden = this.find("details").hidden = wheel === null;
    if (wheel === null) return;
    this.#written = false;
    this.#arrange();
  }

  /** Draw one frame, when the page's clock is at `at` seconds. */
  frame(at) {
    const wheel = this.#engine?.wheel;
    const { place, figure } = this.#widths;
    if (!wheel || !this.#places || !place || !figure) return;
    if (!this.#written) this.#write(wheel);
    const shown = this.#now(wheel, at) - DELAY_S;
    const passed = at - this.#last;
    const still = calm() || passed > STALL_S;
    const scene = { wheel, places: this.#places, width: place, pictures: this.pictures, hues: this.#hues, calm: still, live: this.#live };
    this.wheel.draw(scene, at, passed);
    this.#last = at;
    if (this.#binned !== wheel.turns) {
      this.#bins = binned(wheel.turns);
      this.#binned = wheel.turns;
    }
    drawBars(this.find(".bars"), figure, { wheel, hues: this.#hues, chosen: this.slots.chosen }, shown);
    drawStages(this.find(".stages"), figure, this.#bins, shown);
  }

  /** The engine's time, in seconds, when the page's clock is at `at`. */
  #now(wheel, at = performance.now() / 1000) {
    const now = at - wheel.lag_s;
    return this.#live ? now : Math.min(now, wheel.at + AHEAD_S);
  }

  #write(wheel) {
    this.#written = true;
    const now = this.#now(wheel);
    this.slots.update(wheel.seats, now);
    write(this.find(".seated"), `${wheel.seats.length} of ${wheel.num_slots}`);
    write(this.find(".turn"), `turn ${wheel.number.toLocaleString("en")}`);
    write(this.find(".mix"), this.#live ? mix(wheel.seats) : "This is how it was when it was last heard of.");
    write(this.find(".count"), String(wheel.num_waiting));
    this.#choose();
    this.#line(".queue", wheel.waiting.slice(0, NUM_WAITING), (item, waiting) => this.#waiting(item, waiting, now));
    this.#line(".gone", wheel.gone, (item, image) => this.#gone(item, image));
    this.#figures(wheel);
    this.#legend(wheel);
    this.#table(false);
    const past = `the last ${span(this.#widths.figure ?? 600)} seconds`;
    label(this.find(".bars"), `Time-line of ${past}: ${wheel.bars.length} images in ${wheel.num_slots} slots; the table below has them now`);
    label(this.find(".stages"), `Share of ${past} that went into encoding, denoising and decoding`);
    this.pictures.keep(new Set([...wheel.seats.map(keyOf), ...wheel.gone.map(({ key }) => key)]));
  }

  #choose() {
    const wheel = this.#engine?.wheel;
    if (wheel) write(this.find(".chosen"), describedSlot(this.slots.chosen, wheel.seats, this.#now(wheel)));
  }

  #resize(target, width) {
    this.#widths[target.tagName === "FIGURE" ? "figure" : "place"] = Math.floor(width);
    if (target.tagName !== "FIGURE") this.#places = null;
    this.#arrange();
  }

  #arrange() {
    const wheel = this.#engine?.wheel;
    const width = this.#widths.place;
    if (!wheel || !width || this.#places?.spots.length === wheel.num_slots) return;
    this.#places = places(wheel.num_slots, width);
    this.root.classList.toggle("wide", this.#places.kind === "rows");
    this.find(".place").style.height = `${this.#places.height}px`;
    this.find(".hub").style.top = this.#places.middle ? `${this.#places.middle.y}px` : "";
    this.slots.arrange(this.#places);
    this.#write(wheel);
  }

  /** Make the list hold an item for each of `things`. */
  #line(selector, things, fill) {
    const list = this.find(selector);
    while (list.children.length > things.length) list.lastElementChild.remove();
    while (list.children.length < things.length) list.append(make("li"));
    things.forEach((thing, place) => fill(list.children[place], thing));
    list.parentElement.classList.toggle("empty", things.length === 0);
  }

  #waiting(item, { scheduler, num_steps, num_images, start_at, priority }, now) {
    if (!item.firstChild) item.append(make("i"), make("span"));
    item.className = "chip";
    item.firstChild.className = `swatch hue-${this.#hues[scheduler] ?? 0}`;
    const times = num_images > 1 ? ` × ${num_images}` : "";
    const begin = start_at === null ? "" : ` · ${begins(start_at - now)}`;
    write(item.lastChild, `${scheduler}, ${count(num_steps, "step")}${times}${priority === "normal" ? "" : ` · ${priority}`}${begin}`);
  }

  #gone(item, { key, outcome, scheduler, num_steps, slot }) {
    if (item.dataset.key === key) return;
    item.dataset.key = key;
    const picture = make("canvas", { ariaHidden: "true" });
    const taken = this.pictures.of(key);
    if (taken) {
      picture.width = taken.width;
      picture.height = taken.height;
      picture.getContext("2d").drawImage(taken, 0, 0);
    } else {
      picture.className = `swatch hue-${this.#hues[scheduler] ?? 0}`;
    }
    const text = `${scheduler ?? "an image"}${num_steps ? `, ${num_steps} steps` : ""}, from slot ${slot}: ${outcome}`;
    item.className = outcome === "ok" ? "ok" : "failed";
    item.title = text;
    item.replaceChildren(picture, make("span", { class: "visually-hidden", text }));
  }

  #figures(wheel) {
    const list = this.find(".figures");
    figures(wheel).forEach(([name, value, meaning], place) => {
      if (!list.children[place]) list.append(make("div", {}, make("dt"), make("dd")));
      const [term, data] = list.children[place].children;
      write(term, name);
      write(data, value);
      if (list.children[place].title !== meaning) list.children[place].title = meaning;
    });
  }

  #legend(wheel) {
    const names = [...new Set(wheel.bars.map(({ scheduler }) => scheduler))].filter((name) => name !== null);
    this.#line(".schedulers", names, (item, name) => {
      if (item.dataset.name === name) return;
      item.dataset.name = name;
      item.replaceChildren(make("i", { class: `swatch hue-${this.#hues[name] ?? 0}` }), name);
    });
  }

  /** The table is written once a second, and only while it is open. */
  #table(now_open) {
    const wheel = this.#engine?.wheel;
    const at = performance.now();
    if (!wheel || !this.find("details").open || (!now_open && at - this.#tabled < 1000)) return;
    this.#tabled = at;
    const now = this.#now(wheel);
    const rows = wheel.seats.map((seat) => {
      const due = seat.due_at === null ? "–" : seat.due_at < now ? "late" : seconds(seat.due_at - now);
      const texts = [
        `${seat.request_id.slice(0, 12)} image ${seat.index}`,
        seat.scheduler,
        progress(seat),
        seat.model,
        `${seat.width_px} × ${seat.height_px}`,
        String(seat.guidance_scale),
        seat.priority,
        seat.finish_at === null ? "–" : seconds(Math.max(0, seat.finish_at - now)),
        due,
      ];
      return make("tr", {}, make("th", { text: String(seat.slot), scope: "row" }), ...texts.map((text) => make("td", { text })));
    });
    this.find("tbody").replaceChildren(...rows);
  }
}

function label(element, text) {
  if (element.getAttribute("aria-label") !== text) element.setAttribute("aria-label", text);
}
