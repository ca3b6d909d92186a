// What the page says, as pure functions from data to text.

/** "0.42 s", "8.1 s", "34 s", "3 min". */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 120) return `${Math.round(value / 60)} min`;
  return `${value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0)} s`;
}

/** When the next in line boards: "next", or "in 1.2 s". */
export const start = (value) => (value < 0.1 ? "next" : `in ${seconds(value)}`);

/** Three digits, more or less: "0.25", "5.3", "128". */
export const figure = (value) => value.toFixed(value < 1 && value > 0 ? 2 : value < 100 ? 1 : 0);

export const percent = (share) => `${Math.round(share * 100)} %`;

/** "1 step", "20 steps". */
export const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

/** How pressing a seat's deadline is at `now`: null without one, "kept", "close" (a quarter of the time left, or less) or "late". */
export function urgency({ due_at, boarded_at, finish_at }, now) {
  if (due_at === null) return null;
  if (due_at < now || (finish_at !== null && finish_at > due_at)) return "late";
  return due_at - now < (due_at - boarded_at) / 4 ? "close" : "kept";
}

/** Which image a seat holds: what stays as it is for as long as it sits there. */
export function named(seat) {
  const size = `${seat.width_px} × ${seat.height_px} px`;
  const parts = [seat.scheduler, count(seat.num_calls, "call"), size, `guidance ${seat.guidance_scale}`];
  if (seat.priority !== "normal") parts.push(`${seat.priority} priority`);
  return parts.join(", ");
}

/** "7 of 12", "7 of 12, paused". */
export const progress = ({ call, num_calls, paused }) => `${call} of ${num_calls}${paused ? ", paused" : ""}`;

/** All about a seat at `now`, in a sentence. */
export function described(seat, now) {
  const parts = [named(seat), `call ${progress(seat)}`];
  if (seat.finish_at !== null) parts.push(`done in ${seconds(Math.max(0, seat.finish_at - now))}`);
  if (seat.due_at !== null) parts.push(seat.due_at < now ? "past its deadline" : `due in ${seconds(seat.due_at - now)}`);
  return parts.join(", ");
}

/** What the running batch is a mix of. */
export function mix(seats) {
  if (!seats.length) return "Nothing is being drawn. Send sample traffic, draw in the playground, or use the command below.";
  if (seats.length === 1) return `One image is being drawn; whoever comes now boards at the next turn and shares its calls.`;
  const distinct = (pick) => new Set(seats.map(pick)).size;
  const range = (pick, unit) => {
    const values = seats.map(pick);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return least === most ? `${least} ${unit}` : `${least}–${most} ${unit}`;
  };
  const parts = [
    count(distinct(({ request_id }) => request_id), "request"),
    count(distinct(({ scheduler }) => scheduler), "scheduler"),
    range(({ num_steps }) => num_steps, "steps"),
    count(distinct(({ width_px, height_px }) => `${width_px} ${height_px}`), "size"),
  ];
  if (distinct(({ model }) => model) > 1) parts.push(`${distinct(({ model }) => model)} models`);
  const paused = seats.filter((seat) => seat.paused).length;
  return `Together now: ${parts.join(", ")}.${paused ? ` ${paused} paused: others go first.` : ""}`;
}

/** What a screen reader is told of an engine now and then. */
export function summary(name, { seats, num_slots, num_waiting, rates }) {
  const median = rates.p50_s === null ? "" : `, median ${seconds(rates.p50_s)}`;
  return `${name}: ${seats.length} of ${num_slots} slots in use, ${num_waiting} waiting, ${figure(rates.images_per_s)} images per second${median}.`;
}

/** The figures of a wheel: [name, value, explanation]. */
export function figures({ rates, num_slots, num_waiting, drain_s }) {
  const window = `in the last ${Math.round(rates.window_s)} seconds`;
  return [
    ["Images/s", figure(rates.images_per_s), `finished ${window}`],
    ["Steps/s", figure(rates.steps_per_s), `model calls of single images ${window}`],
    ["Occupancy", percent(rates.occupancy), `of ${num_slots} slots; the wheel turned ${percent(rates.busy)} of the time`],
    ["Batch", figure(rates.mean_batch), `images in a turn, on average ${window}`],
    ["p50", seconds(rates.p50_s), "half of the requests took less, from arrival to end"],
    ["p95", seconds(rates.p95_s), "95 % of the requests took less"],
    ["p99", seconds(rates.p99_s), "99 % of the requests took less"],
    ["Waiting", String(num_waiting), `images; all that was accepted is done in ${seconds(drain_s)}`],
  ];
}

/** Why there is nothing to see of an engine, or null. */
export function notice({ name, state, wheel }) {
  if (state === "loading") return `${name} is loading its model; its wheel turns as soon as that is done.`;
  if (state !== "ready") return `${name} cannot be reached. The supervisor starts another in its place; its requests fly again.`;
  return wheel === null ? `${name} is ready; its wheel is about to show.` : null;
}

/** What is said of the slot that was chosen, or of how to choose one. */
export function describedSlot(slot, seats, now) {
  if (slot === null) return "Choose a slot to see whose image it holds.";
  const seat = seats.find((one) => one.slot === slot);
  if (!seat) return `Slot ${slot} is free: the next in line boards at the next turn.`;
  return `Slot ${slot}: ${described(seat, now)}. Request ${seat.request_id}, image ${seat.index}, by ${seat.model}, boarded ${seconds(Math.max(0, now - seat.boarded_at))} ago.`;
}
