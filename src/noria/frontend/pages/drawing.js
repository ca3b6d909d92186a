// One request as a card: its previews while it is drawn, how far it is, when it will be done; then its images and what can be done with them.

import { button, copy, make } from "./elements.js";
import { call, events, refusal, Refused, savedKey } from "./events.js";
import { permits } from "./permits.js";
import { SNIPPETS } from "./snippets.js";
import { seconds, timingBar } from "./timing.js";
import { bodyOf, seedOf } from "./wish.js";

const TICK_MS = 200; // of the countdown
const FADE_MS = 350; // as in playground.css
const connections = permits(4);

export class Drawing {
  #abort = new AbortController();
  #doneAt = null; // ms, as performance.now() counts
  #progress = null; // the latest event
  #again = false;
  #toldHalf = false;
  #clock = 0;

  /** `size` of its images and `previews` of each, and whether `tellsModel`, as there are several; `hear` has `said(text)`, `open(image)`, `recall(wish)`, `useSeed(seed)`, `retry(wish)`, `removed(drawing)`. */
  constructor(number, wish, { size, previews, steps, tellsModel }, hear) {
    Object.assign(this, { number, wish, hear, tellsModel, state: "waiting", images: [] });
    this.previews = Math.min(previews, wish.inference_steps ?? steps);
    this.#build(size);
  }

