// What the images on a wheel look like by now: each picture of a sheet is kept on a small canvas of its own, as long as it is shown.

import { keyOf } from "./state.js";

export class Pictures {
  #canvases = new Map();
  #next = null; // the newest view that waits for the one being decoded
  #busy = false;

  /** The picture of the image `key`, or undefined. */
  of(key) {
    return this.#canvases.get(key);
  }

  /** Take the pictures of `view`; a view that comes before the last was decoded replaces one that still waits. */
  async take(view) {
    if (!view.sheet) return;
    this.#next = view;
    if (this.#busy) return;
    this.#busy = true;
    try {
      while (this.#next) {
        const taken = this.#next;
        this.#next = null;
        const { format, b64 } = taken.sheet;
        const file = new Blob([bytes(b64)], { type: `image/${format}` });
        const sheet = await createImageBitmap(file);
        for (const cell of taken.cells) this.#draw(cell, sheet);
        sheet.close();
      }
    } finally {
      this.#busy = false;
    }
  }

  /** Forget all but these. */
  keep(keys) {
    for (const key of this.#canvases.keys()) if (!keys.has(key)) this.#canvases.delete(key);
  }

  #draw(cell, sheet) {
    const { x, y, width_px: width, height_px: height } = cell;
    const key = keyOf(cell);
    let canvas = this.#canvases.get(key);
    if (canvas?.width !== width || canvas?.height !== height) {
      canvas = new OffscreenCanvas(width, height);
      this.#canvases.set(key, canvas);
    }
    canvas.getContext("2d").drawImage(sheet, x, y, width, height, 0, 0, width, height);
  }
}

const bytes = (b64) => Uint8Array.from(atob(b64), (letter) => letter.charCodeAt(0));
