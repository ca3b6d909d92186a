// The form that tries POST /t2i: sends the text as it is, shows the image or the error's message.

import { fetchWithKey, saveKey, toApiError } from "../shared/api.js";
import { byId } from "../shared/dom.js";

const [status, image] = [byId("status"), byId("result")];

byId("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (byId("key").value) saveKey(byId("key").value);
  const started = performance.now();
  status.textContent = "generating…";
  image.hidden = true;
  try {
    const headers = { "content-type": "application/json" };
    const response = await fetchWithKey("/t2i", { method: "POST", headers, body: byId("body").value });
    if (!response.ok) throw await toApiError(response);
    image.src = await imageUrl(response);
    image.hidden = false;
    const seconds = ((performance.now() - started) / 1000).toFixed(2);
    status.textContent = `${seconds} s, seed ${response.headers.get("x-noria-seed")}`;
  } catch (error) {
    if (error.status === 401) {
      byId("key-field").hidden = false;
      byId("key").focus();
    }
    status.textContent = error.status === undefined ? `no response: ${error.message}` : error.message;
  }
});

/** The URL of the image, or of the first of several. */
async function imageUrl(response) {
  if (response.headers.get("content-type") !== "application/json") return URL.createObjectURL(await response.blob());
  const { images } = await response.json();
  return `data:image/${images[0].format};base64,${images[0].b64_json}`;
}
