// Who may send. A browser has six connections to a server, for all of its tabs together, and what is beyond them waits in the browser
// without a word: so no more than some are used for drawings, the others are left for files, for the wheel in another tab, and for
// whatever else a page asks. `give = await take(signal)` waits for a permit; `give()` gives it back.

/** Permits that all tabs of this browser share, where it has locks for pages (that is with TLS, or on localhost); else this tab's own. */
export const permits = (most) => (navigator.locks ? new SharedPermits(most) : new OwnPermits(most));

class SharedPermits {
  #turn = "noria-drawings"; // whoever holds this lock asks for the next permit
  #names;

  constructor(most) {
    this.#names = Array.from({ length: most }, (_, place) => `noria-drawing-${place}`);
  }

  /** Whether the next one would have to wait. */
  async full() {
    const { held } = await navigator.locks.query();
    const names = new Set(held.map(({ name }) => name));
    return names.has(this.#turn) || this.#names.every((name) => names.has(name));
  }

  /** Until there is a permit; rejects when `signal` is aborted, and then there is none. A tab that is closed gives its own back. */
  take(signal) {
    return new Promise((resolve, reject) => {
      // One at a time asks for whichever comes free first, in the order in which they came, of whatever tab.
      const first = () => this.#any(signal).then(resolve);
      navigator.locks.request(this.#turn, { signal }, first).catch(reject);
    });
  }

  #any(signal) {
    const others = new AbortController();
    const asking = { signal: AbortSignal.any([signal, others.signal]) };
    return new Promise((resolve, reject) => {
      let had = false;
      const hold = () => {
        if (had) return undefined; // two came free at once
        had = true;
        others.abort();
        return new Promise((give) => resolve(give));
      };
      for (const name of this.#names) navigator.locks.request(name, asking, hold).catch(reject); // in vain, once one is held
    });
  }
}

class OwnPermits {
  #free;
  #waiting = [];

  constructor(most) {
    this.#free = most;
  }

  async full() {
    return this.#free === 0;
  }

  async take(signal) {
    signal.throwIfAborted();
    if (this.#free > 0) this.#free -= 1;
    else await this.#turn(signal);
    return () => this.#give();
  }

  #turn(signal) {
    return new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      signal.addEventListener("abort", () => {
        const place = this.#waiting.indexOf(resolve);
        if (place < 0) return; // it has one
        this.#waiting.splice(place, 1);
        reject(signal.reason);
      });
    });
  }

  #give() {
    const next = this.#waiting.shift();
    if (next) next();
    else this.#free += 1;
  }
}
