// The start image of a request in the form, with its mask: from a drop, the clipboard, a file or the gallery. Kept in this tab only.

import { byId, hide } from "../shared/dom.js";
import { formatSize } from "../shared/format.js";
import { listenForChoice, openImageFile } from "./image_file.js";
import { isPainted, MaskPainter, stripes } from "./mask_painter.js";

const THUMBNAIL_PX = 96;

export class StartImage {
  #image = null; // as `openImageFile` returns it
  #mask = null;
  #callbacks;
  #painter = new MaskPainter();
  #calls = 0; // of `set`: a file that is decoded late does not replace a later one

  /**
   * `callbacks`: onChange(isNew) after every change, where `isNew` says that the image is another one; onError(param, message);
   * onTakeSettings(file); announce(text); limits(): those of the selected model, null
   * if it takes none.
   */
  constructor(callbacks) {
    this.#callbacks = callbacks;
    listenForChoice(byId("image-choose"), byId("image-file"), ([file]) => this.choose(file));
    listenForChoice(byId("mask-choose"), byId("mask-file"), ([file]) => this.#chooseMask(file));
    byId("image-remove").addEventListener("click", () => this.#remove());
    byId("image-settings").addEventListener("click", () => callbacks.onTakeSettings(this.#image.file));
    byId("mask-remove").addEventListener("click", () => this.#setMask(null));
    byId("mask-paint").addEventListener("click", () => {
      const onMask = (file) => (file ? this.#chooseMask(file) : this.#setMask(null));
      this.#painter.open(this.#image, this.#mask?.file, onMask);
    });
  }

  /** The files, as `image` and `mask` of the settings; null without. */
  get value() {
    return { image: this.#image?.file ?? null, mask: this.#mask?.file ?? null };
  }

  get size() {
    return this.#image && { width: this.#image.width, height: this.#image.height };
  }

  /** Use `file` in place of the image there is, without a mask; resolves to whether it can be used. */
  async choose(file) {
    if (!(await this.set({ image: file }))) return false;
    this.#callbacks.onChange(true);
    this.#callbacks.announce(`${file.name} is the start image.`);
    return true;
  }

  /** Use the files `image` and `mask`, or none; resolves to whether they can be used. Does not call onChange. */
  async set({ image = null, mask = null }) {
    const call = ++this.#calls;
    const opened = image && (await this.#open("image", image));
    const openedMask = opened && mask && (await this.#open("mask", mask));
    if (call !== this.#calls) {
      this.#close(opened, openedMask);
      return false;
    }
    if (image && !opened) return false; // what there was stays
    this.#close(this.#image, this.#mask);
    [this.#image, this.#mask] = [opened, openedMask];
    this.#show();
    return true;
  }

  async #open(param, file) {
    const limits = this.#callbacks.limits();
    try {
      if (limits === null) throw new Error("The selected model cannot begin with an image, nor repaint one.");
      if (!limits) throw new Error("The models are not known yet: choose the image again when the server is ready.");
      return await openImageFile(file, limits);
    } catch (error) {
      this.#callbacks.onError(param, error.message);
      return null;
    }
  }

  #close(...opened) {
    for (const each of opened) if (each) URL.revokeObjectURL(each.url);
  }

  async #remove() {
    await this.set({});
    this.#callbacks.onChange(true);
    this.#callbacks.announce("The start image is removed.");
  }

  async #chooseMask(file) {
    const { width, height, file: imageFile } = this.#image;
    const named = file.name === imageFile.name ? new File([file], `mask-${file.name}`, { type: file.type }) : file; // code names both
    const mask = await this.#open("mask", named);
    if (!mask) return;
    const bytes = imageFile.size + file.size;
    const { max_bytes: maxBytes } = this.#callbacks.limits();
    let error = null;
    if (mask.width !== width || mask.height !== height) {
      error = `${file.name} has ${mask.width} × ${mask.height} pixels; a mask has those of the image, ${width} × ${height}.`;
    } else if (bytes > maxBytes) {
      error = `Image and mask have ${formatSize(bytes)}; at most ${formatSize(maxBytes)} are allowed together.`;
    }
    if (error === null) return this.#setMask(mask);
    this.#close(mask);
    this.#callbacks.onError("mask", error);
  }

  #setMask(mask) {
    this.#close(this.#mask);
    this.#mask = mask;
    this.#show();
    this.#callbacks.onChange(false);
    const none = this.#callbacks.limits()?.needs_mask
      ? "There is no mask, which this model needs."
      : "There is no mask: the whole image is repainted.";
    this.#callbacks.announce(mask ? "Only what is white in the mask is repainted." : none);
    byId("mask-paint").focus();
  }

  #show() {
    const image = this.#image;
    if (image) byId("image-drop").hidden = true;
    hide(byId("image-chosen"), byId("image"));
    byId("image-chosen").hidden = !image;
    byId("image-drop").hidden = Boolean(image);
    if (!image) return;
    link(byId("image-name"), image);
    byId("image-size").textContent = `${image.width} × ${image.height} · ${formatSize(image.file.size)}`;
    byId("image-thumbnail").setAttribute(
      "aria-label",
      `The start image${this.#mask ? ", with the part that is repainted tinted" : ""}`,
    );
    drawThumbnail(byId("image-thumbnail"), image, this.#mask);
    byId("mask-facts").hidden = byId("mask-remove").hidden = !this.#mask;
    if (this.#mask) link(byId("mask-name"), this.#mask);
    byId("mask-paint").textContent = !this.#mask
      ? "Paint a mask"
      : isPainted(this.#mask.file)
        ? "Paint on"
        : "Paint instead";
  }
}

function link(element, { file, url }) {
  Object.assign(element, { href: url, download: file.name, textContent: file.name });
}

/** Draw the image, tinted where it is repainted. */
function drawThumbnail(canvas, image, mask) {
  const scale = (THUMBNAIL_PX * 2) / Math.max(image.width, image.height);
  [canvas.width, canvas.height] = [image.width, image.height].map((side) => Math.max(1, Math.round(side * scale)));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (mask) {
    context.drawImage(mask.image, 0, 0, canvas.width, canvas.height);
    const tint = context.getImageData(0, 0, canvas.width, canvas.height);
    for (let k = 0; k < tint.data.length; k += 4) {
      const [red, green, blue, alpha] = tint.data.slice(k, k + 4);
      const grey = ((0.299 * red + 0.587 * green + 0.114 * blue) * alpha) / 255;
      tint.data[k + 3] = grey >= 128 ? 166 : 0;
    }
    context.putImageData(tint, 0, 0);
    context.globalCompositeOperation = "source-in";
    context.fillStyle = stripes(context);
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "destination-over";
  }
  context.drawImage(image.image, 0, 0, canvas.width, canvas.height);
}
