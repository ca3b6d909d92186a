// Sample traffic for the live page: requests of images with mixed settings, or of texts with mixed lengths.

import { fetchWithKey, toApiError } from "../shared/api.js";

const MAX_CONCURRENT = 5; // browsers open six connections to a server, and the stream needs one; so some requests have several images
const STEPS = [20, 50, 12, 36, 8, 28, 44, 16];
const MAX_LORAS = 3; // different ones in the traffic
const NUM_IMAGES = [2, 1, 3, 1, 2];
const GUIDANCE = [3, 7.5, 1, 5];
const SCHEDULERS = ["euler", "dpm++2m-karras", "ddim", "unipc", "euler-a", "heun", "dpm++2m", "pndm"];
const PROMPTS = [
  "a red circle above a blue square",
  "a green star left of a yellow triangle",
  "a blue ring below a red cross",
  "a yellow square right of a purple circle",
];

/**
 * The body of request `k` for a model with `fields`, as in the OpenAPI document, LoRAs of these names and a start image; with a `mask`,
 * for a model for inpainting. Pure.
 */
export function sampleRequest(k, fields, loras = [], image = null, mask = null) {
  const served = fields.scheduler?.examples ?? [];
  const known = SCHEDULERS.filter((name) => served.includes(name));
  const { minimum = 1, maximum = 200 } = fields.inference_steps ?? {};
  const body = {
    prompt: PROMPTS[k % PROMPTS.length],
    inference_steps: Math.min(maximum, Math.max(minimum, STEPS[k % STEPS.length])),
    guidance_scale: GUIDANCE[k % GUIDANCE.length],
    n: NUM_IMAGES[k % NUM_IMAGES.length],
  };
  if (known.length) body.scheduler = known[k % known.length];
  const lora = loras[(k % (loras.length + 1)) - 1]; // every third request, say, has none
  if (lora) body.loras = [{ name: lora }];
  if (mask) Object.assign(body, { image, mask, strength: k % 2 ? 1 : 0.6 });
  else if (image && k % 5 === 2) Object.assign(body, { image, strength: 0.6 });
  if (k % 6 === 5) body.deadline_ms = 60_000;
  if (k % 4 === 3) Object.assign(body, smallerSide(fields.width, "width"));
  return body;
}

/** A side of about three quarters of the default, if the model supports one. */
function smallerSide({ default: defaultSide, minimum, multipleOf: multiple } = {}, name) {
  if (!defaultSide || !multiple) return {};
  const side = Math.floor((defaultSide * 0.75) / multiple) * multiple;
  return side >= minimum && side < defaultSide ? { [name]: side } : {};
}

/** The body of request `k` of texts: some texts, of a few words to many. Pure. */
export const sampleTexts = (k) => ({
  inputs: Array.from({ length: 1 + ((5 * k) % 8) }, (_, index) =>
    `${PROMPTS[index % PROMPTS.length]} `.repeat(1 + ((3 * k + 5 * index) % 7)).trim(),
  ),
});

/** Send all requests, of `texts` or of images; calls `onProgress({sent, generated, failed}, total)`. `signal` stops it and cancels the running requests, which are counted as sent only. */
export async function sendSampleTraffic(onProgress, signal, { texts }) {
  const { num, interval_ms, path, body } = texts ? TEXTS : await imageTraffic(signal);
  const counts = { sent: 0, generated: 0, failed: 0 };
  const report = () => onProgress(counts, num);
  const inFlight = new Set();
  for (let k = 0; k < num && !signal.aborted; k++) {
    const request = send(path, body(k), signal, counts).then(() => {
      inFlight.delete(request);
      report();
    });
    inFlight.add(request);
    counts.sent += 1;
    report();
    await sleep(interval_ms);
    if (inFlight.size >= MAX_CONCURRENT) await Promise.race(inFlight);
  }
  await Promise.all(inFlight);
}

const TEXTS = { num: 100, interval_ms: 30, path: "/", body: sampleTexts }; // so many at once that they share batches

async function imageTraffic(signal) {
  const [document, models] = await Promise.all([readJson("/openapi.json", signal), readJson("/v1/models", signal)]);
  const fields = document.components.schemas.ImageRequestBody.properties;
  const { noria } = models.data.find((model) => model.noria?.kind === "diffusion"); // the default model
  const loras = noria.loras.slice(0, MAX_LORAS);
  const [width, height] = [fields.width.default, fields.height.default];
  const image = noria.start_image && drawSample(width, height);
  const mask = noria.start_image?.needs_mask ? drawMask(width, height) : null;
  return { num: 20, interval_ms: 350, path: "/t2i", body: (k) => sampleRequest(k, fields, loras, image, mask) };
}

/** A disc above a square as a PNG file in base64. */
function drawSample(width, height) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  const side = Math.min(width, height) / 3;
  for (const [colour, ...box] of [
    ["#fff", 0, 0, width, height],
    ["#23c", (width - side) / 2, 0.55 * height, side, side],
  ]) {
    context.fillStyle = colour;
    context.fillRect(...box);
  }
  context.fillStyle = "#d22";
  context.beginPath();
  context.arc(width / 2, 0.28 * height, side / 2, 0, 2 * Math.PI);
  context.fill();
  return canvas.toDataURL("image/png");
}

/** A PNG file in base64 whose lower half is white, that is repainted. */
function drawMask(width, height) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.fillRect(0, 0, width, height);
  context.fillStyle = "#fff";
  context.fillRect(0, height / 2, width, height / 2);
  return canvas.toDataURL("image/png");
}

async function readJson(path, signal) {
  const response = await fetchWithKey(path, { signal });
  if (!response.ok) throw await toApiError(response);
  return response.json();
}

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function send(path, body, signal, counts) {
  const headers = { "content-type": "application/json" };
  try {
    const response = await fetchWithKey(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    await response.blob();
    counts[response.ok ? "generated" : "failed"] += 1;
    if (response.status === 429) await sleep(1000 * Number(response.headers.get("retry-after") ?? 1)); // as clients should
  } catch {
    if (!signal.aborted) counts.failed += 1; // the connection broke
  }
}
