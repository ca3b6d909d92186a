// A request as code that generates the same image: a command and programs. Pure.
//
// They contain no API key: if the server needs one, they read it from NORIA_API_KEY. Of images, which are files in the settings, they
// have the names, and read them from the folder in which they run.

import { nonEmptyEntries, requestBody } from "./request_settings.js";

/** Functions (settings, origin, needsKey) → code for the server at `origin`, by name. */
export const SNIPPETS = { curl: curlCommand, openai: openaiProgram, Python: pythonProgram };

/**
 * Those of SNIPPETS that can send `settings`. openai's client cannot send images of ControlNets beside a start image; of a start image with
 * a mask it makes a reference, too, if the model `takesReferences`.
 */
export function snippetsFor({ image, mask, controls }, takesReferences) {
  const { openai: _, ...others } = SNIPPETS;
  return (image && controls) || (mask && takesReferences) ? others : SNIPPETS;
}

/** The files that a request to a model needs beside a prompt, as settings; `noria` is of GET /v1/models. */
export const filesNeededBy = (noria) =>
  noria?.start_image?.needs_mask ? { image: { name: "image.png" }, mask: { name: "mask.png" } } : {};

/** Functions (origin, needsKey) → code, by name, for texts: `body` is what POST `path` takes. */
export function textSnippets(path, body) {
  const snippets = {
    curl: (origin, needsKey) => curl(`${origin}${path}`, `-d ${shellQuote(JSON.stringify(body))}`, needsKey),
    Python: (origin, needsKey) => pythonTextProgram(`${origin}${path}`, body, needsKey),
  };
  return path === "/embed"
    ? { ...snippets, openai: (origin, needsKey) => openaiTextProgram(body, origin, needsKey) }
    : snippets;
}

function curlCommand(settings, origin, needsKey) {
  const { image, mask, controls, reference_images: references } = settings;
  const several = (settings.n ?? 1) > 1;
  const extension = settings.format ?? "png";
  const files = [image, mask, ...(controls ?? []).map((each) => each.image), ...(references ?? [])].filter(Boolean);
  const name = files.some((file) => file.name === `image.${extension}`) ? "result" : "image";
  const output = several ? "-o images.json" : `-o ${name}.${extension}`;
  const mark = (file) => file && `\u0000${files.indexOf(file)}\u0000`; // what the shell reads goes there; no field has such a text
  const ofControls = controls?.map((each) => ({ ...each, image: mark(each.image) }));
  const marked = {
    ...settings,
    image: mark(image),
    mask: mark(mask),
    controls: ofControls,
    reference_images: references?.map(mark),
  };
  const json = requestBody(marked);
  if (!files.length) return curl(`${origin}/t2i`, `-d ${shellQuote(json)}`, needsKey, output);
  // A file is longer than a shell's arguments may be: a here-document, in which the shell reads the files.
  const read = (_, index) => `$(base64 < ${shellQuote(files[index].name)} | tr -d '\\n')`;
  const document = json.replace(/[\\$`]/g, "\\$&").replace(/\\\\u0000(\d+)\\\\u0000/g, read);
  return `${curl(`${origin}/t2i`, "-d @-", needsKey, `${output} <<EOF`)}${document}\nEOF\n`;
}

function curl(url, data, needsKey, output = null) {
  const lines = [
    `curl -sS --fail-with-body ${shellQuote(url)}`,
    "-H 'content-type: application/json'",
    ...(needsKey ? ['-H "authorization: Bearer $NORIA_API_KEY"'] : []),
    data,
    ...(output ? [output] : []),
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

function pythonProgram(
  { image = null, mask = null, controls = null, reference_images: references = null, ...rest },
  origin,
  needsKey,
) {
  const settings = {
    ...rest,
    controls: controls?.map(({ image: _, ...others }) => others),
    reference_images: references?.map(() => ""),
  };
  const files = Object.entries({ image, mask }).map(([field, file]) => [`["${field}"]`, file]);
  files.push(...(controls ?? []).map((each, index) => [`["controls"][${index}]["image"]`, each.image]));
  files.push(...(references ?? []).map((file, index) => [`["reference_images"][${index}]`, file]));
  const reads = files.map(([place, file]) =>
    file
      ? `with open(${JSON.stringify(file.name)}, "rb") as file:\n    settings${place} = base64.b64encode(file.read()).decode()\n`
      : "",
  );
  return `import base64
import json
${needsKey ? "import os\n" : ""}import urllib.request

settings = ${pythonDict(settings)}
${reads.join("")}headers = {"Content-Type": "application/json", "Accept": "application/json"${needsKey ? bearer : ""}}
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
  const { width, height, format, image = null, mask = null, reference_images: references = null, ...rest } = settings;
  const images = [image, ...(references ?? [])]
    .filter(Boolean)
    .map(({ name }) => `open(${JSON.stringify(name)}, "rb")`);
  for (const name of ["loras", "refiner"]) if (images.length && rest[name]) rest[name] = JSON.stringify(rest[name]); // a form has texts
  const entries = nonEmptyEntries({
    ...rest,
    size: width && height ? `${width}x${height}` : null,
    output_format: format,
  });
  const openaiArguments = entries
    .filter(([name]) => OPENAI_FIELDS.has(name))
    .map(([name, value]) => `    ${name}=${literal(name, value)},\n`);
  const noriaFields = Object.fromEntries(entries.filter(([name]) => !OPENAI_FIELDS.has(name)));
  const extra = Object.keys(noriaFields).length
    ? `    extra_body=${pythonDict(noriaFields).replaceAll("\n", "\n    ")},\n`
    : "";
  return `import base64
${mask ? "import io\n" : ""}${needsKey ? "import os\n" : ""}
import openai
${mask ? "from PIL import Image\n" : ""}
${openaiClient(origin, needsKey)}
${mask ? openaiMask(mask) : ""}response = client.images.${images.length ? "edit" : "generate"}(
${images.length ? `    image=${images.length > 1 ? `[${images.join(", ")}]` : images[0]},\n` : ""}${mask ? '    mask=("mask.png", mask_file.getvalue(), "image/png"),\n' : ""}${openaiArguments.join("")}${extra})
for image in response.data:
    with open(f"{image.seed}.${format ?? "png"}", "wb") as file:
        file.write(base64.b64decode(image.b64_json))
`;
}

// In masks of OpenAI's API, what is transparent is repainted.
const openaiMask = ({ name }) => `mask = Image.open(${JSON.stringify(name)}).convert("L")
mask.putalpha(mask.point(lambda grey: 0 if grey >= 128 else 255))  # here, what is transparent is repainted
mask_file = io.BytesIO()
mask.save(mask_file, "png")
`;

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
  const lines = nonEmptyEntries(settings).map(
    ([name, value]) => `    ${JSON.stringify(name)}: ${literal(name, value)},\n`,
  );
  return `{\n${lines.join("")}}`;
}

function literal(name, value) {
  if (name === "seed") return value;
  if (name !== "controls") return JSON.stringify(value);
  const controls = value.map(({ image, ...rest }) => {
    const json = JSON.stringify(rest);
    return image
      ? `${json.slice(0, -1)},"image":base64.b64encode(open(${JSON.stringify(image.name)}, "rb").read()).decode()}`
      : json;
  });
  return `[${controls.join(", ")}]`;
}
