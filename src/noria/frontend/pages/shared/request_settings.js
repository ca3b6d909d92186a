// The settings of a request by the names of POST /t2i: their JSON, their seeds and the sizes to choose from. Pure.
//
// A seed has up to 63 bits, and JavaScript's numbers hold 53: seeds are strings of digits here, and numbers in JSON.

/** The entries of `settings` without null and empty values; a prompt may be empty. */
export const nonEmptyEntries = (settings) =>
  Object.entries(settings).filter(
    ([name, value]) => name === "prompt" || (value !== null && value !== undefined && value !== ""),
  );

/** The body of POST /t2i. */
export function requestBody(settings) {
  const { seed = null, ...rest } = settings;
  const json = JSON.stringify(Object.fromEntries(nonEmptyEntries(rest)));
  if (seed === null) return json;
  const seedJson = /^-?\d+$/.test(seed) ? BigInt(seed) : JSON.stringify(seed); // the server's error says what is wrong with it
  return `${json.slice(0, -1)},"seed":${seedJson}}`;
}

/** Parse `json` with every seed in it as a string of all its digits. */
export const parseKeepingSeeds = (json) => JSON.parse(quoteSeeds(json));

// Strings are matched first, so that no text of a prompt is taken for a key; keys are followed by a colon.
const quoteSeeds = (json) =>
  json.replace(/("(?:[^"\\]|\\.)*")(\s*:\s*)?(-?\d+(?![\d.eE]))?/g, (all, text, colon, digits) =>
    text === '"seed"' && colon && digits ? `${text}${colon}"${digits}"` : all,
  );

/** The seed of image `index`, where image 0 has `seed`. */
export const imageSeed = (seed, index) => String(BigInt(seed) + BigInt(index));

/** What a share `calls` of the model's calls means. Counted as by the server: a start image leaves the first steps out. */
export function describeCalls({ calls, inference_steps: steps, strength, scheduler }) {
  const kept = Math.min(steps * (strength ?? 1), steps);
  const all = scheduler.startsWith("flow-") ? Math.ceil(kept) : Math.floor(kept);
  const made = Math.ceil(calls * all - 1e-6); // 0.55 · 20 is 11.000000000000002
  if (!(calls < 1 && made > 0))
    return "All calls are made. With 0.5 it takes half of the time, for nearly the same image.";
  return `${made} of ${all} calls: ${all - made} are skipped, and the image is nearly the same.`;
}

/** Sizes to choose from: about the default's area in several shapes, within the bounds of `width` and `height`. */
export function sizePresets({ width, height }) {
  const area = width.default * height.default;
  const shapes = [
    ["Default", width.default / height.default],
    ["Square", 1],
    ["Landscape", 3 / 2],
    ["Portrait", 2 / 3],
    ["Wide", 16 / 9],
  ];
  const sizes = shapes.map(([name, ratio]) => ({
    name,
    width: name === "Default" ? width.default : nearest(Math.sqrt(area * ratio), width),
    height: name === "Default" ? height.default : nearest(Math.sqrt(area / ratio), height),
  }));
  sizes.push({ name: "Largest", width: largest(width), height: largest(height) });
  const seen = new Set();
  return sizes.filter((size) => {
    const key = `${size.width}×${size.height}`;
    return !seen.has(key) && seen.add(key);
  });
}

const largest = ({ max, multiple }) => Math.floor(max / multiple) * multiple;

function nearest(side, bounds) {
  const smallest = Math.ceil(bounds.min / bounds.multiple) * bounds.multiple;
  return Math.min(Math.max(Math.round(side / bounds.multiple) * bounds.multiple, smallest), largest(bounds));
}
