// One request as a card: its previews and progress while it runs; then its images, their timings, and buttons for them.

import { ApiError, fetchWithKey, readEvents, savedKey, serverUrl, toApiError } from "../shared/api.js";
import { button, copyButtons, decodeBase64, make } from "../shared/dom.js";
import { formatDuration, formatLora } from "../shared/format.js";
import { imageSeed, requestBody } from "../shared/request_settings.js";
import { snippetsFor } from "../shared/snippets.js";
import { concurrencyLimit } from "./concurrency_limit.js";
import { toDataUrl } from "./image_file.js";
import { timingBar } from "./timing_bar.js";

const TICK_MS = 200; // of the countdown
const FADE_MS = 350; // as in playground.css
const requestLimit = concurrencyLimit(4);

export class GenerationCard {
  #abort = new AbortController();
  #doneAt = null; // ms of performance.now()
  #progress = null; // the latest event
  #isRetried = false;
  #announcedHalf = false;
  #clock = 0;

  /**
   * `size`: of the images; `previews`: the maximum for each; `steps`: the default; `showsModel`: whether there are several models;
   * `takesReferences`: whether this one takes reference images.
   * `callbacks`: announce(text), open(image), useImage(image), onReuseSettings(settings), useSeed(seed), retry(card), onRemoved(card).
   */
  constructor(number, settings, { size, previews, steps, showsModel, takesReferences }, callbacks) {
    Object.assign(this, {
      number,
      settings,
      callbacks,
      showsModel,
      takesReferences,
      state: "waiting",
      images: [],
      sources: [],
    });
    this.previews = Math.min(previews, settings.inference_steps ?? steps);
    this.#build(size);
  }

