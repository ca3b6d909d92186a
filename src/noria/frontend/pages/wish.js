// A wish: the settings of one request, by the names of POST /t2i, and how they travel. Pure.
//
// A seed has up to 63 bits, and JavaScript's numbers hold 53: seeds are strings of digits here, and plain numbers in JSON.

/** What is said in `settings`, as pairs: all but what is null or empty; a prompt may be empty. */
export const given = (settings) =>
  Object.entries(settings).filter(([name, value]) => name === "prompt" || (value !== null && value !== undefined && value !== ""));

/** The body of POST /t2i. */
export function bodyOf(wish) {
  const { seed = null, ...rest } = wish;
  const json = JSON.stringify(Object.fromEntries(given(rest)));
  if (seed === null) return json;
  const written = /^-?\d+$/.test(seed) ? BigInt(seed) : JSON.stringify(seed); // the server says what is wrong with it
  return `${json.slice(0, -1)},"seed":${written}}`;
}

/** What `json` says, with every seed in it as a string of all its digits. */
export const parseExactly = (json) => JSON.parse(quotedSeeds(json));

// Strings are matched first, so that no text of a prompt is taken for a key; those that are keys end before a colon.
const quotedSeeds = (json) =>
  json.replace(/("(?:[^"\\]|\\.)*")(\s*:\s*)?(-?\d+(?![\d.eE]))?/g, (all, text, colon, digits) =>
    text === '"seed"' && colon && digits ? `${text}${colon}"${digits}"` : all,
  );

/** The seed of image `index`, where image 0 has `seed`. */
export const seedOf = (seed, index) => String(BigInt(seed) + BigInt(index));
