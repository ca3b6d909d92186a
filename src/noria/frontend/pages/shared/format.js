// Texts of the pages, as pure functions from data.

/** "0.42 s", "8.1 s", "34 s", "3 min"; "–" for null. */
export function formatSeconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 120) return `${Math.round(value / 60)} min`;
  return `${value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0)} s`;
}

/** A measured duration: "8.4 ms", "93 ms", "0.42 s", "34 s". */
export function formatDuration(value) {
  if (value < 0.0995) return `${Math.max(value * 1000, 0).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 9.95 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

/** When a waiting image starts: "next", or "in 1.2 s". */
export const formatStart = (value) => (value < 0.1 ? "next" : `in ${formatSeconds(value)}`);

/** About three digits: "0.25", "5.3", "128". */
export const formatNumber = (value) => value.toFixed(value < 1 && value > 0 ? 2 : value < 100 ? 1 : 0);

/** "31.4 MB". */
export function formatSize(bytes) {
  for (const [unit, size] of [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ])
    if (bytes >= size) return `${Number((bytes / size).toPrecision(3))} ${unit}`;
  return `${bytes} B`;
}

export const formatPercent = (share) => `${Math.round(share * 100)} %`;

/** "1 step", "20 steps". */
export const pluralize = (number, singular, plural = `${singular}s`) => `${number} ${number === 1 ? singular : plural}`;

/** The state of an image's deadline at `now`: null without one, "kept", "close" (a quarter of the time left, or less) or "late". */
export function deadlineState({ deadline_at, joined_at, finish_at }, now) {
  if (deadline_at === null) return null;
  if (deadline_at < now || (finish_at !== null && finish_at > deadline_at)) return "late";
  return deadline_at - now < (deadline_at - joined_at) / 4 ? "close" : "kept";
}

/** "outline", "outline × 0.8" with another weight than 1. */
export const formatLora = ({ name, weight = 1 }) => (weight === 1 ? name : `${name} × ${weight}`);

const MAX_SHARING = 4; // requests that are named

const isText = (settings) => settings.type === "encoder";

/** "20 steps" of an image, "12 tokens" of a request of texts. */
export const describeWork = (settings) =>
  isText(settings) ? pluralize(settings.num_tokens, "token") : pluralize(settings.inference_steps, "step");

/** "64 × 64" of an image, "2 texts" of a request of texts. */
export const describeSize = (settings) =>
  isText(settings) ? pluralize(settings.num_texts, "text") : `${settings.width} × ${settings.height}`;

/** The label of an image in a slot: its LoRAs, or its scheduler if it has none. */
export const describeStyle = ({ scheduler, loras = [] }) =>
  loras.length ? loras.map(formatLora).join(" + ") : scheduler;

/** The images that an image is made from, and its refiner: ["start image and mask, strength 0.6", "ControlNet edges × 0.8"]. */
function describeInputs({
  strength = null,
  has_mask: hasMask,
  controls = [],
  reference_images: references = [],
  ip_adapter: adapter = null,
  refiner = null,
}) {
  const parts = [];
  if (strength !== null) parts.push(`start image${hasMask ? " and mask" : ""}, strength ${strength}`);
  if (controls.length)
    parts.push(`ControlNet ${controls.map(({ name, scale }) => formatLora({ name, weight: scale })).join(" + ")}`);
  if (references.length) parts.push(pluralize(references.length, "reference image"));
  if (adapter) parts.push(`IP-Adapter ${formatLora({ name: adapter.name, weight: adapter.scale })}`);
  if (refiner) parts.push(`refiner from ${refiner.start}`);
  return parts;
}

/** The settings of an image in a slot, which do not change while it is there. */
export function describeImage(image) {
  const { settings } = image;
  if (isText(settings)) return `${settings.scheduler}, ${describeSize(settings)}, ${describeWork(settings)}`;
  const size = `${settings.width} × ${settings.height} px`;
  const parts = [settings.scheduler, pluralize(image.num_calls, "call"), size, `guidance ${settings.guidance_scale}`];
  if (settings.loras.length) parts.push(`LoRA ${settings.loras.map(formatLora).join(" + ")}`);
  parts.push(...describeInputs(settings));
  if (image.priority !== "normal") parts.push(`${image.priority} priority`);
  return parts.join(", ");
}

/** "7 of 12", "7 of 12, paused". */
export const formatProgress = ({ call, num_calls, paused }) => `${call} of ${num_calls}${paused ? ", paused" : ""}`;

/** The settings, progress and times of an image in a slot at `now`. */
export function describeRunning(image, now) {
  const parts = [describeImage(image), `call ${formatProgress(image)}`];
  if (image.finish_at !== null) parts.push(`done in ${formatSeconds(Math.max(0, image.finish_at - now))}`);
  if (image.deadline_at !== null) {
    parts.push(image.deadline_at < now ? "past its deadline" : `deadline in ${formatSeconds(image.deadline_at - now)}`);
  }
  return parts.join(", ");
}

/** A summary of the running batch. */
export function describeBatch(slots) {
  if (!slots.length)
    return "Nothing is running. Send sample traffic, generate in the playground, or use the command below.";
  if (isText(slots[0].settings)) {
    const requests = pluralize(new Set(slots.map(({ request_id }) => request_id)).size, "request");
    return `Running: ${pluralize(slots.length, "text")} of ${requests}.`;
  }
  if (slots.length === 1)
    return "One image is running. The next request joins at the next iteration and shares its model calls.";
  const distinct = (pick) => new Set(slots.map(pick)).size;
  const range = (pick, unit) => {
    const values = slots.map(pick);
    const [min, max] = [Math.min(...values), Math.max(...values)];
    return min === max ? `${min} ${unit}` : `${min}–${max} ${unit}`;
  };
  const parts = [
    pluralize(
      distinct(({ request_id }) => request_id),
      "request",
    ),
    pluralize(
      distinct(({ settings }) => settings.scheduler),
      "scheduler",
    ),
    range(({ settings }) => settings.inference_steps, "steps"),
    pluralize(
      distinct(({ settings }) => `${settings.width} ${settings.height}`),
      "size",
    ),
  ];
  const loras = new Set(slots.flatMap(({ settings }) => settings.loras.map(({ name }) => name)));
  if (loras.size) parts.push(pluralize(loras.size, "LoRA"));
  if (distinct(({ model }) => model) > 1) parts.push(`${distinct(({ model }) => model)} models`);
  const paused = slots.filter((image) => image.paused).length;
  return `Running: ${parts.join(", ")}.${paused ? ` ${paused} paused: others go first.` : ""}`;
}

/** How many calls of `iterations` had images of several sizes, and what padding them cost; "" if none had. */
export function describeMixedCalls(iterations) {
  const calls = iterations.filter(({ num_stepped: stepped }) => stepped > 0);
  const mixed = calls.filter(({ call_sizes: sizes = [] }) => sizes.length > 1);
  if (!mixed.length) return "";
  const area = ({ width, height }) => width * height;
  let [used, padded] = [0, 0]; // pixels
  for (const { call_sizes: sizes } of mixed) {
    const largest = Math.max(...sizes.map(area));
    for (const size of sizes) {
      used += area(size) * size.num_rows;
      padded += largest * size.num_rows;
    }
  }
  const latest = mixed
    .at(-1)
    .call_sizes.map(({ width, height }) => `${width} × ${height}`)
    .join(", ");
  const share = formatPercent(mixed.length / calls.length);
  return `${share} of the latest calls had several sizes, last ${latest} px. Smaller ones are padded: ${formatPercent(1 - used / padded)} of these calls.`;
}

/** What an engine with this view computes: "image" or "text". */
export const itemName = ({ batches }) => (batches.length ? "text" : "image");

/** The requests that share a batch, with the number of texts of each. */
export function describeSharing(requests) {
  const named = Object.entries(requests).map(([id, num]) =>
    num > 1 ? `${id.slice(0, 12)} × ${num}` : id.slice(0, 12),
  );
  if (!named.length) return "–"; // it ended before this page was open
  const rest = named.length - MAX_SHARING;
  return rest > 0 ? `${named.slice(0, MAX_SHARING).join(", ")} and ${rest} more` : named.join(", ");
}

/** Whether more than one client shares the engine; else there is nothing to say of it. */
export const hasSeveralClients = ({ shares }) => shares.reduce((total, { num_clients: num }) => total + num, 0) > 1;

/** Whose a slot, a waiting request or a share is; an empty name is hidden, or stands for several. */
export const clientName = ({ share_client: name, num_clients: num = 1 }) =>
  name || (num > 1 ? `${num} others` : "another");

/** What the images of a client wait for: "2 for their turn, 9 for a slot, the next in 1.2 s". */
export function describeWaits(
  { share_client: name, num_paused: paused, num_evicted: evicted, num_waiting: waiting },
  view,
  now,
) {
  const parts = [];
  if (paused) parts.push(`${paused} for their turn`);
  if (evicted) parts.push(`${evicted} for the slot that others took`);
  if (waiting) parts.push(`${waiting} for ${itemName(view) === "text" ? "a batch" : "a slot"}`);
  const next = view.waiting.find((each) => each.share_client === name && each.start_at !== null);
  if (next) parts.push(`the next starts ${formatStart(next.start_at - now)}`);
  return parts.length ? parts.join(", ") : "–";
}

/** A summary of an engine for screen readers. */
export function summarizeEngine(name, view) {
  const { slots, num_slots, num_waiting, rates } = view;
  const median = rates.p50_s === null ? "" : `, median ${formatSeconds(rates.p50_s)}`;
  const images = formatNumber(rates.images_per_s);
  return `${name}: ${slots.length} of ${num_slots} slots in use, ${num_waiting} waiting, ${images} ${itemName(view)}s per second${median}.`;
}

const SLOT_SOURCES = {
  memory: " (auto: as many as a quarter of the free memory holds)",
  maximum: " (auto: the most that it takes)",
  minimum: " (auto: memory is short)",
};

/** The statistics of an engine: [name, value, explanation]. */
export function engineStats(view) {
  const { rates, num_slots, num_waiting, backlog_s, batches } = view;
  const items = `${itemName(view)}s`;
  const sum = (name) => batches.reduce((total, batch) => total + batch[name], 0);
  const window = `in the last ${Math.round(rates.window_s)} seconds`;
  return [
    [items === "texts" ? "Texts/s" : "Images/s", formatNumber(rates.images_per_s), `finished ${window}`],
    items === "texts"
      ? [
          "Padding",
          formatPercent(1 - sum("num_tokens") / sum("padded_tokens")),
          `of the tokens in the latest ${pluralize(batches.length, "batch", "batches")}`,
        ]
      : ["Steps/s", formatNumber(rates.steps_per_s), `model calls of single images ${window}`],
    [
      "Occupancy",
      formatPercent(rates.occupancy),
      `of ${num_slots} slots${SLOT_SOURCES[view.slots_source] ?? ""}; the engine was busy ${formatPercent(rates.busy)} of the time`,
    ],
    ["Batch", formatNumber(rates.mean_batch), `${items} in an iteration, on average ${window}`],
    ["p50", formatSeconds(rates.p50_s), "half of the requests took less, from arrival to end"],
    ["p95", formatSeconds(rates.p95_s), "95 % of the requests took less"],
    ["p99", formatSeconds(rates.p99_s), "99 % of the requests took less"],
    ["Waiting", String(num_waiting), `${items}; all accepted ones are done in ${formatSeconds(backlog_s)}`],
  ];
}

/** Why an engine has no view, or null. */
export function engineNotice({ name, state, view }) {
  if (state === "loading") return `${name} is loading its model; it starts as soon as that is done.`;
  if (state === "draining")
    return `${name} takes no new requests: others go on with those that it has, or it finishes them. Then it ends.`;
  if (state !== "ready")
    return `${name} cannot be reached. The supervisor starts another in its place; its requests are retried.`;
  return view === null ? `${name} is ready; waiting for its first view.` : null;
}

/** A description of the selected slot, or of how to select one. */
export function describeSlot(slot, view, now) {
  if (slot === null) return "Select a slot to see what it holds.";
  const image = view.slots.find((each) => each.slot === slot);
  if (!image) return `Slot ${slot} is free: the next image in the queue joins at the next iteration.`;
  const joined = formatSeconds(Math.max(0, now - image.joined_at));
  const client = hasSeveralClients(view) ? ` of ${clientName(image)}` : "";
  return `Slot ${slot}: ${describeRunning(image, now)}. Request ${image.request_id}${client}, image ${image.index}, by ${image.model}, joined ${joined} ago.`;
}
