// Reads GET /v1/live for as long as the page is open; reconnects with growing delays and reports the state of the connection.

import { fetchWithKey, readEvents, toApiError } from "../shared/api.js";

const MIN_BACKOFF_S = 0.5;
const MAX_BACKOFF_S = 10;
const SILENCE_TIMEOUT_S = 40; // the server sends at least a comment every 15 s

/** Seconds to wait after `failures` failed attempts; `jitter`, 0 to 1, keeps pages from reconnecting at the same moment. Pure. */
export const backoffSeconds = (failures, jitter) =>
  Math.min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** (failures - 1)) * (0.75 + 0.5 * jitter);

/** Calls `onEvent` with events as state.js takes them. */
export class LiveStream {
  #onEvent;
  #controller = null;
  #timer = null;
  #failures = 0;

  constructor(onEvent) {
    this.#onEvent = onEvent;
  }

  /** Connect now, also while waiting to reconnect. */
  async open() {
    this.close();
    const controller = new AbortController();
    this.#controller = controller;
    this.#reportConnection({ phase: "connecting" });
    try {
      await this.#read(controller);
      this.#onBroken("the server ended the stream.");
    } catch (error) {
      if (this.#controller !== controller) return; // closed by us
      if (error.status === 401) this.#reportConnection({ phase: "locked", message: error.message });
      else if (error.status === 404)
        this.#reportConnection({ phase: "off", message: error.message }); // by a setting: no reconnect
      else this.#onBroken(error.status === undefined ? "the server cannot be reached." : error.message);
    }
  }

  /** Disconnect; no more events are reported. */
  close() {
    clearTimeout(this.#timer);
    this.#controller?.abort();
    this.#controller = null;
  }

  async #read(controller) {
    const response = await fetchWithKey("/v1/live", { signal: controller.signal });
    if (!response.ok) throw await toApiError(response);
    let lastReceivedMs = performance.now();
    const recorder = new TransformStream({
      transform(chunk, out) {
        lastReceivedMs = performance.now();
        out.enqueue(chunk);
      },
    });
    const watchdog = setInterval(
      () => performance.now() - lastReceivedMs > SILENCE_TIMEOUT_S * 1000 && controller.abort(),
      5000,
    );
    try {
      for await (const event of readEvents({ body: response.body.pipeThrough(recorder) })) {
        if (event.name === "engines") this.#onOpen();
        this.#onEvent({ ...event, at: performance.now() / 1000 });
      }
    } finally {
      clearInterval(watchdog);
    }
  }

  #onOpen() {
    this.#failures = 0;
    this.#reportConnection({ phase: "open" });
  }

  #onBroken(message) {
    this.#failures += 1;
    const wait_s = backoffSeconds(this.#failures, Math.random());
    this.#reportConnection({ phase: "broken", message, retry_at: performance.now() / 1000 + wait_s });
    this.#timer = setTimeout(() => this.open(), wait_s * 1000);
  }

  #reportConnection(connection) {
    this.#onEvent({ name: "connection", connection });
  }
}
