// What was drawn in this tab, newest first, and one of its images at a time in a dialog. Nothing is kept beyond the tab.

const MOST_KEPT = 100; // drawings: their files are in memory

const byId = (id) => document.getElementById(id);

export class Gallery {
  #drawings = []; // newest first
  #shown = null;
  #dialog = byId("large");

  constructor() {
    byId("large-close").addEventListener("click", () => this.#dialog.close());
    byId("large-before").addEventListener("click", () => this.#move(-1));
    byId("large-after").addEventListener("click", () => this.#move(1));
    this.#dialog.addEventListener("keydown", ({ key }) => {
      if (key === "ArrowLeft") this.#move(-1);
      if (key === "ArrowRight") this.#move(1);
    });
    this.#dialog.addEventListener("click", ({ target }) => target === this.#dialog && this.#dialog.close()); // the backdrop
    this.#dialog.addEventListener("close", () => this.#shown?.opener.focus());
  }

  /** Those that are being drawn, newest first. */
  get running() {
    return this.#drawings.filter((drawing) => drawing.running);
  }

  add(drawing) {
    this.#drawings.unshift(drawing);
    byId("drawings").prepend(drawing.element);
    byId("empty").hidden = true;
    this.#drawings.filter((each) => !each.running).slice(MOST_KEPT).forEach((each) => each.remove());
  }

  /** `drawing` goes; the keyboard's place goes to its neighbour if it was in there. */
  removed(drawing) {
    const had = drawing.element.contains(document.activeElement);
    this.#drawings = this.#drawings.filter((each) => each !== drawing);
    const near = drawing.element.nextElementSibling ?? drawing.element.previousElementSibling;
    byId("empty").hidden = this.#drawings.length > 0;
    if (had) (near?.querySelector("button, a") ?? byId("draw")).focus();
  }

  /** Show `image` large; the arrow keys go to its neighbours. */
  open(image) {
    this.#show(image);
    this.#dialog.showModal();
  }

  get #images() {
    return this.#drawings.flatMap(({ images }) => images);
  }

  #move(by) {
    const next = this.#images[this.#images.indexOf(this.#shown) + by];
    if (next) this.#show(next);
  }

  #show(image) {
    this.#shown = image;
    const [place, count] = [this.#images.indexOf(image), this.#images.length];
    Object.assign(byId("large-image"), { src: image.url, alt: image.alt });
    byId("large-title").textContent = image.alt;
    byId("large-place").textContent = `${place + 1} of ${count} · seed ${image.seed}`;
    byId("large-before").disabled = place === 0;
    byId("large-after").disabled = place === count - 1;
  }
}
