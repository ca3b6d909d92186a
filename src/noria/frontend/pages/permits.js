// Who may send. A browser has six connections to a server, and what is beyond them waits in the browser without a word: so no more than
// some are used for drawings, the others are left for files, for the wheel in another tab, and for whatever else the page asks.

export class Permits {
  #free;
  #waiting = [];

  constructor(most) {
    this.#free = most;
  }

  /** Whether the next one would have to wait. */
  get full() {
    return this.#free === 0;
  }

  /** Until there is a permit, which `give` has to give back; rejects when `signal` is aborted, and then there is none. */
  async take(signal) {
    if (this.#free > 0) {
      this.#free -= 1;
      return;
    }
    await new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      signal.addEventListener("abort", () => {
        const place = this.#waiting.indexOf(resolve);
        if (place < 0) return; // it has one
        this.#waiting.splice(place, 1);
        reject(signal.reason);
      });
    });
  }

  /** Give one back: the next in line has it. */
  give() {
    const next = this.#waiting.shift();
    if (next) next();
    else this.#free += 1;
  }
}
