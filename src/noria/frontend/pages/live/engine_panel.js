// One engine on the live page: its slots, queue, statistics and timelines. Canvases are drawn in every frame; text is written with the
// first frame after a view, so that a slot's label and its circle always show the same view.

import { make, prefersReducedMotion, setText } from "../shared/dom.js";
import {
  clientName,
  describeBatch,
  describeMixedCalls,
  describeSharing,
  describeSize,
  describeSlot,
  describeWaits,
  describeWork,
  engineNotice,
  engineStats,
  formatDuration,
  formatPercent,
  formatProgress,
  formatSeconds,
  formatStart,
  hasSeveralClients,
  itemName,
  pluralize,
} from "../shared/format.js";
import { SlotRing } from "./slot_ring.js";
import { Slots, slotLayout } from "./slots.js";
import { imageKey } from "./state.js";
import { Thumbnails } from "./thumbnails.js";
import { binIterations, drawSlotBars, drawStages, visibleSeconds } from "./timeline.js";

const DELAY_S = 0.25; // the timelines show the past up to so long ago, whose views have arrived
const STALL_S = 0.5; // after so long without a frame, as in a hidden tab, changes are not animated
const AHEAD_S = 0.5; // without a stream, time stops so long after the last view
const MAX_WAITING = 12;
const TONES = { ready: "good", loading: "warn", draining: "warn" };

export class EnginePanel {
  thumbnails = new Thumbnails();
  #engine = null;
  #hues = {};
  #live = true;
  #textIsCurrent = true; // whether the text shows the last view
  #layout = null;
  #widths = {};
  #bins = new Map();
  #binnedIterations = null; // the iterations that `#bins` was made of
  #lastFrameAt = 0;
  #tableWrittenAt = 0;
  #newestBatch = null; // in the table of batches
  #sharesWrittenAt = -Infinity;

