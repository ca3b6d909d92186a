// Elements, made in one line.

/** A `tag` with `properties` (`class`, `text` and `data` besides its own) and `children`. */
export function make(tag, { class: name, text, data, on, ...properties } = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  if (data) Object.assign(element.dataset, data);
  for (const [event, heard] of Object.entries(on ?? {})) element.addEventListener(event, heard);
  element.append(...children);
  return element;
}

/** Set an element's text if it is another. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Hide `element`; the keyboard's place goes to `next` if it was in there. */
export function hide(element, next) {
  const had = element.contains(document.activeElement);
  element.hidden = true;
  if (had) next.focus();
}

/** A button that does `act`. */
export const button = (text, act, properties = {}) => make("button", { type: "button", text, ...properties, on: { click: act } });

/** Copy `text`; also where the browser has no clipboard for pages that came without TLS. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const before = document.activeElement;
  const area = make("textarea", { value: text, class: "visually-hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  before?.focus();
}
