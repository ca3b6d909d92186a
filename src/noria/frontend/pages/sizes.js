// Sizes to choose from, made of a model's bounds. Pure.

/** Sizes to choose from: of the default's area in a few shapes, as far as `bounds` of `width` and `height` allow. */
export function sizesWithin({ width, height }) {
  const area = width.default * height.default;
  const shapes = [["Default", width.default / height.default], ["Square", 1], ["Landscape", 3 / 2], ["Portrait", 2 / 3], ["Wide", 16 / 9]];
  const sizes = shapes.map(([name, ratio]) => ({
    name,
    width: name === "Default" ? width.default : nearest(Math.sqrt(area * ratio), width),
    height: name === "Default" ? height.default : nearest(Math.sqrt(area / ratio), height),
  }));
  sizes.push({ name: "Largest", width: largest(width), height: largest(height) });
  const seen = new Set();
  return sizes.filter((size) => {
    const key = `${size.width}×${size.height}`;
    return !seen.has(key) && seen.add(key);
  });
}

const largest = ({ max, multiple }) => Math.floor(max / multiple) * multiple;

function nearest(side, bounds) {
  const least = Math.ceil(bounds.min / bounds.multiple) * bounds.multiple;
  return Math.min(Math.max(Math.round(side / bounds.multiple) * bounds.multiple, least), largest(bounds));
}
