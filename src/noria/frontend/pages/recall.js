// An image's settings back from its file: dropped anywhere on the page, or chosen by a button.

import { make } from "./elements.js";
import { call, refusal } from "./events.js";
import { parseExactly } from "./wish.js";

const byId = (id) => document.getElementById(id);

/** Listen for files; `fill(settings)` takes what a file says, `refused(error)` what the server would not read. */
export function listenForFiles(fill, refused) {
  const [drop, file] = [byId("drop"), byId("recall-file")];
  byId("recall-choose").addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    if (file.files.length) recall(file.files[0], fill, refused);
    file.value = ""; // the same file may be chosen again
  });
  const holdsFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  for (const name of ["dragenter", "dragover"]) {
    window.addEventListener(name, (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  window.addEventListener("dragleave", ({ relatedTarget }) => relatedTarget === null && drop.classList.remove("over"));
  window.addEventListener("drop", (event) => {
    drop.classList.remove("over");
    if (!holdsFiles(event)) return;
    event.preventDefault();
    recall(event.dataTransfer.files[0], fill, refused);
  });
}

async function recall(file, fill, refused) {
  tell(make("p", { class: "small", text: `reading ${file.name}…` }));
  try {
    const response = await call("/v1/images/parameters", { method: "POST", body: file });
    if (!response.ok) throw await refusal(response);
    const said = parseExactly(await response.text());
    fill(said.settings);
    tell(...report(file.name, said));
  } catch (error) {
    tell(make("p", { class: "note bad small", text: `${file.name}: ${error.message}` }));
    refused(error);
  }
}

function report(name, { source, noria, unusable, other }) {
  const by = source === "noria" ? `Noria ${noria}` : "another program";
  const parts = [make("p", { class: "note good small", text: `The settings of ${name}, drawn by ${by}, are in the form.` })];
  if (unusable.length) parts.push(list("Not to be had here:", unusable.map(({ reason }) => reason)));
  const strange = Object.entries(other).map(([key, value]) => `${key}: ${value}`);
  if (strange.length) parts.push(list("What Noria has not:", strange));
  return parts;
}

const list = (title, lines) =>
  make("div", { class: "note warn small" }, make("p", { text: title }), make("ul", {}, ...lines.map((text) => make("li", { text }))));

const tell = (...parts) => byId("recalled").replaceChildren(...parts);