  constructor(name) {
    this.root = document.querySelector("#engine").content.firstElementChild.cloneNode(true);
    const find = (selector) => this.root.querySelector(selector);
    this.root.setAttribute("aria-label", name);
    setText(find("h2"), name);
    find(".shares .scroll").setAttribute("aria-label", `The shares of ${name}`);
    find(".batches .scroll").setAttribute("aria-label", `The latest batches of ${name}`);
    find("details .scroll").setAttribute("aria-label", `The slots of ${name} as a table`);
    this.find = find;
    this.ring = new SlotRing(find(".slot-ring"));
    this.slots = new Slots(find(".slots"), name, () => this.#describeSelected());
    find("details").addEventListener("toggle", () => this.#writeTable(true));
    const observer = new ResizeObserver((entries) =>
      entries.forEach(({ target, contentRect }) => this.#resize(target, contentRect.width)),
    );
    for (const selector of [".slot-area", "figure"]) observer.observe(find(selector));
  }

  /** Show `engine` of the page's state; `live` is whether the stream is open. */
  update(engine, hues, live) {
    this.#engine = engine;
    this.#hues = hues;
    this.#live = live && engine.state === "ready";
    const { view, state, device } = engine;
    const chip = this.find(".state");
    setText(chip, state === "unknown" ? "not reached" : state);
    chip.className = `chip state ${TONES[state] ?? "bad"}`;
    setText(this.find(".device"), device ? `on ${device}` : "");
    const noticeText = engineNotice(engine);
    this.find(".notice").hidden = noticeText === null;
    this.find(".notice").classList.toggle("bad", !["ready", "loading", "draining"].includes(state));
    setText(this.find(".notice"), noticeText ?? "");
    this.find(".engine-body").hidden = this.find("details").hidden = view === null;
    if (view === null) return;
    this.#textIsCurrent = false;
    this.#arrange();
  }

  /** Draw one frame at `at` seconds of the page's clock. */
  frame(at) {
    const view = this.#engine?.view;
    const { area, figure } = this.#widths;
    if (!view || !this.#layout || !area || !figure) return;
    if (!this.#textIsCurrent) this.#writeText(view);
    const shownTime = this.#now(view, at) - DELAY_S;
    const passed = at - this.#lastFrameAt;
    const reducedMotion = prefersReducedMotion() || passed > STALL_S;
    const { thumbnails } = this;
    const scene = {
      view,
      layout: this.#layout,
      width: area,
      thumbnails,
      hues: this.#hues,
      reducedMotion,
      live: this.#live,
    };
    this.ring.draw(scene, at, passed);
    this.#lastFrameAt = at;
    if (this.#binnedIterations !== view.iterations) {
      this.#bins = binIterations(view.iterations);
      this.#binnedIterations = view.iterations;
    }
    drawSlotBars(this.find(".bars"), figure, { view, hues: this.#hues, selected: this.slots.selected }, shownTime);
    drawStages(this.find(".stages"), figure, this.#bins, shownTime);
  }

  /** The engine's clock, in seconds, when the page's clock is at `at`. */
  #now(view, at = performance.now() / 1000) {
    const now = at - view.clock_offset_s;
    return this.#live ? now : Math.min(now, view.captured_at + AHEAD_S);
  }

  #writeText(view) {
    this.#textIsCurrent = true;
    const now = this.#now(view);
    this.slots.update(view.slots, now);
    setText(this.find(".num-running"), `${view.slots.length} of ${view.num_slots}`);
    setText(this.find(".iteration"), `iteration ${view.last_iteration.toLocaleString("en")}`);
    setText(
      this.find(".batch-summary"),
      this.#live ? describeBatch(view.slots) : "This is the last view before the connection was lost.",
    );
    setText(this.find(".mixed-calls"), describeMixedCalls(view.iterations));
    setText(this.find(".count"), String(view.num_waiting));
    this.#describeSelected();
    this.#fillList(".queue", view.waiting.slice(0, MAX_WAITING), (item, waiting) =>
      this.#writeWaiting(item, waiting, view, now),
    );
    this.#fillList(".departures", view.departures, (item, image) => this.#writeDeparture(item, image));
    this.#writeStats(view);
    this.#writeLegend(view);
    this.#writeShares(view, now);
    this.#writeBatches(view);
    this.#writeTable(false);
    const past = `the last ${visibleSeconds(this.#widths.figure ?? 600)} seconds`;
    setLabel(
      this.find(".bars"),
      `Timeline of ${past}: ${pluralize(view.bars.length, itemName(view))} in ${view.num_slots} slots; the table below has the current ones`,
    );
    setLabel(this.find(".stages"), `Shares of image and text encoding, denoising and decoding in ${past}`);
    this.thumbnails.retain(new Set([...view.slots.map(imageKey), ...view.departures.map(({ key }) => key)]));
  }

  #describeSelected() {
    const view = this.#engine?.view;
    if (view) setText(this.find(".selected-slot"), describeSlot(this.slots.selected, view, this.#now(view)));
  }

  #resize(target, width) {
    this.#widths[target.tagName === "FIGURE" ? "figure" : "area"] = Math.floor(width);
    if (target.tagName !== "FIGURE") this.#layout = null;
    this.#arrange();
  }

  #arrange() {
    const view = this.#engine?.view;
    const width = this.#widths.area;
    if (!view || !width || this.#layout?.centers.length === view.num_shown) return;
    this.#layout = slotLayout(view.num_shown, width);
    this.root.classList.toggle("wide", this.#layout.kind === "rows");
    this.find(".slot-area").style.height = `${this.#layout.height}px`;
    this.find(".hub").style.top = this.#layout.center ? `${this.#layout.center.y}px` : "";
    this.slots.arrange(this.#layout);
    this.#writeText(view);
  }

  /** Make the list have one item for each of `values`, and write them with `write(item, value)`. */
  #fillList(selector, values, write) {
    const list = this.find(selector);
    while (list.children.length > values.length) list.lastElementChild.remove();
    while (list.children.length < values.length) list.append(make("li"));
    values.forEach((value, index) => write(list.children[index], value));
    list.parentElement.classList.toggle("empty", values.length === 0);
  }

  #writeWaiting(item, waiting, view, now) {
    const { settings, num_images, start_at, priority } = waiting;
    if (!item.firstChild) item.append(make("i"), make("span"));
    item.className = "chip";
    item.firstChild.className = `swatch hue-${this.#hues[settings.scheduler] ?? 0}`;
    const times = num_images > 1 ? ` × ${num_images}` : "";
    const client = hasSeveralClients(view) ? ` · ${clientName(waiting)}` : "";
    const start = start_at === null ? "" : ` · ${formatStart(start_at - now)}`;
    setText(
      item.lastChild,
      `${settings.scheduler}, ${describeWork(settings)}${times}${client}${priority === "normal" ? "" : ` · ${priority}`}${start}`,
    );
  }

  #writeDeparture(item, { key, outcome, settings, slot }) {
    if (item.dataset.key === key) return;
    item.dataset.key = key;
    const canvas = make("canvas", { ariaHidden: "true" });
    const thumbnail = this.thumbnails.get(key);
    if (thumbnail) {
      canvas.width = thumbnail.width;
      canvas.height = thumbnail.height;
      canvas.getContext("2d").drawImage(thumbnail, 0, 0);
    } else {
      canvas.className = `swatch hue-${this.#hues[settings?.scheduler] ?? 0}`;
    }
    const text = `${settings ? `${settings.scheduler}, ${describeWork(settings)}` : "an image"}, from slot ${slot}: ${outcome}`;
    item.className = outcome === "ok" ? "ok" : "failed";
    item.title = text;
    item.replaceChildren(canvas, make("span", { class: "visually-hidden", text }));
  }

  #writeStats(view) {
    const list = this.find(".stats");
    engineStats(view).forEach(([name, value, meaning], index) => {
      if (!list.children[index]) list.append(make("div", {}, make("dt"), make("dd")));
      const [term, data] = list.children[index].children;
      setText(term, name);
      setText(data, value);
      if (list.children[index].title !== meaning) list.children[index].title = meaning;
    });
  }

  #writeLegend(view) {
    const names = [...new Set(view.bars.map(({ settings }) => settings?.scheduler))].filter(
      (name) => name !== undefined,
    );
    this.#fillList(".schedulers", names, (item, name) => {
      if (item.dataset.name === name) return;
      item.dataset.name = name;
      item.replaceChildren(make("i", { class: `swatch hue-${this.#hues[name] ?? 0}` }), name);
    });
  }

