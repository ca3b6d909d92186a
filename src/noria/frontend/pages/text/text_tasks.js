// What the page /text does for each task of a text encoder: its words, its request and an example. Pure.
//
// A task: {name, verb, path, body({model, query, texts}), example, query?}. `query` is the example of a query, where a task has one.

export const TASKS = {
  embedding: {
    name: "embeddings",
    verb: "Compare",
    path: "/embed",
    body: ({ model, texts }) => ({ inputs: texts, model }),
    example: [
      "a cat sleeps on the sofa",
      "a kitten naps on the couch",
      "when does the train to Paris leave?",
      "the next departure to Paris is at nine",
    ],
  },
  sparse_embedding: {
    name: "sparse embeddings",
    verb: "Encode",
    path: "/embed_sparse",
    body: ({ model, texts }) => ({ inputs: texts, model }),
    example: ["a cat sleeps on the sofa", "when does the train to Paris leave?"],
  },
  token_embedding: {
    name: "vectors of tokens",
    verb: "Rank",
    path: "/rerank",
    body: ({ model, query, texts }) => ({ query, texts, model }),
    query: "which fruit is red?",
    example: ["ripe strawberries", "a red circle above a blue square", "bananas are yellow", "the train to Paris"],
  },
  classification: {
    name: "classification",
    verb: "Classify",
    path: "/predict",
    body: ({ model, texts }) => ({ inputs: texts.map((text) => [text]), model }),
    example: ["what a lovely day", "the parcel arrived broken again", "the meeting is at three"],
  },
  token_classification: {
    name: "classification of tokens",
    verb: "Label",
    path: "/",
    body: ({ model, texts }) => ({ inputs: texts, model }),
    example: ["My name is Sarah and I live in London.", "Ada Lovelace wrote to Charles Babbage in 1843."],
  },
  reranking: {
    name: "reranking",
    verb: "Rank",
    path: "/rerank",
    body: ({ model, query, texts }) => ({ query, texts, model }),
    query: "which fruit is red?",
    example: ["ripe strawberries", "a red circle above a blue square", "bananas are yellow", "the train to Paris"],
  },
};

/** The texts in the lines of `value`. */
export const splitLines = (value) =>
  value
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);

/** The cosine of two embeddings; 0 if one is zero. */
export function cosine(a, b) {
  const dot = (x, y) => x.reduce((sum, value, index) => sum + value * y[index], 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b)) || 0;
}

/** The seconds of each stage in a header Server-Timing. */
export const parseServerTiming = (header) =>
  Object.fromEntries(
    [...(header ?? "").matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms) / 1000]),
  );

/** `text` as parts [text, entity or null] in order; entities count in characters, not in UTF-16 units. */
export function splitAtEntities(text, entities) {
  const characters = Array.from(text);
  const parts = [];
  let at = 0;
  for (const entity of entities) {
    parts.push(
      [characters.slice(at, entity.start).join(""), null],
      [characters.slice(entity.start, entity.end).join(""), entity],
    );
    at = entity.end;
  }
  return [...parts, [characters.slice(at).join(""), null]].filter(([part]) => part);
}

/** How many of `tokens`, a text's from POST /tokenize, come before the place where a model cuts off the rest. */
export function numKept(tokens, maxLength) {
  const room = maxLength - tokens.filter(({ special }) => special).length;
  const own = tokens.flatMap(({ special }, index) => (special ? [] : [index]));
  return own.length > room ? own[Math.max(room, 0)] : tokens.length;
}
