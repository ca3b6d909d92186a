// The form that tries POST /t2i: sends the text as it stands, shows the image, or the error's message.

import { call, refusal, saveKey } from "./events.js";

const byId = (id) => document.getElementById(id);
const [said, image] = [byId("said"), byId("drawn")];

byId("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (byId("key").value) saveKey(byId("key").value);
  const started = performance.now();
  said.textContent = "drawing…";
  image.hidden = true;
  try {
    const headers = { "content-type": "application/json" };
    const response = await call("/t2i", { method: "POST", headers, body: byId("body").value });
    if (!response.ok) throw await refusal(response);
    image.src = await pictured(response);
    image.hidden = false;
    const seconds = ((performance.now() - started) / 1000).toFixed(2);
    said.textContent = `${seconds} s, seed ${response.headers.get("x-noria-seed")}`;
  } catch (error) {
    if (error.status === 401) {
      byId("key-field").hidden = false;
      byId("key").focus();
    }
    said.textContent = error.status === undefined ? `no answer: ${error.message}` : error.message;
  }
});

/** The address of the image, or of the first of several. */
async function pictured(response) {
  if (response.headers.get("content-type") !== "application/json") return URL.createObjectURL(await response.blob());
  const { images } = await response.json();
  return `data:image/${images[0].format};base64,${images[0].b64_json}`;
}