  #build({ width, height }) {
    const count = Math.min(Math.max(Math.trunc(this.settings.n ?? 1), 1), 64) || 1;
    this.frames = Array.from({ length: count }, () => {
      const frame = make("div", { class: "frame" });
      frame.style.aspectRatio = `${width} / ${height}`;
      return frame;
    });
    const mosaic = make("div", { class: "frames" }, ...this.frames);
    mosaic.style.setProperty("--columns", Math.ceil(Math.sqrt(count)));
    this.title = make("p", { class: "prompt", text: this.settings.prompt || "(an empty prompt)" });
    this.bar = make("progress", { ariaLabel: `Steps of generation ${this.number}` });
    this.status = make("p", { class: "status-line number" });
    this.cancelButton = button("Cancel", () => this.cancel(), {
      class: "danger",
      ariaLabel: `Cancel generation ${this.number}`,
    });
    this.body = make(
      "div",
      { class: "body" },
      this.bar,
      make("div", { class: "running" }, this.status, this.cancelButton),
    );
    this.facts = make("ul", { class: "facts", ariaLabel: `Settings of generation ${this.number}` });
    this.#writeFacts(this.settings);
    this.head = make("div", { class: "head" }, this.title);
    this.element = make(
      "li",
      { class: "generation card", data: { state: this.state } },
      mosaic,
      this.head,
      this.facts,
      this.body,
    );
  }

  get running() {
    return this.state === "waiting" || this.state === "running";
  }

  /** Generate the images; throws the ApiError that ended it. `state` is "waiting" until an engine has accepted the request. */
  async run() {
    if (await requestLimit.isFull())
      this.status.textContent = "waiting: four requests are running, the limit of this browser";
    let release;
    try {
      release = await requestLimit.acquire(this.#abort.signal);
    } catch {
      return; // cancelled
    }
    this.status.textContent = "sending…";
    this.#clock = setInterval(() => this.#tick(), TICK_MS);
    try {
      await this.#readEvents(await this.#send());
    } catch (error) {
      if (this.state !== "cancelled") throw error;
    } finally {
      release();
      clearInterval(this.#clock);
    }
  }

  async #send() {
    const files = {};
    for (const name of ["image", "mask"]) if (this.settings[name]) files[name] = await toDataUrl(this.settings[name]);
    if (this.settings.reference_images)
      files.reference_images = await Promise.all(this.settings.reference_images.map(toDataUrl));
    const { controls } = this.settings;
    if (controls)
      files.controls = await Promise.all(
        controls.map(async (each) => ({ ...each, image: await toDataUrl(each.image) })),
      );
    const body = requestBody({ ...this.settings, ...files, stream: true, partial_images: this.previews });
    const options = {
      method: "POST",
      headers: { "content-type": "application/json" },
      body,
      signal: this.#abort.signal,
    };
    const response = await fetchWithKey("/t2i", options).catch(throwUnreachable);
    if (response.ok) return response;
    throw Object.assign(await toApiError(response), {
      retryAfterS: Number(response.headers.get("retry-after")) || null,
    });
  }

  async #readEvents(response) {
    this.#setState("running");
    for await (const { name, data } of mapNetworkErrors(readEvents(response))) {
      if (name === "progress") this.#onProgress(data);
      else if (name === "preview") this.#onPreview(data);
      else if (name === "finished") return this.#onFinished(data);
      else if (name === "error") throw new ApiError(0, data.error);
    }
    throw new ApiError(0, { code: "lost", message: "the server closed the connection before the images were done." });
  }

  /** Cancel the request: the server sees the closed connection, and the slots are free at the next step. */
  cancel() {
    if (!this.running) return;
    this.#setState("cancelled");
    this.#abort.abort();
    this.callbacks.announce(`Generation ${this.number} is cancelled.`);
    this.remove();
  }

  remove() {
    for (const { url } of [...this.images, ...this.sources]) URL.revokeObjectURL(url);
    this.callbacks.onRemoved(this);
    this.element.remove();
  }

  /** Show the error that ended the request, and when the server suggests to retry. */
  fail({ message, code, retryAfterS }) {
    this.#setState("failed");
    this.callbacks.announce(`Generation ${this.number} failed: ${message}`);
    const hint = retryAfterS ? ` The server suggests to try again in ${retryAfterS} s.` : "";
    const retryButton = button("Try again", () => this.callbacks.retry(this));
    this.#replaceBody(
      retryButton,
      make(
        "div",
        { class: "note bad" },
        make("p", { text: message }),
        make("p", { class: "small", text: `${code}.${hint}` }),
      ),
      make("div", { class: "actions" }, retryButton),
    );
  }

  /** Replace the progress bar and Cancel with `content`; move the focus to `next` if it was there. */
  #replaceBody(next, ...content) {
    const hadFocus = this.body.contains(document.activeElement);
    this.body.replaceChildren(...content);
    if (hadFocus) next.focus({ preventScroll: true });
    const properties = { class: "remove", title: "Remove", ariaLabel: `Remove generation ${this.number}` };
    this.head.append(button("×", () => this.remove(), properties));
  }

  #setState(state) {
    this.state = state;
    this.element.dataset.state = state;
  }

  #onProgress(progress) {
    this.#progress = progress;
    this.#doneAt = progress.finish_in_s === null ? null : performance.now() + progress.finish_in_s * 1000;
    this.bar.max = progress.num_steps;
    if (progress.queue_position === null) this.bar.value = progress.step;
    else if (this.bar.position > 0) {
      this.#isRetried = true; // its engine ended; another engine starts again and generates the same image
      this.bar.value = 0;
    }
    if (!this.#announcedHalf && progress.step * 2 >= progress.num_steps) {
      this.#announcedHalf = true;
      this.callbacks.announce(`Generation ${this.number} is half done.`);
    }
    this.#tick();
  }

  #tick() {
    if (this.#progress === null || !this.running) return;
    const { queue_position: ahead, step, num_steps: steps } = this.#progress;
    const position = ahead === null ? `step ${step} of ${steps}` : this.#describeQueue(ahead);
    const left = this.#doneAt === null ? null : Math.max(this.#doneAt - performance.now(), 0) / 1000;
    this.status.textContent =
      left === null ? position : left < 0.05 ? `${position} · any moment` : `${position} · ${left.toFixed(1)} s left`;
  }

  #describeQueue(numAhead) {
    if (this.#isRetried) return "its engine was lost; retried on another engine";
    return numAhead === 0 ? "joins next" : `${numAhead} ${numAhead === 1 ? "image joins" : "images join"} first`;
  }

  #onPreview({ index, format, b64_json: data, step }) {
    this.#show(
      this.frames[index],
      make("img", { class: "preview", alt: "", src: `data:image/${format};base64,${data}`, data: { step } }),
    );
  }

  // The new picture fades in over the earlier ones, which are removed when it covers them.
  #show(frame, picture) {
    const before = [...frame.querySelectorAll("img")];
    frame.append(picture);
    requestAnimationFrame(() => requestAnimationFrame(() => picture.classList.add("visible")));
    setTimeout(() => before.forEach((image) => image.remove()), FADE_MS * 2);
  }

  #onFinished(response) {
    this.#setState("finished");
    const first = imageSeed(this.settings.seed ?? response.images[0].seed, 0);
    this.used = {
      ...this.settings,
      ...{ model: response.model, inference_steps: response.inference_steps, guidance_scale: response.guidance_scale },
      ...{
        scheduler: response.scheduler,
        width: response.images[0].width,
        height: response.images[0].height,
        seed: first,
      },
    };
    this.images = response.images.map((image, index) => this.#image(image, imageSeed(first, index)));
    this.images.forEach((image, index) => this.#showFinal(image, this.frames[index]));
    const { width, height } = this.used; // the server fits a start image's size into the model's bounds
    for (const frame of this.frames) frame.style.aspectRatio = `${width} / ${height}`;
    this.#writeFacts(this.used);
    this.#replaceBody(this.images[0].opener, timingBar(response), this.#actions(), this.#copies());
    const took = formatDuration(response.timings.total_s);
    this.callbacks.announce(`Generation ${this.number} is done after ${took}; its seed is ${first}.`);
  }

  #image({ format, b64_json: data, width, height }, seed) {
    const file = new File([decodeBase64(data)], `noria-${seed}.${format}`, { type: `image/${format}` });
    return {
      file,
      url: URL.createObjectURL(file),
      seed,
      width,
      height,
      alt: this.settings.prompt || "an image without a prompt",
    };
  }

  #showFinal(image, frame) {
    this.#show(
      frame,
      make("img", { class: "final", alt: image.alt, src: image.url, width: image.width, height: image.height }),
    );
    const on = { click: () => this.callbacks.open(image) };
    image.opener = make("button", {
      type: "button",
      class: "open-large",
      ariaLabel: `Open large: ${image.alt}, seed ${image.seed}`,
      on,
    });
    const use = button("Use", () => this.callbacks.useImage(image), { class: "use", title: "Use as start image" });
    use.setAttribute("aria-label", `Use as start image: ${image.alt}, seed ${image.seed}`);
    frame.append(image.opener, use);
  }

  #writeFacts({
    model,
    width,
    height,
    inference_steps: steps,
    guidance_scale: guidance,
    scheduler,
    loras,
    controls,
    refiner,
    seed,
    image,
    mask,
    strength,
    reference_images: references,
  }) {
    const last = this.images.length > 1 ? ` to ${imageSeed(seed, this.images.length - 1)}` : "";
    const size = width && height && `${width} × ${height}`;
    const facts = [
      ...[this.showsModel && model, size, steps && `${steps} steps`, scheduler, ...(loras ?? []).map(formatLora)],
      ...[guidance !== null && `guidance ${guidance}`, seed && `seed ${seed}${last}`],
      ...(controls ?? []).map(({ name, scale = 1 }) => `ControlNet ${formatLora({ name, weight: scale })}`),
      ...[refiner && `refined from ${refiner.start}`],
      ...[image && `from ${image.name}`, mask && "with a mask", image && strength !== null && `strength ${strength}`],
      ...(references ?? []).map(({ name }) => `reference ${name}`),
    ];
    this.facts.replaceChildren(...facts.filter(Boolean).map((text) => make("li", { class: "chip number", text })));
  }

  #actions() {
    const { seed } = this.used;
    const several = this.images.length > 1;
    const downloads = this.images.map(({ url, file }, index) => {
      const link = make("a", {
        class: "button",
        href: url,
        download: file.name,
        text: !several ? "Download" : index ? `${index + 1}` : "Download 1",
      });
      link.setAttribute("aria-label", several ? `Download ${index + 1} of ${this.images.length}` : "Download");
      return link;
    });
    return make(
      "div",
      { class: "actions" },
      button("Reuse settings", () => this.callbacks.onReuseSettings(this.used), {
        title: "Put all of its settings into the form",
      }),
      button("Use seed", () => this.callbacks.useSeed(seed)),
      ...downloads,
    );
  }

  #copies() {
    const snippets = Object.entries(snippetsFor(this.used, this.takesReferences)).map(([name, write]) => [
      name,
      () => write(this.used, serverUrl, savedKey() !== ""),
    ]);
    const buttons = copyButtons(`copy-${this.number}`, snippets, (name) =>
      this.callbacks.announce(`Copied as ${name}.`),
    );
    const others = [...(this.used.controls ?? []).map(({ image }) => image), ...(this.used.reference_images ?? [])];
    const files = [this.used.image, this.used.mask, ...others].filter(Boolean);
    if (!files.length) return buttons;
    this.sources = files.map((file) => ({ file, url: URL.createObjectURL(file) }));
    const links = this.sources.map(({ file, url }) => make("a", { href: url, download: file.name, text: file.name }));
    const names = links.flatMap((each, index) =>
      index ? [index === links.length - 1 ? " and " : ", ", each] : [each],
    );
    return make(
      "div",
      {},
      buttons,
      make("p", { class: "small muted" }, "The code reads ", ...names, " where it runs."),
    );
  }
}

async function* mapNetworkErrors(stream) {
  try {
    yield* stream;
  } catch (error) {
    throwUnreachable(error);
  }
}

function throwUnreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, { code: "unreachable", message: "the server cannot be reached." });
}
