// Where a request's time went: a bar of its stages, their numbers, and what had been predicted.

import { make } from "./elements.js";

// In the order in which they are spent.
const STAGES = [
  ["queue_s", "queue", "waiting for a place in the batch"],
  ["encode_s", "encode", "the prompt, read by the text encoder"],
  ["denoise_s", "denoise", "the steps"],
  ["decode_s", "decode", "latents to pixels"],
  ["postprocess_s", "postprocess", "pixels to a file"],
];

/** Seconds as people read them. */
export function seconds(value) {
  if (value < 0.0995) return `${Math.max(value * 1000, 0).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 9.95 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

/** The figure for `timings` and `mean_batch` of an answer of POST /t2i. */
export function timingBar({ timings, mean_batch: meanBatch }) {
  const bar = make("div", { class: "bar", ariaHidden: "true" });
  const numbers = make("dl", { class: "stages" });
  for (const [key, name, meaning] of STAGES) {
    const part = make("span", { class: `stage ${name}` });
    part.style.flexGrow = Math.max(timings[key], 0);
    bar.append(part);
    numbers.append(
      make("div", { title: meaning }, make("dt", { class: `stage ${name}`, text: name }), make("dd", { class: "number", text: seconds(timings[key]) })),
    );
  }
  return make("div", { class: "timing" }, bar, numbers, make("p", { class: "small muted number", text: inWords(timings, meanBatch) }));
}

function inWords(timings, meanBatch) {
  const actual = timings.queue_s + timings.encode_s + timings.denoise_s + timings.decode_s;
  const off = timings.predicted_s > 0 ? Math.round((actual / timings.predicted_s - 1) * 100) : 0;
  const company = meanBatch > 1.05 ? `, in a batch of ${meanBatch.toFixed(1)} images on average` : ", alone in its batch";
  const sign = off > 0 ? "+" : off < 0 ? "−" : "±";
  return `${seconds(timings.total_s)} in all${company}. Predicted without the file: ${seconds(timings.predicted_s)}; it took ${seconds(actual)} (${sign}${Math.abs(off)} %).`;
}
