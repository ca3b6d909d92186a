// Requests to the server with the saved API key, its errors, and server-sent events over fetch: unlike EventSource, fetch can POST,
// send a key and read the error of a failed request.

const STORAGE_KEY = "noria-key";

/** The URL of the server, where this page is: below a path, if a proxy serves it there. */
export const serverUrl = new URL(".", document.baseURI).href.slice(0, -1);

/** The API key saved in this tab, or "". */
export const savedKey = () => sessionStorage.getItem(STORAGE_KEY) ?? "";

/** Save `key` until this tab is closed. */
export const saveKey = (key) => sessionStorage.setItem(STORAGE_KEY, key.trim());

/** fetch of a path of the server, with the saved key. */
export function fetchWithKey(path, { headers = {}, ...options } = {}) {
  const key = savedKey();
  const authorization = { "x-requested-with": "fetch" }; // without it, a 401 makes the browser ask for a password
  if (key) authorization.authorization = `Bearer ${key}`;
  return fetch(`${serverUrl}${path}`, { ...options, headers: { ...authorization, ...headers } });
}

/** An error of the server, as in docs/errors.md; status 0: it cannot be reached, or the error came in a stream. */
export class ApiError extends Error {
  constructor(status, { code, message, param = null, request_id = null }) {
    super(message);
    Object.assign(this, { status, code, param, requestId: request_id });
  }
}

/** The error in a failed `response`. */
export async function toApiError(response) {
  const body = await response.json().catch(() => null);
  if (typeof body?.error === "string")
    return new ApiError(response.status, { code: body.error_type, message: body.error }); // of text-embeddings-inference's routes
  const error = body?.error ?? { code: "unknown", message: `the server's response has status ${response.status}.` };
  return new ApiError(response.status, error);
}

/** Yield `{name, data}` of each event of `response` until the stream ends; comments are skipped. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (pending + value).split("\n\n");
      pending = blocks.pop();
      for (const block of blocks) {
        const event = parseBlock(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseBlock(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { name, data: JSON.parse(data.join("\n")) } : null;
}
