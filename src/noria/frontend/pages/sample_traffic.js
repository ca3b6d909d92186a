// Sample traffic for the live page: requests with mixed settings.

import { fetchWithKey, toApiError } from "./api.js";

const NUM_REQUESTS = 20;
const MAX_CONCURRENT = 5; // browsers open six connections to a server, and the stream needs one; so some requests have several images
const INTERVAL_MS = 350;
const STEPS = [20, 50, 12, 36, 8, 28, 44, 16];
const NUM_IMAGES = [2, 1, 3, 1, 2];
const GUIDANCE = [3, 7.5, 1, 5];
const SCHEDULERS = ["euler", "dpm++2m-karras", "ddim", "unipc", "euler-a", "heun", "dpm++2m", "pndm"];
const PROMPTS = [
  "a red circle above a blue square",
  "a green star left of a yellow triangle",
  "a blue ring below a red cross",
  "a yellow square right of a purple circle",
];

/** The body of request `k` for a model with `fields`, as in the OpenAPI document. Pure. */
export function sampleRequest(k, fields) {
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

/** Send all requests; calls `onProgress({sent, generated, failed}, total)`. `signal` stops it and cancels the running requests. */
export async function sendSampleTraffic(onProgress, signal) {
  const response = await fetchWithKey("/openapi.json", { signal });
  if (!response.ok) throw await toApiError(response);
  const fields = (await response.json()).components.schemas.ImageRequestBody.properties;
  const counts = { sent: 0, generated: 0, failed: 0 };
  const report = () => onProgress(counts, NUM_REQUESTS);
  const inFlight = new Set();
  for (let k = 0; k < NUM_REQUESTS && !signal.aborted; k++) {
    const request = generate(sampleRequest(k, fields), signal, counts).then(() => (inFlight.delete(request), report()));
    inFlight.add(request);
    counts.sent += 1;
    report();
    await sleep(INTERVAL_MS);
    if (inFlight.size >= MAX_CONCURRENT) await Promise.race(inFlight);
  }
  await Promise.all(inFlight);
}

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function generate(body, signal, counts) {
  const headers = { "content-type": "application/json" };
  try {
    const response = await fetchWithKey("/t2i", { method: "POST", headers, body: JSON.stringify(body), signal });
    await response.blob();
    counts[response.ok ? "generated" : "failed"] += 1;
    if (response.status === 429) await sleep(1000 * Number(response.headers.get("retry-after") ?? 1)); // as clients should
  } catch {
    counts.failed += 1; // stopped, or the connection broke
  }
}