  /** Write who has how much of the device and who waits for what, once a second, if there are several clients. */
  #writeShares(view, now) {
    const at = performance.now();
    if (at - this.#sharesWrittenAt < 1000) return;
    this.#sharesWrittenAt = at;
    this.find(".shares").hidden = !hasSeveralClients(view);
    const rows = view.shares.map((share) => {
      const bar = make("span", { class: "share-bar", ariaHidden: "true" });
      bar.style.setProperty("--share", formatPercent(share.device_share).replace(" ", ""));
      const time = make("td", { text: formatPercent(share.device_share) }, bar);
      const cells = [
        time,
        make("td", { class: "number", text: String(share.num_running) }),
        make("td", { text: describeWaits(share, view, now) }),
      ];
      return make("tr", {}, make("th", { text: clientName(share), scope: "row" }), ...cells);
    });
    this.find(".shares tbody").replaceChildren(...rows);
  }

  /** Write the latest batches of texts; an engine of images has none. */
  #writeBatches({ batches }) {
    if (this.#newestBatch === (batches[0] ?? null)) return;
    this.#newestBatch = batches[0] ?? null;
    this.find(".batches").hidden = !batches.length;
    this.find(".strip").hidden = batches.length > 0; // texts have one stage
    const rows = batches.map(({ number, session, num_texts, num_tokens, padded_tokens, duration_s, requests }) => {
      const bar = make("span", { class: "tokens-bar", ariaHidden: "true" });
      bar.style.setProperty("--share", `${(100 * num_tokens) / padded_tokens}%`);
      const tokens = make(
        "td",
        { class: "number", text: `${num_tokens} + ${padded_tokens - num_tokens} padding` },
        bar,
      );
      const [texts, took, by] = [String(num_texts), formatDuration(duration_s), String(session)].map((text) =>
        make("td", { class: "number", text }),
      );
      const cells = [texts, tokens, make("td", { text: describeSharing(requests) }), took, by];
      return make("tr", {}, make("th", { text: String(number), scope: "row" }), ...cells);
    });
    this.find(".batches tbody").replaceChildren(...rows);
  }

  /** Write the table, once a second and only while it is open; at once if it was `justOpened`. */
  #writeTable(justOpened) {
    const view = this.#engine?.view;
    const at = performance.now();
    if (!view || !this.find("details").open || (!justOpened && at - this.#tableWrittenAt < 1000)) return;
    this.#tableWrittenAt = at;
    const now = this.#now(view);
    const rows = view.slots.map((image) => {
      const { deadline_at } = image;
      const texts = [
        clientName(image),
        `${image.request_id.slice(0, 12)} image ${image.index}`,
        image.settings.scheduler,
        formatProgress(image),
        image.model,
        describeSize(image.settings),
        String(image.settings.guidance_scale ?? "–"),
        image.priority,
        image.finish_at === null ? "–" : formatSeconds(Math.max(0, image.finish_at - now)),
        deadline_at === null ? "–" : deadline_at < now ? "late" : formatSeconds(deadline_at - now),
      ];
      return make(
        "tr",
        {},
        make("th", { text: String(image.slot), scope: "row" }),
        ...texts.map((text) => make("td", { text })),
      );
    });
    this.find("details tbody").replaceChildren(...rows);
  }
}

function setLabel(element, text) {
  if (element.getAttribute("aria-label") !== text) element.setAttribute("aria-label", text);
}
