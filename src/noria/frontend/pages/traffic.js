// Sample traffic: requests of mixed shapes, for whoever wants to see the wheel at work.

import { call, refusal } from "./events.js";

const NUM_REQUESTS = 20;
const MOST_AT_ONCE = 5; // browsers open six connections to a server, and the stream needs one; so some ask for several images
const APART_MS = 350;
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

/** The body of request `k` for a model whose fields, of the OpenAPI document, are `fields`. Pure. */
export function sample(k, fields) {
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
  if (k % 4 === 3) Object.assign(body, smaller(fields.width, "width"));
  return body;
}

/** A side that is about three quarters of the usual, where the model can draw that. */
function smaller({ default: usual, minimum, multipleOf: multiple } = {}, name) {
  if (!usual || !multiple) return {};
  const side = Math.floor((usual * 0.75) / multiple) * multiple;
  return side >= minimum && side < usual ? { [name]: side } : {};
}

/** Send them all; `say` is told how far that is. `signal` ends it, and takes the images off the wheel. */
export async function sendSamples(say, signal) {
  const response = await call("/openapi.json", { signal });
  if (!response.ok) throw await refusal(response);
  const fields = (await response.json()).components.schemas.ImageBody.properties;
  const count = { sent: 0, drawn: 0, failed: 0 };
  const told = () => say(count, NUM_REQUESTS);
  const drawing = new Set();
  for (let k = 0; k < NUM_REQUESTS && !signal.aborted; k++) {
    const answer = draw(sample(k, fields), signal, count).then(() => (drawing.delete(answer), told()));
    drawing.add(answer);
    count.sent += 1;
    told();
    await pause(APART_MS);
    if (drawing.size >= MOST_AT_ONCE) await Promise.race(drawing);
  }
  await Promise.all(drawing);
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function draw(body, signal, count) {
  const headers = { "content-type": "application/json" };
  try {
    const response = await call("/t2i", { method: "POST", headers, body: JSON.stringify(body), signal });
    await response.blob();
    count[response.ok ? "drawn" : "failed"] += 1;
    if (response.status === 429) await pause(1000 * Number(response.headers.get("retry-after") ?? 1)); // as a client should
  } catch {
    count.failed += 1; // stopped, or the connection broke
  }
}
