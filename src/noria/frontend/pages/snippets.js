// A request as code that generates the same image: a command and programs. Pure.
//
// They contain no API key: if the server needs one, they read it from NORIA_API_KEY.

import { nonEmptyEntries, requestBody } from "./request_settings.js";

/** Functions (settings, origin, needsKey) → code for the server at `origin`, by name. */
export const SNIPPETS = { curl: curlCommand, openai: openaiProgram, Python: pythonProgram };

/** Functions (origin, needsKey) → code, by name, for texts: `body` is what POST `path` takes. */
export function textSnippets(path, body) {
  const snippets = {
    curl: (origin, needsKey) => curl(`${origin}${path}`, JSON.stringify(body), needsKey),
    Python: (origin, needsKey) => pythonTextProgram(`${origin}${path}`, body, needsKey),
  };
  return path === "/embed" ? { ...snippets, openai: (origin, needsKey) => openaiTextProgram(body, origin, needsKey) } : snippets;
}

function curlCommand(settings, origin, needsKey) {
  const several = (settings.n ?? 1) > 1;
  const output = several ? "-o images.json" : `-o image.${settings.format ?? "png"}`;
  return curl(`${origin}/t2i`, requestBody(settings), needsKey, output);
}

function curl(url, json, needsKey, output = null) {
  const lines = [
    `curl -sS --fail-with-body ${shellQuote(url)}`,
    "-H 'content-type: application/json'",
    ...(needsKey ? ['-H "authorization: Bearer $NORIA_API_KEY"'] : []),
    `-d ${shellQuote(json)}`,
    ...(output ? [output] : []),
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

function pythonProgram(settings, origin, needsKey) {
  return `import base64
import json
${needsKey ? "import os\n" : ""}import urllib.request

settings = ${pythonDict(settings)}
headers = {"Content-Type": "application/json", "Accept": "application/json"${needsKey ? bearer : ""}}
request = urllib.request.Request(${JSON.stringify(`${origin}/t2i`)}, json.dumps(settings).encode(), headers)
with urllib.request.urlopen(request) as response:
    images = json.load(response)["images"]
for image in images:
    with open(f"{image['seed']}.{image['format']}", "wb") as file:
        file.write(base64.b64decode(image["b64_json"]))
`;
}

const bearer = `, "Authorization": "Bearer " + os.environ["NORIA_API_KEY"]`;

const OPENAI_FIELDS = new Set(["prompt", "model", "n", "size", "output_format"]);

function openaiProgram(settings, origin, needsKey) {
  const { width, height, format, ...rest } = settings;
  const entries = nonEmptyEntries({ ...rest, size: width && height ? `${width}x${height}` : null, output_format: format });
  const openaiArguments = entries.filter(([name]) => OPENAI_FIELDS.has(name)).map(([name, value]) => `    ${name}=${literal(name, value)},\n`);
  const noriaFields = Object.fromEntries(entries.filter(([name]) => !OPENAI_FIELDS.has(name)));
  const extra = Object.keys(noriaFields).length ? `    extra_body=${pythonDict(noriaFields).replaceAll("\n", "\n    ")},\n` : "";
  return `import base64
${needsKey ? "import os\n" : ""}
import openai

${openaiClient(origin, needsKey)}
response = client.images.generate(
${openaiArguments.join("")}${extra})
for image in response.data:
    with open(f"{image.seed}.${format ?? "png"}", "wb") as file:
        file.write(base64.b64decode(image.b64_json))
`;
}

const openaiClient = (origin, needsKey) =>
  `client = openai.OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=${needsKey ? 'os.environ["NORIA_API_KEY"]' : '"unused"'})`;

function pythonTextProgram(url, body, needsKey) {
  return `import json
${needsKey ? "import os\n" : ""}import urllib.request

body = ${JSON.stringify(body, null, 4)}
headers = {"Content-Type": "application/json"${needsKey ? bearer : ""}}
request = urllib.request.Request(${JSON.stringify(url)}, json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as response:
    print(json.load(response))
`;
}

function openaiTextProgram({ inputs, model }, origin, needsKey) {
  return `${needsKey ? "import os\n\n" : ""}import openai

${openaiClient(origin, needsKey)}
response = client.embeddings.create(model=${JSON.stringify(model)}, input=${JSON.stringify(inputs, null, 4)})
for each in response.data:
    print(each.index, each.embedding)
`;
}

// Between single quotes, a POSIX shell takes everything literally but a single quote.
const shellQuote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A dictionary; JSON's strings and numbers are valid in Python, too. */
function pythonDict(settings) {
  const lines = nonEmptyEntries(settings).map(([name, value]) => `    ${JSON.stringify(name)}: ${literal(name, value)},\n`);
  return `{\n${lines.join("")}}`;
}

const literal = (name, value) => (name === "seed" ? value : JSON.stringify(value));
