// Lays a graph out in layers, as Sugiyama, Tagawa and Toda (1981) do: loops are broken, each box stands above what it was made from, edges over
// several layers get a place in each, and boxes are ordered by the mean place of their neighbours. Pure.

const SWEEPS = 12; // more change nothing in graphs of a hundred boxes

/**
 * The place of each node and the course of each edge: {width, height, layers: [id[]], places: Map of id → {x, y} (centre), courses:
 * [{edge, points: [x, y][]}]}. `nodes` are ids, `edges` are {product, source}, `size` is {width, height, gapX, gapY} of boxes in px.
 */
export function layOut(nodes, edges, size) {
  const known = new Set(nodes);
  const usable = edges.filter(({ product, source }) => known.has(product) && known.has(source) && product !== source);
  const forward = withoutLoops(nodes, usable);
  const layerOf = layerOfEach(
    nodes,
    forward.map(({ from, to }) => [from, to]),
  );
  const { layers, links } = withDummies(nodes, forward, layerOf);
  order(layers, links);
  const xs = place(layers, links, size);
  const step = size.height + size.gapY;
  const places = new Map();
  layers.forEach((layer, index) =>
    layer.forEach((id) => places.set(id, { x: xs.get(id), y: index * step + size.height / 2 })),
  );
  const courses = forward.map(({ edge, isReversed, path }) => {
    const ids = isReversed ? path.toReversed() : path;
    return { edge, points: ids.map((id) => [places.get(id).x, places.get(id).y]) };
  });
  const width = Math.max(0, ...layers.flat().map((id) => xs.get(id) + (known.has(id) ? size.width / 2 : 0)));
  const real = layers.map((layer) => layer.filter((id) => known.has(id)));
  return {
    width,
    height: Math.max(0, layers.length * step - size.gapY),
    layers: real,
    places: new Map(nodes.map((id) => [id, places.get(id)])),
    courses,
  };
}

/** The edges as {edge, from, to, isReversed}: those that close a loop are turned round. */
function withoutLoops(nodes, edges) {
  const out = groupBy(edges, ({ product }) => product);
  const state = new Map(); // 1: on the path, 2: done
  const reversed = new Set();
  for (const root of nodes) {
    if (state.has(root)) continue;
    const stack = [[root, 0]];
    state.set(root, 1);
    while (stack.length) {
      const top = stack.at(-1);
      const edge = (out.get(top[0]) ?? [])[top[1]++];
      if (edge === undefined) {
        state.set(top[0], 2);
        stack.pop();
      } else if (state.get(edge.source) === 1) reversed.add(edge);
      else if (!state.has(edge.source)) {
        state.set(edge.source, 1);
        stack.push([edge.source, 0]);
      }
    }
  }
  return edges.map((edge) =>
    reversed.has(edge)
      ? { edge, from: edge.source, to: edge.product, isReversed: true }
      : { edge, from: edge.product, to: edge.source, isReversed: false },
  );
}

/** The layer of each node: one below the lowest of what is above it; what has nothing above it stands just above its highest neighbour. */
function layerOfEach(nodes, links) {
  const [down, up] = [groupBy(links, ([from]) => from), groupBy(links, ([, to]) => to)];
  const open = new Map(nodes.map((id) => [id, (up.get(id) ?? []).length]));
  const queue = nodes.filter((id) => open.get(id) === 0);
  const layerOf = new Map(queue.map((id) => [id, 0]));
  for (const id of queue) {
    for (const [, to] of down.get(id) ?? []) {
      layerOf.set(to, Math.max(layerOf.get(to) ?? 0, layerOf.get(id) + 1));
      open.set(to, open.get(to) - 1);
      if (open.get(to) === 0) queue.push(to);
    }
  }
  for (const id of nodes) {
    const below = (down.get(id) ?? []).map(([, to]) => layerOf.get(to));
    if (!up.has(id) && below.length) layerOf.set(id, Math.min(...below) - 1);
  }
  return layerOf;
}

/** The layers with a place for each edge that passes through; adds to each edge its `path` of ids. */
function withDummies(nodes, forward, layerOf) {
  const layers = Array.from({ length: Math.max(-1, ...layerOf.values()) + 1 }, () => []);
  for (const id of nodes) layers[layerOf.get(id)].push(id);
  const links = [];
  forward.forEach((edge, index) => {
    edge.path = [edge.from];
    for (let layer = layerOf.get(edge.from) + 1; layer < layerOf.get(edge.to); layer++) {
      const dummy = `\u0000${index}:${layer}`;
      layers[layer].push(dummy);
      edge.path.push(dummy);
    }
    edge.path.push(edge.to);
    for (let at = 1; at < edge.path.length; at++) links.push([edge.path[at - 1], edge.path[at]]);
  });
  return { layers, links };
}

