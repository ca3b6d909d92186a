// Server-sent events over fetch: unlike EventSource it can POST, send an API key, and say why it failed.

const KEY = "noria-key";

/** The API key that this tab was given, or "". */
export const savedKey = () => sessionStorage.getItem(KEY) ?? "";

/** Remember `key` until this tab is closed. */
export const saveKey = (key) => sessionStorage.setItem(KEY, key.trim());

/** fetch with the saved key. */
export function call(path, { headers = {}, ...options } = {}) {
  const key = savedKey();
  const authorization = { "x-requested-with": "fetch" }; // else a 401 has the browser ask for a password, before the page can
  if (key) authorization.authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers: { ...authorization, ...headers } });
}

/** A refusal of the server, as docs/errors.md has it; status 0: it cannot be reached. */
export class Refused extends Error {
  constructor(status, { code, message, param = null, request_id = null }) {
    super(message);
    Object.assign(this, { status, code, param, requestId: request_id });
  }
}

/** The refusal that `response` is. */
export async function refusal(response) {
  const body = await response.json().catch(() => null);
  const error = body?.error ?? { code: "unknown", message: `the server answered ${response.status}.` };
  return new Refused(response.status, error);
}

/** Yield `{name, data}` of each event of `response`; comments are passed over. Ends with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (pending + value).split("\n\n");
      pending = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { name, data: JSON.parse(data.join("\n")) } : null;
}
