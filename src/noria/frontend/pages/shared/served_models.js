// What the playgrounds share: waiting for a server that is ready, its models of one kind, the API key, and the state in the header.

import { fetchWithKey, savedKey, saveKey, serverUrl, toApiError } from "./api.js";
import { byId, hide, setText } from "./dom.js";

const POLL_MS = 1500;
const PATHS = { diffusion: "./", encoder: "text" }; // of the playground for each kind
const UNREACHABLE_CODES = new Set(["unreachable", "lost", "engine_unavailable", "engine_lost", "Unhealthy"]);

/** Whether `error` says that the server has to be waited for. */
export const isUnreachable = ({ code }) => UNREACHABLE_CODES.has(code);

export class ServedModels {
  #kind;
  #field;
  #setReady;
  #show;
  #waiting = false;

  /**
   * `kind`: "diffusion" or "encoder"; a server without such a model shows the other playground. `field` gets the focus from the key.
   * `setReady(ready)` switches the form on and off; `show(models)` takes the entries of GET /v1/models.
   */
  constructor(kind, { field, setReady, show }) {
    [this.#kind, this.#field, this.#setReady, this.#show] = [kind, field, setReady, show];
    byId("key-use").addEventListener("click", () => this.#useKey());
    byId("key-value").addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.#useKey();
    });
  }

  /** Wait for the server, with the form disabled. */
  async wait() {
    if (this.#waiting) return;
    this.#waiting = true;
    this.#setReady(false);
    try {
      while (!(await this.#load())) await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    } finally {
      this.#waiting = false;
    }
  }

  /** The entries of GET /v1/models of this kind, as they are now; null if the server does not answer. */
  async fetch() {
    const response = await fetchWithKey("/v1/models").catch(() => null);
    return response?.ok ? this.#ownOf((await response.json()).data) : null;
  }

  askForKey(why) {
    notice(savedKey() ? why : "");
    this.#setReady(false);
    setStatus("needs a key", "warn");
    byId("key").hidden = false;
    byId("key-value").focus();
  }

  /** Try to load the models; returns true if there is nothing more to wait for: they are shown, or a key is needed first. */
  async #load() {
    let models;
    try {
      const state = await (await fetch(`${serverUrl}/readyz`)).json();
      if (!state.ready) {
        const engines = state.engines.map((engine, index) => `engine ${index} is ${engine.state}`).join(", ");
        notice(`No engine is ready yet: ${engines || "none is known"}. This page continues by itself.`);
        setStatus("loading", "warn");
        return false;
      }
      const response = await fetchWithKey("/v1/models");
      if (response.status === 401) {
        this.askForKey((await toApiError(response)).message);
        return true;
      }
      if (!response.ok) return false;
      models = (await response.json()).data;
    } catch {
      setStatus("not reached", "bad");
      notice("The server cannot be reached. This page continues by itself when it is back.");
      return false;
    }
    const own = this.#ownOf(models);
    if (own.length) this.#onModels(own);
    else location.replace(PATHS[models[0].noria.kind]);
    return true;
  }

  #ownOf(models) {
    return models.filter(({ noria }) => noria?.kind === this.#kind); // null: a checkpoint that nobody has asked for
  }

  #onModels(models) {
    notice("");
    hide(byId("key"), this.#field);
    setStatus(models.length > 1 ? `${models[0].id} and ${models.length - 1} more` : models[0].id, "good");
    this.#show(models);
    this.#setReady(true);
  }

  #useKey() {
    saveKey(byId("key-value").value);
    byId("key-value").value = "";
    this.wait();
  }
}

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

/** Show the state of the server in the header. */
function setStatus(text, tone) {
  byId("page-status").textContent = text;
  byId("page-status").className = `status chip ${tone}`;
}