/** Sort each layer by the mean place of the neighbours above, then below, again and again; keeps the order with the fewest crossings. */
function order(layers, links) {
  const [up, down] = neighbours(links);
  let best = layers.map((layer) => [...layer]);
  let fewest = crossings(layers, down);
  for (let sweep = 0; sweep < SWEEPS && fewest > 0; sweep++) {
    const isDown = sweep % 2 === 0;
    const indices = layers.map((_, index) => index);
    for (const index of isDown ? indices.slice(1) : indices.slice(0, -1).reverse()) {
      const positions = new Map(layers[isDown ? index - 1 : index + 1].map((id, at) => [id, at]));
      const wanted = new Map(
        layers[index].map((id, at) => [
          id,
          mean(((isDown ? up : down).get(id) ?? []).map((other) => positions.get(other))) ?? at,
        ]),
      );
      layers[index].sort((a, b) => wanted.get(a) - wanted.get(b));
    }
    const number = crossings(layers, down);
    if (number < fewest) [fewest, best] = [number, layers.map((layer) => [...layer])];
  }
  best.forEach((layer, index) => layers[index].splice(0, Infinity, ...layer));
}

function crossings(layers, down) {
  let number = 0;
  for (let index = 0; index + 1 < layers.length; index++) {
    const positions = new Map(layers[index + 1].map((id, at) => [id, at]));
    const ends = layers[index].flatMap((id) =>
      (down.get(id) ?? []).map((other) => positions.get(other)).sort((a, b) => a - b),
    );
    for (let a = 0; a < ends.length; a++) for (let b = a + 1; b < ends.length; b++) if (ends[a] > ends[b]) number += 1;
  }
  return number;
}

/** The x of each id: pulled to the mean of its neighbours, never closer to the next than boxes may be. */
function place(layers, links, { width, gapX }) {
  const [up, down] = neighbours(links);
  const spaceOf = (id) => (id.startsWith("\u0000") ? gapX : width + gapX); // an edge that passes needs little
  const xs = new Map();
  for (const layer of layers) {
    let x = 0;
    for (const id of layer) {
      xs.set(id, x + spaceOf(id) / 2);
      x += spaceOf(id);
    }
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const isDown = sweep % 2 === 0;
    for (const layer of isDown ? layers : layers.toReversed()) {
      const pulls = sweep < SWEEPS - 2 ? [isDown ? up : down] : [up, down];
      const wanted = layer.map(
        (id) => mean(pulls.flatMap((each) => each.get(id) ?? []).map((other) => xs.get(other))) ?? xs.get(id),
      );
      spread(layer.map(spaceOf), wanted).forEach((x, at) => xs.set(layer[at], x));
    }
  }
  const left = Math.min(...layers.flat().map((id) => xs.get(id) - (id.startsWith("\u0000") ? 0 : width / 2)));
  for (const [id, x] of xs) xs.set(id, x - left);
  return xs;
}

/** Places as close to `wanted` as the `spaces` allow, in order: blocks that touch move together to their mean. */
function spread(spaces, wanted) {
  const blocks = [];
  wanted.forEach((x, at) => {
    let block = { first: at, num: 1, length: spaces[at], sum: x - spaces[at] / 2 };
    while (blocks.length && startOf(blocks.at(-1)) + blocks.at(-1).length > startOf(block)) {
      const before = blocks.pop();
      block = {
        first: before.first,
        num: before.num + block.num,
        length: before.length + block.length,
        sum: before.sum + block.sum - block.num * before.length,
      };
    }
    blocks.push(block);
  });
  const places = [];
  for (const block of blocks) {
    let x = startOf(block);
    for (let at = block.first; at < block.first + block.num; at++) {
      places.push(x + spaces[at] / 2);
      x += spaces[at];
    }
  }
  return places;
}

const startOf = ({ sum, num }) => sum / num;
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function neighbours(links) {
  const [up, down] = [new Map(), new Map()];
  for (const [from, to] of links) {
    up.set(to, [...(up.get(to) ?? []), from]);
    down.set(from, [...(down.get(from) ?? []), to]);
  }
  return [up, down];
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return groups;
}
