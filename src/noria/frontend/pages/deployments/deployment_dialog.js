// The dialog that asks before a deployment is promoted, rolled back or made: with a reason, and a key if the server wants one.

import { needsKey, post } from "../registry/registry_page.js";
import { saveKey } from "../shared/api.js";
import { button, byId, make, setText } from "../shared/dom.js";

const MAX_WHY_CHARS = 1000;

const field = (id, label, control, hint) => {
  control.id = id;
  const parts = [make("label", { htmlFor: id, text: label }), control];
  if (hint) {
    control.setAttribute("aria-describedby", `${id}-hint`);
    parts.push(make("p", { class: "hint", id: `${id}-hint`, text: hint }));
  }
  return make("div", { class: "field" }, ...parts);
};

const input = (properties = {}) => make("input", { autocomplete: "off", spellcheck: false, ...properties });

/** Ask; `act(why)` does it. Calls `onDone(response)` when it is done. */
function ask({ title, about, fields = [], verb, isDanger = false, act, onDone }) {
  const dialog = byId("dialog");
  const why = input({ maxLength: MAX_WHY_CHARS });
  const key = input({ type: "password" });
  const keyField = field("dialog-key", "API key", key, "It is kept until you close this tab.");
  keyField.hidden = true;
  const error = make("p", { class: "error", role: "alert" });
  const confirm = make("button", { class: isDanger ? "danger" : "primary", text: verb });
  const cancel = button("Cancel", () => dialog.close());
  const form = make(
    "form",
    {},
    make("h2", { id: "dialog-title", text: title }),
    ...about.map((text) => make("p", { text })),
    ...fields,
    field("dialog-why", "Why", why, "It is kept with the change."),
    keyField,
    error,
    make("div", { class: "actions" }, confirm, cancel),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (key.value) saveKey(key.value);
    confirm.disabled = true;
    setText(error, "");
    try {
      const response = await act(why.value.trim());
      dialog.close();
      onDone(response);
    } catch (failure) {
      setText(error, failure.message);
      if (needsKey(failure)) {
        keyField.hidden = false;
        key.focus();
      }
    } finally {
      confirm.disabled = false;
    }
  });
  dialog.replaceChildren(form);
  dialog.showModal();
  (fields[0]?.querySelector("input") ?? why).focus();
}

/** Ask whether the canary of an endpoint is to serve all its requests, or a shadow, which has no `traffic`, is to begin its plan. */
export function askToPromote(endpoint, { version, traffic, verdict }, onDone) {
  const judged = verdict && verdict.outcome !== "pass" ? [`The judge says ${verdict.outcome}: ${verdict.reason}.`] : [];
  ask({
    title: `Promote ${version} on ${endpoint}?`,
    about: [
      traffic === null
        ? "It is a shadow. Then it answers requests: by its plan, if it has one, else all of them."
        : `It gets ${traffic} of the requests now, and all of them then. No control is left to compare it with.`,
      ...judged,
    ],
    verb: "Promote",
    act: (why) => post("/v1/deployments/promote", { endpoint, why }),
    onDone,
  });
}

/** Ask whether the latest deployment of an endpoint is to be taken away; `consequence` says what happens then. */
export function askToRollBack(endpoint, version, consequence, onDone) {
  ask({
    title: `Roll back ${version} on ${endpoint}?`,
    about: [consequence],
    verb: "Roll back",
    isDanger: true,
    act: (why) => post("/v1/deployments/rollback", { endpoint, why }),
    onDone,
  });
}

/** Ask which version is to be deployed to which endpoint, and how. */
export function askToDeploy(endpoint, onDone) {
  const name = input({ value: endpoint ?? "", required: true, maxLength: 128 });
  const version = input({ required: true, maxLength: 200, placeholder: "shapes@prod" });
  const plan = make(
    "select",
    {},
    new Option("as a ramp, judged step by step", "ramp"),
    new Option("as a canary that keeps its share", "canary"),
    new Option("to all requests at once", "all"),
  );
  const ramp = input({ value: "5,25,50,100 every 10m", required: true, maxLength: 200 });
  const share = input({ type: "number", min: "0.1", max: "99.9", step: "any", value: "5", required: true });
  const rampField = field("dialog-ramp", "Ramp", ramp, "per cents and the time of each step");
  const shareField = field("dialog-share", "Share in per cent", share);
  const showPlan = () => {
    rampField.hidden = ramp.disabled = plan.value !== "ramp";
    shareField.hidden = share.disabled = plan.value !== "canary";
  };
  plan.addEventListener("change", showPlan);
  showPlan();
  ask({
    title: "Deploy a version",
    about: [],
    fields: [
      field("dialog-endpoint", "Endpoint", name, "the name that requests give as model"),
      field("dialog-version", "Version", version, "MODEL, MODEL@NUMBER or MODEL@ALIAS"),
      field("dialog-plan", "How", plan),
      rampField,
      shareField,
    ],
    verb: "Deploy",
    act: (why) => {
      const how = { ramp: { ramp: ramp.value }, canary: { canary: Number(share.value) }, all: {} }[plan.value];
      return post("/v1/deployments", { endpoint: name.value.trim(), version: version.value.trim(), ...how, why });
    },
    onDone,
  });
}
