// Where the slots are: a ring while it can be read, rows of tiles beyond. Pure.

export const RING_MOST = 12;
const LABEL_PX = 32; // two lines below each picture
const MARGIN_PX = 10;
const HUB_MOST_PX = 62; // radii of the hub, which holds three lines of text
const HUB_LEAST_PX = 42;
const RIM_PX = 4;

/** The places of `num` slots in `width` px: {kind, height, size, radius?, hub?, spots: [{x, y}]}; spots are centres of pictures `size` across. */
export function places(num, width) {
  return num <= RING_MOST ? ring(num, width) : rows(num, width);
}

function ring(num, width) {
  const across = Math.min(width, 430);
  const apart = (size) => num === 1 || 2 * radiusFor(size, across) * Math.sin(Math.PI / num) >= size + LABEL_PX;
  const fits = (size) => apart(size) && hubFor(size, across) >= HUB_LEAST_PX;
  let size = 104;
  while (size > 32 && !fits(size)) size -= 2;
  const radius = radiusFor(size, across);
  const middle = { x: width / 2, y: MARGIN_PX + size / 2 + radius };
  const spots = Array.from({ length: num }, (_, slot) => {
    const angle = (2 * Math.PI * slot) / num - Math.PI / 2;
    return { x: middle.x + radius * Math.cos(angle), y: middle.y + radius * Math.sin(angle) };
  });
  const lowest = Math.max(...spots.map(({ y }) => y + size / 2 + LABEL_PX), middle.y + radius + RIM_PX);
  const hub = Math.min(HUB_MOST_PX, hubFor(size, across));
  return { kind: "ring", height: lowest + MARGIN_PX, size, label: size + 36, radius, hub, middle, spots };
}

const radiusFor = (size, across) => (across - size) / 2 - MARGIN_PX - 10;
const hubFor = (size, across) => radiusFor(size, across) - size / 2 - LABEL_PX - 4; // below the labels of the highest slot

function rows(num, width) {
  const least = width < 500 ? 64 : num > 32 ? 72 : 92;
  const most = Math.max(1, Math.floor(width / least));
  const columns = Math.ceil(num / Math.ceil(num / most));
  const cell = width / columns;
  const size = Math.round(Math.min(76, cell - 22));
  const row = size + LABEL_PX + 12;
  const spots = Array.from({ length: num }, (_, slot) => ({
    x: (0.5 + (slot % columns)) * cell,
    y: MARGIN_PX + size / 2 + Math.floor(slot / columns) * row,
  }));
  return { kind: "rows", height: Math.ceil(num / columns) * row + MARGIN_PX, size, label: cell - 4, spots };
}
