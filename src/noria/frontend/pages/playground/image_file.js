// Image files for requests: checked and decoded here before they are sent, because an upload takes time. The server checks them again.

import { formatSize } from "../shared/format.js";

const SIGNATURES = [/^\x89PNG\r\n\x1a\n/, /^\xff\xd8\xff/, /^RIFF.{4}WEBP/s]; // of PNG, JPEG and WebP, as Latin-1

/**
 * Decode `file`; returns {file, image, url, width, height}, where `image` is an element and `url` one of the page, to be revoked.
 * `limits`: `start_image` of a model in GET /v1/models. Throws an Error that says why the file cannot be sent.
 */
export async function openImageFile(file, limits) {
  const { name, size } = file;
  if (size > limits.max_bytes)
    throw new Error(`${name} has ${formatSize(size)}; at most ${formatSize(limits.max_bytes)} are allowed.`);
  const head = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  if (!SIGNATURES.some((signature) => signature.test(head))) throw new Error(`${name} is no PNG, WebP or JPEG file.`);
  const url = URL.createObjectURL(file);
  const image = new Image();
  image.src = url;
  try {
    await image.decode().catch(() => {
      throw new Error(`${name} cannot be decoded: it is damaged, or not an image.`);
    });
    const { naturalWidth: width, naturalHeight: height } = image;
    if (width * height > limits.max_pixels || Math.max(width, height) > limits.max_side_px) {
      const allowed = `${limits.max_pixels / 1e6} megapixels and ${limits.max_side_px} pixels a side`;
      throw new Error(`${name} has ${width} × ${height} pixels; at most ${allowed} are allowed.`);
    }
    return { file, image, url, width, height };
  } catch (error) {
    URL.revokeObjectURL(url);
    throw error;
  }
}

/** `file` as a data: URL in base64, as POST /t2i takes it. */
export function toDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read any more: choose it again.`)));
    reader.readAsDataURL(file);
  });
}

/**
 * Listen for files that are dropped or pasted. `zones`: [element, onFiles(files, target)] each; files go to the zone that they are
 * dropped on, and to the first one that is not hidden from everywhere else.
 */
export function listenForFiles(zones) {
  const firstZone = () => zones.find(([element]) => !element.hidden);
  const zoneAt = (target) => zones.find(([element]) => element.contains(target)) ?? firstZone();
  const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  const mark = (marked) => zones.forEach(([element]) => element.classList.toggle("drag-over", element === marked));
  for (const name of ["dragenter", "dragover"]) {
    window.addEventListener(name, (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(zoneAt(event.target)[0]);
    });
  }
  window.addEventListener("dragleave", ({ relatedTarget }) => relatedTarget === null && mark(null));
  window.addEventListener("drop", (event) => {
    mark(null);
    if (!hasFiles(event)) return;
    event.preventDefault();
    zoneAt(event.target)[1]([...event.dataTransfer.files], event.target);
  });
  window.addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    if (!files.length || types.includes("text/plain")) return; // a text that brings a picture of itself along is a text
    event.preventDefault();
    firstZone()[1]([...files]);
  });
}

/** Make the button `choose` open the hidden `input` for files; calls `onFiles(files)`. */
export function listenForChoice(choose, input, onFiles) {
  choose.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    if (input.files.length) onFiles([...input.files]);
    input.value = ""; // the same file can be chosen again
  });
}
