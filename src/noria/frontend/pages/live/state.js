// The state of the live page as pure functions: reduce(state, event) → state. No clock, network or drawing; nothing is changed in place.

export const WINDOW_S = 30; // how much of the past is kept
export const NUM_DEPARTURES = 12;
const NUM_BATCHES = 8; // of texts
const NUM_HUES = 8;

/** The state before the first event. `hues`: the number of each scheduler's colour, in order of appearance. */
export const initialState = { connection: { phase: "connecting" }, server: null, engines: [], hues: {} };

/** The key of one image. */
export const imageKey = ({ request_id, index }) => `${request_id}/${index}`;

/**
 * `event`: {name: "connection", connection} of the page itself, or {name: "engines" | "engine_view", data, at} of the stream, where
 * `at` is the page's clock in seconds. Unknown events of a newer server change nothing.
 */
export function reduce(state, event) {
  switch (event.name) {
    case "connection":
      return { ...state, connection: event.connection };
    case "engines":
      return {
        ...state,
        server: event.data.server,
        engines: event.data.engines.map((engine) => mergeEngine(state, engine)),
      };
    case "engine_view":
      return withView(state, event.data, event.at);
    default:
      return state;
  }
}

function mergeEngine(state, engine) {
  const before = state.engines.find(({ name }) => name === engine.name);
  return { ...engine, view: before?.view ?? null };
}

/** A slot or waiting request; where an image has its scheduler, a text has the task of its model. */
function withLabel(item) {
  if (item.settings.type !== "encoder") return item;
  return { ...item, settings: { ...item.settings, scheduler: item.settings.task.replaceAll("_", " ") } };
}

function withView(state, view, at) {
  const received = { ...view, slots: view.slots.map(withLabel), waiting: view.waiting.map(withLabel) };
  const engines = state.engines.map((engine) =>
    engine.name === received.engine ? { ...engine, view: applyView(engine.view, received, at) } : engine,
  );
  return { ...state, engines, hues: assignHues(state.hues, [...received.slots, ...received.waiting]) };
}

function assignHues(hues, images) {
  const more = { ...hues };
  for (const { settings } of images) more[settings.scheduler] ??= (Object.keys(more).length % NUM_HUES) + 1;
  return Object.keys(more).length === Object.keys(hues).length ? hues : more;
}

const ALL_SHOWN = 64; // slots, of which the page shows all

/** How many slots the page shows: of hundreds, powers of two that hold those used so far. Images take the lowest ones. */
export function shownSlots({ num_slots, slots }, before = 0) {
  const used = Math.max(0, before, ...slots.map(({ slot }) => slot + 1));
  return Math.min(num_slots, Math.max(ALL_SHOWN, 2 ** Math.ceil(Math.log2(Math.max(used, 1)))));
}

/** The view of an engine (`view`, or null) after the event `received`, which came when the page's clock was at `at`. */
export function applyView(view, received, at) {
  const before = view ?? {
    incarnation: received.incarnation,
    ...{
      captured_at: received.captured_at,
      clock_offset_s: Infinity,
      iterations: [],
      batches: [],
      bars: [],
      departures: [],
    },
  };
  const restarted = before.incarnation !== received.incarnation;
  const known = restarted ? [] : before.iterations;
  const last = known.at(-1)?.number ?? 0; // the first view after a reconnect repeats iterations
  const iterations = [...known, ...received.iterations.filter(({ number }) => number > last)];
  const bars = restarted
    ? before.bars.map((bar) => (bar.to === null ? closeBar(bar, before.captured_at, "engine_lost") : bar))
    : before.bars;
  const ends = new Map(
    received.iterations.map(({ number, started_at, duration_s }) => [number, started_at + duration_s]),
  );
  const departed = received.departures.map((image) => ({
    ...image,
    key: imageKey(image),
    at: ends.get(image.iteration) ?? received.captured_at,
  }));
  const oldest = received.captured_at - WINDOW_S;
  const updated = updateBars(bars, received, departed, view && before.captured_at);
  return {
    incarnation: received.incarnation,
    captured_at: received.captured_at,
    // The smallest difference of the two clocks is that of the view with the least delay; it may grow, as clocks drift.
    clock_offset_s: Math.min(before.clock_offset_s + 0.001, at - received.captured_at),
    last_iteration: received.last_iteration,
    batches: [...batchesOf(received, last), ...(restarted ? [] : before.batches)].slice(0, NUM_BATCHES),
    num_slots: received.num_slots,
    slots_source: received.slots_source,
    num_shown: shownSlots(received, restarted ? 0 : before.num_shown),
    slots: received.slots,
    waiting: received.waiting,
    num_waiting: received.num_waiting,
    backlog_s: received.backlog_s,
    rates: received.rates,
    shares: received.shares ?? [],
    iterations: iterations.filter(({ started_at, duration_s }) => started_at + duration_s >= oldest),
    bars: updated.filter(({ to }) => to === null || to >= oldest),
    departures: [...departed.map((image) => departureOf(image, updated)).reverse(), ...before.departures].slice(
      0,
      NUM_DEPARTURES,
    ),
  };
}

/** The batches of texts after iteration `last`, newest first, each with the requests that share it: {request_id: number of texts}. */
function batchesOf({ iterations, departures }, last) {
  const sharing = {};
  for (const { iteration, request_id } of departures) {
    sharing[iteration] ??= {};
    sharing[iteration][request_id] = (sharing[iteration][request_id] ?? 0) + 1;
  }
  return iterations
    .filter(({ number, batch }) => batch && number > last)
    .map(({ number, num_joined, duration_s, batch }) => ({
      ...batch,
      number,
      num_texts: num_joined,
      duration_s,
      requests: sharing[number] ?? {},
    }))
    .reverse();
}

const closeBar = (bar, to, outcome) => ({ ...bar, to: Math.max(to, bar.from), outcome });

/** `bars` after a view: those of departed images are closed, new images get one. `since`: when the last view was captured, or null. */
function updateBars(bars, received, departed, since) {
  const running = new Set(received.slots.map(imageKey));
  const closing = new Map(departed.map((image) => [image.key, image]));
  const open = new Set();
  const updated = bars.map((bar) => {
    if (bar.to !== null) return bar;
    const image = closing.get(bar.key);
    if (image) {
      closing.delete(bar.key);
      return closeBar(bar, image.at, image.outcome);
    }
    if (!running.has(bar.key)) return closeBar(bar, received.captured_at, null); // its departure was in no view
    open.add(bar.key);
    return bar;
  });
  if (since !== null) for (const image of closing.values()) updated.push(barOfUnseen(image, updated, since));
  for (const image of received.slots) if (!open.has(imageKey(image))) updated.push(barOf(image));
  return updated;
}

function barOf(image) {
  const { slot, request_id, index, settings } = image;
  return { key: imageKey(image), slot, request_id, index, settings, from: image.joined_at, to: null, outcome: null };
}

/** The bar of an image that joined and left between two views; only its end is known. */
function barOfUnseen({ key, slot, request_id, index, at, outcome }, bars, since) {
  const earlier = bars.filter((bar) => bar.slot === slot && bar.to !== null).map(({ to }) => to);
  const from = Math.min(at, Math.max(since, ...earlier));
  return { key, slot, request_id, index, settings: null, from, to: at, outcome };
}

function departureOf({ key, slot, request_id, index, outcome, at }, bars) {
  const bar = bars.findLast((each) => each.key === key);
  return { key, slot, request_id, index, outcome, at, settings: bar?.settings ?? null };
}
