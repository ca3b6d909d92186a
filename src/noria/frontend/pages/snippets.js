// A request as code that draws it again, for a terminal and for programs. Pure.
//
// A key is never written into them: it is read from NORIA_API_KEY, where the server asks for one.

import { bodyOf, given } from "./wish.js";

/** How a request is copied: each writes the code of `wish` for the server at `origin`; `keyed`: the server needs a key. */
export const SNIPPETS = { curl: command, openai: openaiProgram, Python: program };

function command(wish, origin, keyed) {
  const several = (wish.n ?? 1) > 1;
  const lines = [
    `curl -sS --fail-with-body ${inShell(`${origin}/t2i`)}`,
    "-H 'content-type: application/json'",
    ...(keyed ? ['-H "authorization: Bearer $NORIA_API_KEY"'] : []),
    `-d ${inShell(bodyOf(wish))}`,
    several ? "-o images.json" : `-o image.${wish.format ?? "png"}`,
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

function program(wish, origin, keyed) {
  return `import base64
import json
${keyed ? "import os\n" : ""}import urllib.request

wish = ${inPython(wish)}
headers = {"Content-Type": "application/json", "Accept": "application/json"${keyed ? bearer : ""}}
request = urllib.request.Request(${JSON.stringify(`${origin}/t2i`)}, json.dumps(wish).encode(), headers)
with urllib.request.urlopen(request) as answer:
    images = json.load(answer)["images"]
for image in images:
    with open(f"{image['seed']}.{image['format']}", "wb") as file:
        file.write(base64.b64decode(image["b64_json"]))
`;
}

const bearer = `, "Authorization": "Bearer " + os.environ["NORIA_API_KEY"]`;

const OPENAIS = new Set(["prompt", "model", "n", "size", "output_format"]);

function openaiProgram(wish, origin, keyed) {
  const { width, height, format, ...rest } = wish;
  const all = { ...rest, size: width && height ? `${width}x${height}` : null, output_format: format };
  const said = given(all);
  const standard = said.filter(([name]) => OPENAIS.has(name)).map(([name, value]) => `    ${name}=${literal(name, value)},\n`);
  const own = Object.fromEntries(said.filter(([name]) => !OPENAIS.has(name)));
  const extra = Object.keys(own).length ? `    extra_body=${inPython(own).replaceAll("\n", "\n    ")},\n` : "";
  return `import base64
${keyed ? "import os\n" : ""}
import openai

client = openai.OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=${keyed ? 'os.environ["NORIA_API_KEY"]' : '"unused"'})
answer = client.images.generate(
${standard.join("")}${extra})
for image in answer.data:
    with open(f"{image.seed}.${format ?? "png"}", "wb") as file:
        file.write(base64.b64decode(image.b64_json))
`;
}

// Between single quotes a POSIX shell reads everything as it stands, but for a single quote.
const inShell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A dictionary; JSON's strings and numbers are Python's too. */
function inPython(settings) {
  const lines = given(settings).map(([name, value]) => `    ${JSON.stringify(name)}: ${literal(name, value)},\n`);
  return `{\n${lines.join("")}}`;
}

const literal = (name, value) => (name === "seed" ? value : JSON.stringify(value));
