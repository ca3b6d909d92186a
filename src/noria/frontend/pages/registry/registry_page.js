// What the pages of the registry share: asking the server again and again while the tab is visible, the API key, errors, and texts.

import { ApiError, fetchWithKey, savedKey, saveKey, toApiError } from "../shared/api.js";
import { button, byId, hide, make, setText } from "../shared/dom.js";

const MAX_DELAY_S = 30; // between two tries while the server cannot be reached
const KEY_STATUSES = new Set([401, 403]);

/** The JSON of a response; throws an ApiError. */
export async function fetchJson(path, options) {
  let response;
  try {
    response = await fetchWithKey(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { code: "unreachable", message: "the server cannot be reached." });
  }
  if (!response.ok) throw await toApiError(response);
  return response.json();
}

/** POST a body as JSON. */
export const post = (path, body) =>
  fetchJson(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** Whether `error` says that another key is needed. */
export const needsKey = ({ status }) => KEY_STATUSES.has(status);

/** Asks the server every `intervalS` while the tab is visible: `load` fetches and shows; without an interval once. */
export class RegistryPage {
  #load;
  #intervalS;
  #timer = null;
  #failures = 0;
  #running = false;
  #again = false;
  #isLocked = false;

  constructor(load, intervalS = null) {
    [this.#load, this.#intervalS] = [load, intervalS];
    byId("notices").append(...this.#notices());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.#timer === null) this.update();
    });
    this.update();
  }

  /** Ask now. */
  async update() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (this.#running) {
      this.#again = true;
      return;
    }
    this.#running = true;
    let delayS = this.#intervalS;
    try {
      await this.#load();
      this.#showLoaded();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      delayS = this.#showError(error);
    } finally {
      this.#running = false;
    }
    if (this.#again) {
      this.#again = false;
      this.update();
    } else if (delayS !== null && !document.hidden) {
      this.#timer = setTimeout(() => this.update(), 1000 * delayS);
    }
  }

  #showLoaded() {
    this.#failures = 0;
    this.#isLocked = false;
    setStatus(this.#intervalS === null ? "ready" : "live", "good");
    hide(byId("page-error"), byId("main"));
    hide(byId("key-form"), byId("main"));
  }

  /** Show an error; returns the seconds until the next try, or null. */
  #showError(error) {
    if (needsKey(error)) {
      setStatus("needs a key", "warn");
      hide(byId("page-error"), byId("main"));
      setText(byId("key-error"), savedKey() ? error.message : "");
      byId("key-form").hidden = false;
      if (!this.#isLocked || savedKey()) byId("key").focus();
      this.#isLocked = true;
      return null;
    }
    const isFound = error.status >= 400 && error.status < 500 && error.status !== 429;
    this.#failures += 1;
    const delayS = Math.min(2 ** this.#failures, MAX_DELAY_S);
    const [status, text] = describeFailure(error);
    setStatus(status, isFound ? "warn" : "bad");
    byId("page-error").className = `note ${isFound ? "warn" : "bad"}`;
    setText(byId("page-error-text"), isFound ? text : `${text} This page tries again every few seconds.`);
    byId("page-error").hidden = false;
    return isFound ? this.#intervalS : delayS;
  }

  #notices() {
    const error = make(
      "div",
      { id: "page-error", class: "note bad", role: "alert", hidden: true },
      make("p", { id: "page-error-text" }),
      button("Try now", () => this.update()),
    );
    const key = make("input", { id: "key", type: "password", autocomplete: "off", required: true });
    key.setAttribute("aria-describedby", "key-error");
    const form = make(
      "form",
      { id: "key-form", class: "note warn", hidden: true },
      make("p", {
        text: "This server needs an API key with the scope “lineage” or “deploy” here. The key is kept until you close this tab.",
      }),
      make("p", {}, make("label", { htmlFor: "key", text: "API key" }), " ", key),
      make("p", { id: "key-error", class: "error", role: "alert" }),
      make("button", { class: "primary", text: "Use the key" }),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      saveKey(key.value);
      key.value = "";
      this.update();
    });
    return [error, form];
  }
}

/** What an error means for the page: [status in the header, sentence]. */
function describeFailure({ code, message }) {
  if (code === "registry_unavailable")
    return ["registry away", `The registry does not answer: ${message} Requests are served as before.`];
  if (code === "unreachable") return ["not reached", "The server cannot be reached."];
  return ["error", `${message[0].toUpperCase()}${message.slice(1)}`];
}

function setStatus(text, tone) {
  setText(byId("page-status"), text);
  byId("page-status").className = `chip status ${tone}`;
}

/** Replace the children of `element` if `value`, from which they were made, has changed; the focus stays on what has the same data-key. */
export function renderIfChanged(element, value, makeChildren) {
  const serialized = JSON.stringify(value ?? null);
  if (element.dataset.rendered === hash(serialized)) return;
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = [...element.querySelectorAll(".scroll")].map(({ scrollLeft }) => scrollLeft);
  element.replaceChildren(...makeChildren());
  element.dataset.rendered = hash(serialized);
  [...element.querySelectorAll(".scroll")].forEach((area, index) => (area.scrollLeft = scrolled[index] ?? 0));
  if (focused !== undefined)
    [...element.querySelectorAll("[data-key]")].find(({ dataset }) => dataset.key === focused)?.focus();
}

/** A short hash of a text: FNV-1a. */
function hash(text) {
  let value = 2166136261;
  for (let at = 0; at < text.length; at++) value = Math.imul(value ^ text.charCodeAt(at), 16777619);
  return `${text.length}-${value >>> 0}`;
}
