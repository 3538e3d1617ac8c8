// What the attention explorer is given, unpacked: weights of a head, small pictures of all heads; and their colours.

const NONE = [247, 251, 255]; // a weight of 0; as in the static pictures
const MOST = [8, 48, 107];
const LESS = [179, 88, 6]; // the difference: less, same, more
const SAME = [247, 247, 247];
const MORE = [84, 39, 136];

async function inflated(view) {
  const stream = new Blob([view]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A head: {size, exact, maps: [before, after], each a Float32Array (size x size)}.
async function unpackedHead(bytes, size, n) {
  const numbers = new Float32Array((await inflated(bytes)).buffer);
  const maps = [0, 1].map((set) => numbers.subarray(set * size * size, (set + 1) * size * size));
  return { size, exact: size === n, maps };
}

// All small pictures, in the same form, by the number of the map (layer by layer).
async function unpackedPictures(pictures, count) {
  const { size, peaks } = pictures;
  const shades = await inflated(pictures.bytes);
  const area = size * size;
  return Array.from({ length: count }, (_, at) => ({
    size,
    exact: false,
    maps: [0, 1].map((set) => {
      const start = (set * count + at) * area;
      return Float32Array.from(shades.subarray(start, start + area), (shade) => (shade / 255) * peaks[set][at]);
    }),
  }));
}

// What a view shows: {values, top}; values from 0 to top, those of the difference from -top to top.
function viewed(head, view) {
  const [before, after] = head.maps;
  let top = 1e-9;
  if (view === "difference") {
    const values = before.map((weight, i) => after[i] - weight);
    for (const value of values) top = Math.max(top, Math.abs(value));
    return { values, top };
  }
  for (const map of head.maps) for (const value of map) top = Math.max(top, value); // one scale for both
  return { values: view === "after" ? after : before, top };
}

// The share of the way to the darkest shade, -1 to 1.
function depth(value, top, lifted) {
  const share = Math.min(1, Math.abs(value) / top);
  return (value < 0 ? -1 : 1) * (lifted ? Math.sqrt(share) : share);
}

function colour(deep, view) {
  const [from, to] = view !== "difference" ? [NONE, MOST] : [SAME, deep < 0 ? LESS : MORE];
  const share = Math.abs(deep);
  return from.map((a, i) => Math.round(a + (to[i] - a) * share));
}

const cssColour = (deep, view) => `rgb(${colour(deep, view).join(" ")})`;

// The cells as an image of one pixel each, on a canvas that is given or made.
function painted(head, view, lifted, canvas = document.createElement("canvas")) {
  const { values, top } = viewed(head, view);
  canvas.width = canvas.height = head.size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(head.size, head.size);
  values.forEach((value, i) => {
    const [r, g, b] = colour(depth(value, top, lifted), view);
    image.data.set([r, g, b, 255], i * 4);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

// A weight with the four digits that float16 holds.
const exactly = (weight) => String(Number(weight.toPrecision(4)));
const signed = (change) => (change > 0 ? "+" : change < 0 ? "−" : "") + exactly(Math.abs(change));
const near = (weight) => (weight > 0 && weight < 0.005 ? "<0.01" : weight.toFixed(2));
const nearSigned = (change) => (change < 0 ? "−" : "+") + near(Math.abs(change));