  #build({ width, height }) {
    const count = Math.min(Math.max(Math.trunc(this.wish.n ?? 1), 1), 64) || 1;
    this.frames = Array.from({ length: count }, () => {
      const frame = make("div", { class: "frame" });
      frame.style.aspectRatio = `${width} / ${height}`;
      return frame;
    });
    const mosaic = make("div", { class: "frames" }, ...this.frames);
    mosaic.style.setProperty("--columns", Math.ceil(Math.sqrt(count)));
    this.title = make("p", { class: "prompt", text: this.wish.prompt || "(an empty prompt)" });
    this.bar = make("progress", { ariaLabel: `Steps of drawing ${this.number}` });
    this.where = make("p", { class: "where number" });
    this.cancelButton = button("Cancel", () => this.cancel(), { class: "danger", ariaLabel: `Cancel drawing ${this.number}` });
    this.body = make("div", { class: "below" }, this.bar, make("div", { class: "running" }, this.where, this.cancelButton));
    this.facts = make("ul", { class: "facts", ariaLabel: `Settings of drawing ${this.number}` });
    this.#tell(this.wish);
    this.head = make("div", { class: "head" }, this.title);
    this.element = make("li", { class: "drawing card", data: { state: this.state } }, mosaic, this.head, this.facts, this.body);
  }

  get running() {
    return this.state === "waiting" || this.state === "running";
  }

  /** Have it drawn, to its end; raises the Refused that ended it: its `state` says whether an engine had accepted it. */
  async run() {
    if (await connections.full()) this.where.textContent = "waits here: four are on their way, which is what a browser bears";
    let give;
    try {
      give = await connections.take(this.#abort.signal);
    } catch {
      return; // cancelled
    }
    this.where.textContent = "asking…";
    this.#clock = setInterval(() => this.#tick(), TICK_MS);
    try {
      await this.#follow(await this.#ask());
    } catch (error) {
      if (this.state !== "cancelled") throw error;
    } finally {
      give();
      clearInterval(this.#clock);
    }
  }

  async #ask() {
    const body = bodyOf({ ...this.wish, stream: true, partial_images: this.previews });
    const options = { method: "POST", headers: { "content-type": "application/json" }, body, signal: this.#abort.signal };
    const response = await call("/t2i", options).catch(unreachable);
    if (response.ok) return response;
    throw Object.assign(await refusal(response), { retryAfterS: Number(response.headers.get("retry-after")) || null });
  }

  async #follow(response) {
    this.#become("running");
    for await (const { name, data } of asLongAsItLasts(events(response))) {
      if (name === "progress") this.#step(data);
      else if (name === "preview") this.#preview(data);
      else if (name === "finished") return this.#finish(data);
      else if (name === "error") throw new Refused(0, data.error);
    }
    throw new Refused(0, { code: "lost", message: "the server closed the connection before the images were done." });
  }

  /** Take it out of the batch: the server notices that nobody reads any more, and its slots are free at the next step. */
  cancel() {
    if (!this.running) return;
    this.#become("cancelled");
    this.#abort.abort();
    this.hear.said(`Drawing ${this.number} is cancelled.`);
    this.remove();
  }

  remove() {
    for (const { url } of this.images) URL.revokeObjectURL(url);
    this.hear.removed(this);
    this.element.remove();
  }

  /** End with the server's words, and its hint when to try again. */
  fail({ message, code, retryAfterS }) {
    this.#become("failed");
    this.hear.said(`Drawing ${this.number} failed: ${message}`);
    const hint = retryAfterS ? ` The server suggests to try again in ${retryAfterS} s.` : "";
    const again = button("Try again", () => this.hear.retry(this));
    this.#end(
      again,
      make("div", { class: "note bad" }, make("p", { text: message }), make("p", { class: "small", text: `${code}.${hint}` })),
      make("div", { class: "actions" }, again),
    );
  }

  /** Put `below` where the bar and Cancel were; the keyboard's place goes to `next` if it was in there. */
  #end(next, ...below) {
    const had = this.body.contains(document.activeElement);
    this.body.replaceChildren(...below);
    if (had) next.focus({ preventScroll: true });
    this.#offerRemoval();
  }

  #become(state) {
    this.state = state;
    this.element.dataset.state = state;
  }

  #step(progress) {
    this.#progress = progress;
    this.#doneAt = progress.finish_in_s === null ? null : performance.now() + progress.finish_in_s * 1000;
    this.bar.max = progress.num_steps;
    if (progress.queue_position === null) this.bar.value = progress.step;
    else if (this.bar.position > 0) {
      this.#again = true; // its engine has ended; another draws it from the beginning, to the same image
      this.bar.value = 0;
    }
    if (!this.#toldHalf && progress.step * 2 >= progress.num_steps) {
      this.#toldHalf = true;
      this.hear.said(`Drawing ${this.number} is half done.`);
    }
    this.#tick();
  }

  #tick() {
    if (this.#progress === null || !this.running) return;
    const { queue_position: ahead, step, num_steps: steps } = this.#progress;
    const place = ahead === null ? `step ${step} of ${steps}` : this.#ahead(ahead);
    const left = this.#doneAt === null ? null : Math.max(this.#doneAt - performance.now(), 0) / 1000;
    this.where.textContent = left === null ? place : left < 0.05 ? `${place} · any moment` : `${place} · ${left.toFixed(1)} s left`;
  }

  #ahead(number) {
    if (this.#again) return "its engine was lost; drawn again by the next";
    return number === 0 ? "boards next" : `${number} ${number === 1 ? "image boards" : "images board"} first`;
  }

  #preview({ index, format, b64_json: data, step }) {
    this.#show(this.frames[index], make("img", { class: "preview", alt: "", src: `data:image/${format};base64,${data}`, data: { step } }));
  }

  // The newcomer fades in over what is there, which goes when it is covered.
  #show(frame, picture) {
    const before = [...frame.querySelectorAll("img")];
    frame.append(picture);
    requestAnimationFrame(() => requestAnimationFrame(() => picture.classList.add("here")));
    setTimeout(() => before.forEach((image) => image.remove()), FADE_MS * 2);
  }

  #finish(answer) {
    this.#become("finished");
    const first = seedOf(this.wish.seed ?? answer.images[0].seed, 0);
    this.used = {
      ...this.wish,
      ...{ model: answer.model, inference_steps: answer.inference_steps, guidance_scale: answer.guidance_scale },
      ...{ scheduler: answer.scheduler, width: answer.images[0].width, height: answer.images[0].height, seed: first },
    };
    this.images = answer.images.map((image, index) => this.#image(image, seedOf(first, index)));
    this.images.forEach((image, index) => this.#hang(image, this.frames[index]));
    this.#tell(this.used);
    this.#end(this.images[0].opener, timingBar(answer), this.#actions(), this.#copies());
    this.hear.said(`Drawing ${this.number} is done after ${seconds(answer.timings.total_s)}; its seed is ${first}.`);
  }

  #image({ format, b64_json: data, width, height }, seed) {
    const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
    const url = URL.createObjectURL(new Blob([bytes], { type: `image/${format}` }));
    const wish = { ...this.used, seed, n: 1 };
    return { url, seed, width, height, name: `noria-${seed}.${format}`, alt: this.wish.prompt || "an image without a prompt", wish };
  }

  #hang(image, frame) {
    this.#show(frame, make("img", { class: "final", alt: image.alt, src: image.url, width: image.width, height: image.height }));
    const opener = make("button", { type: "button", class: "opener", ariaLabel: `Open large: ${image.alt}, seed ${image.seed}`, on: { click: () => this.hear.open(image) } });
    image.opener = opener;
    frame.append(opener);
  }

  #tell({ model, width, height, inference_steps: steps, guidance_scale: guidance, scheduler, seed }) {
    const last = this.images.length > 1 ? ` to ${seedOf(seed, this.images.length - 1)}` : "";
    const size = width && height && `${width} × ${height}`;
    const facts = [this.tellsModel && model, size, steps && `${steps} steps`, scheduler, guidance !== null && `guidance ${guidance}`, seed && `seed ${seed}${last}`];
    this.facts.replaceChildren(...facts.filter(Boolean).map((text) => make("li", { class: "chip number", text })));
  }

  #actions() {
    const { seed } = this.used;
    const several = this.images.length > 1;
    const downloads = this.images.map(({ url, name }, index) => {
      const link = make("a", { class: "button", href: url, download: name, text: !several ? "Download" : index ? `${index + 1}` : "Download 1" });
      link.setAttribute("aria-label", several ? `Download ${index + 1} of ${this.images.length}` : "Download");
      return link;
    });
    return make(
      "div",
      { class: "actions" },
      button("Recall", () => this.hear.recall(this.used), { title: "Put all of its settings into the form" }),
      button("Use seed", () => this.hear.useSeed(seed)),
      ...downloads,
    );
  }

  #offerRemoval() {
    this.head.append(button("×", () => this.remove(), { class: "remove", title: "Remove", ariaLabel: `Remove drawing ${this.number}` }));
  }

  #copies() {
    const choices = Object.entries(SNIPPETS).map(([name, write]) => button(name, ({ currentTarget }) => this.#copy(name, write, currentTarget)));
    const label = make("span", { class: "small muted", text: "Copy as", id: `copy-${this.number}` });
    const group = make("div", { class: "actions copies", role: "group" }, label, ...choices);
    group.setAttribute("aria-labelledby", label.id);
    return group;
  }

  async #copy(name, write, pressed) {
    await copy(write(this.used, location.origin, savedKey() !== ""));
    this.hear.said(`Copied as ${name}.`);
    pressed.classList.add("copied");
    setTimeout(() => pressed.classList.remove("copied"), 1500);
  }
}

async function* asLongAsItLasts(stream) {
  try {
    yield* stream;
  } catch (error) {
    unreachable(error);
  }
}

function unreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new Refused(0, { code: "unreachable", message: "the server cannot be reached." });
}
