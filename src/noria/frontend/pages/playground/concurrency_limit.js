// Limits how many requests the pages send at once. A browser has six connections to a server for all of its tabs together, and queues
// what exceeds them without telling the page: so only some are used for generations, and the others are left for files, for the live
// stream of another tab and for everything else. `release = await limit.acquire(signal)` waits; `release()` admits the next request.

/** A limit that all tabs of this browser share, where it has the Web Locks API (with TLS, or on localhost); else this tab's own. */
export const concurrencyLimit = (max) => (navigator.locks ? new SharedLimit(max) : new TabLimit(max));

class SharedLimit {
  #queueLock = "noria-requests"; // its holder waits for the next free lock of #names
  #names;

  constructor(max) {
    this.#names = Array.from({ length: max }, (_, index) => `noria-request-${index}`);
  }

  /** Whether the next `acquire` would wait. */
  async isFull() {
    const { held } = await navigator.locks.query();
    const names = new Set(held.map(({ name }) => name));
    return names.has(this.#queueLock) || this.#names.every((name) => names.has(name));
  }

  /** Wait for a free lock; rejects if `signal` is aborted. The browser releases the locks of a closed tab. */
  acquire(signal) {
    return new Promise((resolve, reject) => {
      // One waiter at a time, of all tabs, waits for the first free lock, in order of arrival.
      const first = () => this.#acquireAny(signal).then(resolve);
      navigator.locks.request(this.#queueLock, { signal }, first).catch(reject);
    });
  }

  #acquireAny(signal) {
    const others = new AbortController();
    const options = { signal: AbortSignal.any([signal, others.signal]) };
    return new Promise((resolve, reject) => {
      let acquired = false;
      const onLock = () => {
        if (acquired) return undefined; // two became free at once
        acquired = true;
        others.abort();
        return new Promise((release) => resolve(release));
      };
      for (const name of this.#names) navigator.locks.request(name, options, onLock).catch(reject); // no effect once resolved
    });
  }
}

class TabLimit {
  #free;
  #waiting = [];

  constructor(max) {
    this.#free = max;
  }

  async isFull() {
    return this.#free === 0;
  }

  async acquire(signal) {
    signal.throwIfAborted();
    if (this.#free > 0) this.#free -= 1;
    else await this.#wait(signal);
    return () => this.#release();
  }

  #wait(signal) {
    return new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      signal.addEventListener("abort", () => {
        const index = this.#waiting.indexOf(resolve);
        if (index < 0) return; // already acquired
        this.#waiting.splice(index, 1);
        reject(signal.reason);
      });
    });
  }

  #release() {
    const next = this.#waiting.shift();
    if (next) next();
    else this.#free += 1;
  }
}
