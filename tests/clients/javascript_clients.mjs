// Calls a server by other people's unmodified clients: `node javascript_clients.mjs URL`, beside their node_modules.
// Prints a JSON object: for each call "ok", or what it threw.
import assert from "node:assert/strict";

import { InferenceClient } from "@huggingface/inference";
import { OpenAIEmbeddings } from "@langchain/openai";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, embedMany, experimental_generateImage as generateImage } from "ai";
import OpenAI, { toFile } from "openai";

const url = process.argv[2];
const texts = ["a red circle", "größe"];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const sdks = {
  openai: createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }),
  compatible: createOpenAICompatible({ baseURL: `${url}/v1`, name: "noria", apiKey: "none" }),
};
const huggingFace = (path = "") => new InferenceClient("none").endpoint(url + path);

const answer = await fetch(`${url}/v1/embeddings`, {
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify({ input: texts }),
});
const expected = (await answer.json()).data.map((each) => each.embedding);

function same(rows) {
  assert.equal(rows.length, texts.length);
  rows.forEach((row, k) => row.forEach((number, i) => assert.ok(Math.abs(number - expected[k][i]) < 1e-5)));
}

function isPng(base64) {
  assert.equal(Buffer.from(base64, "base64").subarray(1, 4).toString(), "PNG");
}

const request = { prompt: "a red circle", size: "64x64", inference_steps: 2 };

const calls = {
  "openai: images": async () => isPng((await openai.images.generate(request)).data[0].b64_json),
  "openai: stream of an image": async () => {
    const types = [];
    const stream = await openai.images.generate({ ...request, stream: true, partial_images: 1 });
    for await (const event of stream) types.push(event.type);
    assert.equal(types.at(-1), "image_generation.completed");
  },
  "openai: edit": async () => {
    const made = (await openai.images.generate(request)).data[0].b64_json;
    const image = await toFile(Buffer.from(made, "base64"), "a.png", { type: "image/png" });
    isPng((await openai.images.edit({ image, prompt: "a blue circle", inference_steps: 4 })).data[0].b64_json);
  },
  "openai: models": async () => {
    const names = [];
    for await (const model of openai.models.list()) names.push(model.id);
    assert.ok(names.includes("minilm"));
  },
  "openai: embeddings": async () => {
    const { data } = await openai.embeddings.create({ model: "minilm", input: texts });
    same(data.map((each) => each.embedding));
  },
  "ai: embeddings of openai-compatible": async () =>
    same((await embedMany({ model: sdks.compatible.textEmbeddingModel("minilm"), values: texts })).embeddings),
  "ai: embeddings of openai": async () =>
    same((await embedMany({ model: sdks.openai.embedding("minilm"), values: texts })).embeddings),
  "ai: one embedding": async () => {
    const { embedding } = await embed({ model: sdks.openai.embedding("minilm"), value: texts[0] });
    same([embedding, expected[1]]);
  },
  "ai: image of openai-compatible": async () =>
    isPng((await generateImage({ model: sdks.compatible.imageModel("noria"), prompt: "a", size: "64x64" })).image.base64),
  "ai: image of openai": async () =>
    isPng((await generateImage({ model: sdks.openai.image("noria"), prompt: "a", size: "64x64" })).image.base64),
  "huggingface: features": async () => same(await huggingFace().featureExtraction({ inputs: texts })),
  "huggingface: similarity": async () => {
    const inputs = { source_sentence: "a cat", sentences: ["a dog", "blue"] };
    assert.equal((await huggingFace().sentenceSimilarity({ inputs })).length, 2);
  },
  "huggingface: classification": async () =>
    assert.equal((await huggingFace("/predict").textClassification({ inputs: "what a lovely day" })).length, 2),
  "huggingface: classification with parameters": async () => {
    const body = { inputs: "what a lovely day", parameters: { top_k: 1 } };
    assert.equal((await huggingFace("/predict").textClassification(body)).length, 1);
  },
  "langchain: embeddings": async () => {
    const options = { model: "minilm", apiKey: "none", configuration: { baseURL: `${url}/v1` } };
    same(await new OpenAIEmbeddings(options).embedDocuments(texts));
  },
};

const outcomes = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    await call();
    outcomes[name] = "ok";
  } catch (error) {
    outcomes[name] = `${error.stack} ${JSON.stringify(error.responseBody ?? error.httpResponse?.body ?? "")}`;
  }
}
console.log(JSON.stringify(outcomes));
