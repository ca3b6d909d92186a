// The generations of this tab, newest first, and a dialog that shows one of their images large. Nothing is kept beyond the tab.

import { byId } from "../shared/dom.js";

const MAX_KEPT = 100; // generations whose files stay in memory

export class Gallery {
  #cards = []; // newest first
  #current = null;
  #dialog = byId("large");

  /** `useImage(image)` is called to use the image that is shown large as the start image. */
  constructor(useImage) {
    byId("large-use").addEventListener("click", () => {
      const image = this.#current;
      this.#dialog.close();
      useImage(image);
    });
    byId("large-close").addEventListener("click", () => this.#dialog.close());
    byId("large-before").addEventListener("click", () => this.#move(-1));
    byId("large-after").addEventListener("click", () => this.#move(1));
    this.#dialog.addEventListener("keydown", ({ key }) => {
      if (key === "ArrowLeft") this.#move(-1);
      if (key === "ArrowRight") this.#move(1);
    });
    this.#dialog.addEventListener("click", ({ target }) => target === this.#dialog && this.#dialog.close()); // the backdrop
    this.#dialog.addEventListener("close", () => this.#current?.opener.focus());
  }

  /** The running generations, newest first. */
  get running() {
    return this.#cards.filter((card) => card.running);
  }

  add(card) {
    this.#cards.unshift(card);
    byId("generations").prepend(card.element);
    byId("empty").hidden = true;
    this.#cards
      .filter((each) => !each.running)
      .slice(MAX_KEPT)
      .forEach((each) => each.remove());
  }

  /** Forget `card`; move the focus to its neighbour if it was inside. */
  onRemoved(card) {
    const hadFocus = card.element.contains(document.activeElement);
    this.#cards = this.#cards.filter((each) => each !== card);
    const neighbour = card.element.nextElementSibling ?? card.element.previousElementSibling;
    byId("empty").hidden = this.#cards.length > 0;
    if (hadFocus) (neighbour?.querySelector("button, a") ?? byId("generate")).focus();
  }

  /** Show `image` large; the arrow keys show its neighbours. */
  open(image) {
    this.#show(image);
    this.#dialog.showModal();
  }

  get #images() {
    return this.#cards.flatMap(({ images }) => images);
  }

  #move(by) {
    const next = this.#images[this.#images.indexOf(this.#current) + by];
    if (next) this.#show(next);
  }

  #show(image) {
    this.#current = image;
    const [index, count] = [this.#images.indexOf(image), this.#images.length];
    Object.assign(byId("large-image"), { src: image.url, alt: image.alt });
    byId("large-title").textContent = image.alt;
    byId("large-position").textContent = `${index + 1} of ${count} · seed ${image.seed}`;
    byId("large-before").disabled = index === 0;
    byId("large-after").disabled = index === count - 1;
  }
}
