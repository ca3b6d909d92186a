// The timings of a generation as a bar.

import { make, stageBar } from "../shared/dom.js";
import { formatDuration } from "../shared/format.js";

// In the order in which they follow: [field of `timings`, name, CSS class, meaning].
const STAGES = [
  ["queue_s", "queue", "queue", "waiting to join the running batch"],
  ["image_encode_s", "image encode", "image-encode", "the start image becomes latents"],
  ["text_encode_s", "text encode", "text-encode", "the text encoder reads the prompt"],
  ["denoise_s", "denoise", "denoise", "the steps"],
  ["decode_s", "decode", "decode", "latents to pixels"],
  ["postprocess_s", "postprocess", "postprocess", "pixels to a file"],
];

/** The timings of a response of POST /t2i: a bar of its stages, their durations, and the prediction. */
export function timingBar({ timings, mean_batch: meanBatch }) {
  const present = STAGES.filter(([key]) => key !== "image_encode_s" || timings[key] > 0); // without a start image there is none
  const stages = present.map(([key, name, className, meaning]) => [name, className, meaning, timings[key]]);
  const text = make("p", { class: "small muted number", text: describeTimings(timings, meanBatch) });
  return make("div", { class: "timing" }, ...stageBar(stages), text);
}

function describeTimings(timings, meanBatch) {
  const actual =
    timings.queue_s + timings.image_encode_s + timings.text_encode_s + timings.denoise_s + timings.decode_s;
  const errorPercent = timings.predicted_s > 0 ? Math.round((actual / timings.predicted_s - 1) * 100) : 0;
  const batchText =
    meanBatch > 1.05 ? `, in a batch of ${meanBatch.toFixed(1)} images on average` : ", alone in its batch";
  const sign = errorPercent > 0 ? "+" : errorPercent < 0 ? "−" : "±";
  const [total, predicted, took] = [timings.total_s, timings.predicted_s, actual].map(formatDuration);
  return `${total} in all${batchText}. Predicted without the file: ${predicted}; it took ${took} (${sign}${Math.abs(errorPercent)} %).`;
}
