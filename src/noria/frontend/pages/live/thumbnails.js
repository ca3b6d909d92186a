// Thumbnails of the images in an engine's slots, cut from the sprite sheets of views. Each is kept on a canvas while its image is shown.

import { decodeBase64 } from "../shared/dom.js";
import { imageKey } from "./state.js";

export class Thumbnails {
  #canvases = new Map();
  #next = null; // the newest view, waiting for the one being decoded
  #busy = false;

  /** The thumbnail of the image `key` as a canvas, or undefined. */
  get(key) {
    return this.#canvases.get(key);
  }

  /** Decode the thumbnails of `view`. While one view is being decoded, only the newest of the following is kept. */
  async update(view) {
    if (!view.sprite_sheet) return;
    this.#next = view;
    if (this.#busy) return;
    this.#busy = true;
    try {
      while (this.#next) {
        const { sprite_sheet: sheet, thumbnails } = this.#next;
        this.#next = null;
        const bitmap = await createImageBitmap(new Blob([decodeBase64(sheet.b64)], { type: `image/${sheet.format}` }));
        for (const thumbnail of thumbnails) this.#copy(thumbnail, bitmap);
        bitmap.close();
      }
    } finally {
      this.#busy = false;
    }
  }

  /** Delete all thumbnails but those of `keys`. */
  retain(keys) {
    for (const key of this.#canvases.keys()) if (!keys.has(key)) this.#canvases.delete(key);
  }

  #copy(thumbnail, bitmap) {
    const { x, y, width_px: width, height_px: height } = thumbnail;
    const key = imageKey(thumbnail);
    let canvas = this.#canvases.get(key);
    if (canvas?.width !== width || canvas?.height !== height) {
      canvas = new OffscreenCanvas(width, height);
      this.#canvases.set(key, canvas);
    }
    canvas.getContext("2d").drawImage(bitmap, x, y, width, height, 0, 0, width, height);
  }
}
