// What the page knows, as pure functions: reduce(state, event) → state. No clock, no network, no drawing; nothing is changed in place.

export const WINDOW_S = 30; // of the past that is kept
export const NUM_GONE = 12;
const NUM_HUES = 8;

/** Before anything was heard. `hues`: the number of each scheduler's colour, in order of appearance. */
export const initial = { connection: { phase: "connecting" }, server: null, engines: [], hues: {} };

/** The name of one image. */
export const keyOf = ({ request_id, index }) => `${request_id}/${index}`;

/**
 * `event`: {name: "connection", connection} of the page's own, or {name: "engines" | "wheel", data, at} of the stream, where `at` is the
 * page's clock in seconds. An event of a newer server changes nothing.
 */
export function reduce(state, event) {
  switch (event.name) {
    case "connection":
      return { ...state, connection: event.connection };
    case "engines":
      return { ...state, server: event.data.server, engines: event.data.engines.map((engine) => known(state, engine)) };
    case "wheel":
      return withView(state, event.data, event.at);
    default:
      return state;
  }
}

function known(state, engine) {
  const before = state.engines.find(({ name }) => name === engine.name);
  return { ...engine, wheel: before?.wheel ?? null };
}

function withView(state, view, at) {
  const engines = state.engines.map((engine) =>
    engine.name === view.engine ? { ...engine, wheel: turned(engine.wheel, view, at) } : engine,
  );
  return { ...state, engines, hues: coloured(state.hues, [...view.seats, ...view.waiting]) };
}

function coloured(hues, images) {
  const more = { ...hues };
  for (const { scheduler } of images) more[scheduler] ??= (Object.keys(more).length % NUM_HUES) + 1;
  return Object.keys(more).length === Object.keys(hues).length ? hues : more;
}

/** `wheel`, or null, after `view`, which came when the page's clock was at `at`. */
export function turned(wheel, view, at) {
  const before = wheel ?? { incarnation: view.incarnation, at: view.at, turns: [], bars: [], gone: [], lag_s: Infinity };
  const restarted = before.incarnation !== view.incarnation;
  const kept = restarted ? [] : before.turns;
  const last = kept.at(-1)?.number ?? 0; // the first view after a lost connection has turns that are known
  const turns = [...kept, ...view.turns.filter(({ number }) => number > last)];
  const bars = restarted ? before.bars.map((bar) => (bar.to === null ? closed(bar, before.at, "engine_lost") : bar)) : before.bars;
  const ends = new Map(view.turns.map(({ number, began_at, seconds }) => [number, began_at + seconds]));
  const left = view.left.map((image) => ({ ...image, key: keyOf(image), at: ends.get(image.number) ?? view.at }));
  const oldest = view.at - WINDOW_S;
  const after = barsAfter(bars, view, left, wheel && before.at);
  return {
    incarnation: view.incarnation,
    at: view.at,
    // The least difference of the two clocks is that of the view that took the shortest way; it may grow, as clocks drift.
    lag_s: Math.min(before.lag_s + 0.001, at - view.at),
    number: view.number,
    num_slots: view.num_slots,
    seats: view.seats,
    waiting: view.waiting,
    num_waiting: view.num_waiting,
    drain_s: view.drain_s,
    rates: view.rates,
    turns: turns.filter(({ began_at, seconds }) => began_at + seconds >= oldest),
    bars: after.filter(({ to }) => to === null || to >= oldest),
    gone: [...left.map((image) => goneOf(image, after)).reverse(), ...before.gone].slice(0, NUM_GONE),
  };
}

const closed = (bar, to, outcome) => ({ ...bar, to: Math.max(to, bar.from), outcome });

/** `bars` after a view: of who left in it they are closed, of whom it shows for the first time they begin. `since`: of the last view. */
function barsAfter(bars, view, left, since) {
  const seated = new Set(view.seats.map(keyOf));
  const leaving = new Map(left.map((image) => [image.key, image]));
  const open = new Set();
  const after = bars.map((bar) => {
    if (bar.to !== null) return bar;
    const image = leaving.get(bar.key);
    if (image) {
      leaving.delete(bar.key);
      return closed(bar, image.at, image.outcome);
    }
    if (!seated.has(bar.key)) return closed(bar, view.at, null); // it left when more happened than is told
    open.add(bar.key);
    return bar;
  });
  if (since !== null) for (const image of leaving.values()) after.push(unseen(image, after, since));
  for (const seat of view.seats) if (!open.has(keyOf(seat))) after.push(barOf(seat));
  return after;
}

function barOf(seat) {
  const { slot, request_id, index, scheduler, num_steps } = seat;
  return { key: keyOf(seat), slot, request_id, index, scheduler, num_steps, from: seat.boarded_at, to: null, outcome: null };
}

/** The bar of an image that came and went between two views: of whom nothing is known but when it left. */
function unseen({ key, slot, request_id, index, at, outcome }, bars, since) {
  const earlier = bars.filter((bar) => bar.slot === slot && bar.to !== null).map(({ to }) => to);
  const from = Math.min(at, Math.max(since, ...earlier));
  return { key, slot, request_id, index, scheduler: null, num_steps: null, from, to: at, outcome };
}

function goneOf({ key, slot, request_id, index, outcome, at }, bars) {
  const bar = bars.findLast((one) => one.key === key);
  return { key, slot, request_id, index, outcome, at, scheduler: bar?.scheduler ?? null, num_steps: bar?.num_steps ?? null };
}
