// Follows GET /v1/live for as long as the page is open: opens it again when it breaks, waits longer each time, says how it stands.

import { call, events, refusal } from "./events.js";

const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 10;
const SILENT_S = 40; // the server says something every 15 s

/** How long to wait before try number `failures` + 1; `chance`, 0 to 1, keeps many pages from coming back at the same moment. Pure. */
export const backoff = (failures, chance) => Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failures - 1)) * (0.75 + 0.5 * chance);

/** Calls `tell` with events as state.js takes them. */
export class Stream {
  #tell;
  #controller = null;
  #timer = null;
  #failures = 0;

  constructor(tell) {
    this.#tell = tell;
  }

  /** Open it now, whatever it was waiting for. */
  async open() {
    this.close();
    const controller = new AbortController();
    this.#controller = controller;
    this.#say({ phase: "connecting" });
    try {
      await this.#read(controller);
      this.#broken("the server ended the stream.");
    } catch (error) {
      if (this.#controller !== controller) return; // closed by us
      if (error.status === 401) this.#say({ phase: "locked", message: error.message });
      else if (error.status === 404) this.#say({ phase: "off", message: error.message }); // by a setting: it will not come by itself
      else this.#broken(error.status === undefined ? "the server cannot be reached." : error.message);
    }
  }

  /** Stop following; nothing is told any more. */
  close() {
    clearTimeout(this.#timer);
    this.#controller?.abort();
    this.#controller = null;
  }

  async #read(controller) {
    const response = await call("/v1/live", { signal: controller.signal });
    if (!response.ok) throw await refusal(response);
    let heard = performance.now();
    const watch = new TransformStream({
      transform(chunk, out) {
        heard = performance.now();
        out.enqueue(chunk);
      },
    });
    const watchdog = setInterval(() => performance.now() - heard > SILENT_S * 1000 && controller.abort(), 5000);
    try {
      for await (const event of events({ body: response.body.pipeThrough(watch) })) {
        if (event.name === "engines") this.#opened();
        this.#tell({ ...event, at: performance.now() / 1000 });
      }
    } finally {
      clearInterval(watchdog);
    }
  }

  #opened() {
    this.#failures = 0;
    this.#say({ phase: "open" });
  }

  #broken(message) {
    this.#failures += 1;
    const wait_s = backoff(this.#failures, Math.random());
    this.#say({ phase: "broken", message, again_at: performance.now() / 1000 + wait_s });
    this.#timer = setTimeout(() => this.open(), wait_s * 1000);
  }

  #say(connection) {
    this.#tell({ name: "connection", connection });
  }
}
