// What a mask means, in the browser: the rules of labkit/masks.py on the trees of labkit/viz/mask_state.py. Nothing here
// touches the page. Cells are a Uint8Array of n * n, row by row: 1 = the query of this row may attend to the key of this column.

const MOST_TOKENS = 512;
const SIGNS = { "&": (a, b) => a & b, "|": (a, b) => a | b };
const single = (number) => (Array.isArray(number) ? number[0] : number); // a batch of one row gives a list of one

// Each rule gets what follows the kind in the tree, and n, and gives (query, key) => may attend.
const RULES = {
  causal: () => (q, k) => k <= q,
  bidirectional: () => () => true,
  sliding_window: ([w, oneSided]) => (oneSided ? (q, k) => k <= q && q - k < w : (q, k) => q - k < w && k - q < w),
  prefix: ([number]) => (q, k) => k <= q || k < single(number),
  hybrid: ([number]) => (q, k) => k <= q || q >= single(number),
  segments: ([ids, inside, fuseFrom]) => {
    const within = (q, k) =>
      q < ids.length && k < ids.length && ids[q] === ids[k] && (inside === "bidirectional" || k <= q);
    if (fuseFrom === null) return within;
    return (q, k) => (q >= fuseFrom ? k <= q : k < fuseFrom && within(q, k));
  },
  padding: ([lengths, side], n) => (side === "right" ? (q, k) => k < lengths[0] : (q, k) => k >= n - lengths[0]),
  from_dense: ([size, text]) => {
    const cells = unpacked(text, size * size);
    return (q, k) => q < size && k < size && cells[q * size + k] === 1;
  },
};

function cellsOf(tree, n) {
  const [kind, ...rest] = tree;
  if (kind in SIGNS) {
    const [first, second] = rest.map((part) => cellsOf(part, n));
    return first.map((cell, i) => SIGNS[kind](cell, second[i]));
  }
  if (kind === "~") return cellsOf(rest[0], n).map((cell) => 1 - cell);
  const allowed = RULES[kind](rest, n);
  const cells = new Uint8Array(n * n);
  for (let q = 0; q < n; q += 1) for (let k = 0; k < n; k += 1) cells[q * n + k] = allowed(q, k) ? 1 : 0;
  return cells;
}

// The mask as Python writes it, with `masks.` before each factory.
function codeOf(tree) {
  const bracketed = (part) => (part[0] in SIGNS ? `(${codeOf(part)})` : codeOf(part));
  const [kind, ...rest] = tree;
  if (kind in SIGNS) return `${bracketed(rest[0])} ${kind} ${bracketed(rest[1])}`;
  if (kind === "~") return `~${bracketed(rest[0])}`;
  const list = (numbers) => `[${numbers.join(", ")}]`;
  const written = {
    sliding_window: ([w, oneSided]) => (oneSided ? `${w}` : `${w}, causal=False`),
    prefix: ([number]) => (Array.isArray(number) ? list(number) : `${number}`),
    hybrid: ([number]) => (Array.isArray(number) ? list(number) : `${number}`),
    segments: ([ids, inside, fuseFrom]) =>
      list(ids) + (inside === "causal" ? "" : `, inside='${inside}'`) + (fuseFrom === null ? "" : `, fuse_from=${fuseFrom}`),
    padding: ([lengths, side]) => list(lengths) + (side === "right" ? "" : `, side='${side}'`),
    from_dense: ([size, text]) => `${size} x ${size}, ${unpacked(text, size * size).reduce((a, b) => a + b, 0)} cells`,
  }[kind];
  return `masks.${kind}(${written ? written(rest) : ""})`;
}

// Completes "a token may attend to ...", as Mask.meaning does.
function meaningOf(tree) {
  const [kind, ...rest] = tree;
  const count = (number) => (number === 1 ? "1 token" : `${number} tokens`);
  const own = "itself and everything before it";
  return {
    "&": ([a, b]) => `(${meaningOf(a)}) and (${meaningOf(b)})`,
    "|": ([a, b]) => `(${meaningOf(a)}) or (${meaningOf(b)})`,
    "~": ([a]) => `every token except (${meaningOf(a)})`,
    causal: () => own,
    bidirectional: () => "every token",
    sliding_window: ([w, oneSided]) =>
      w === 1 ? "itself alone" : `itself and the ${count(w - 1)} ${oneSided ? "before it" : "on either side"}`,
    prefix: ([number]) => `${Array.isArray(number) ? "the prefix of its row" : `the first ${count(number)}`}, ${own}`,
    hybrid: ([number]) =>
      Array.isArray(number)
        ? `${own}; a token after the causal part of its row may attend to every token`
        : `${own}; a token from position ${number} on may attend to every token`,
    segments: ([, inside, fuseFrom]) =>
      (inside === "bidirectional" ? "its own segment" : "itself and what came before it in its own segment") +
      (fuseFrom === null ? "" : `; a token from position ${fuseFrom} on may attend to itself and all before it`),
    padding: ([, side]) => `real tokens (the padding is on the ${side})`,
    from_dense: () => "the cells that were painted or measured",
  }[kind](rest);
}

// The same mask for a sentence of n tokens in place of `before`; as mask_state.fitted.
function fitted(tree, n, before) {
  const [kind, first, ...rest] = tree;
  if (kind in SIGNS) return [kind, fitted(first, n, before), fitted(rest[0], n, before)];
  if (kind === "~") return [kind, fitted(first, n, before)];
  if (kind === "segments" && rest[1] === null && first.length < n) {
    return [kind, [...first, ...Array(n - first.length).fill(first[first.length - 1])], ...rest];
  }
  if (kind === "padding" && first.length === 1) return [kind, [Math.max(0, n - Math.max(0, before - first[0]))], ...rest];
  if (kind === "from_dense" && first < n) return [kind, n, packed(resized(unpacked(rest[0], first * first), first, n))];
  return tree;
}

// ------------------------------------------------------------------------------------------------- painted cells
// In memory { n, which, value }, two Uint8Arrays of n * n; in the state {} or { n, cells: base64 }.

function paintedOf(state, n) {
  if (!state || state.n === undefined) return { n, which: new Uint8Array(n * n), value: new Uint8Array(n * n) };
  const all = unpacked(state.cells, 2 * state.n * state.n);
  const [which, value] = [all.slice(0, state.n * state.n), all.slice(state.n * state.n)];
  return { n, which: resized(which, state.n, n), value: resized(value, state.n, n) };
}

function stateOfPainted({ n, which, value }) {
  if (!which.some(Boolean)) return {};
  const all = new Uint8Array(2 * n * n);
  all.set(which);
  all.set(value.map((cell, i) => cell & which[i]), n * n);
  return { n, cells: packed(all) };
}

function withPainted(cells, painted) {
  return cells.map((cell, i) => (painted.which[i] ? painted.value[i] : cell));
}

function resized(cells, size, n) {
  if (size === n) return cells;
  const made = new Uint8Array(n * n);
  for (let q = 0; q < Math.min(size, n); q += 1) {
    made.set(cells.subarray(q * size, q * size + Math.min(size, n)), q * n);
  }
  return made;
}

// Eight cells to a byte, the first one the highest bit, as numpy's packbits.
function packed(cells) {
  const bytes = new Uint8Array(Math.ceil(cells.length / 8));
  cells.forEach((cell, i) => { if (cell) bytes[i >> 3] |= 0x80 >> (i & 7); });
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}

function unpacked(text, count) {
  const data = atob(text);
  const cells = new Uint8Array(count);
  for (let i = 0; i < count; i += 1) cells[i] = (data.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1;
  return cells;
}

// ---------------------------------------------------------------------------------------------------- sentences
// A word, with what an apostrophe joins to it, or one other sign; as mask_state.split_words.
function splitWords(sentence) {
  const letter = "[\\p{L}\\p{N}_]";
  return sentence.match(new RegExp(`${letter}+(?:['’]${letter}+)*|[^\\p{L}\\p{N}_\\s]`, "gu")) ?? [];
}

// The tokens at these positions in words. Up to six are all named, of more than three in a row only the first and the last.
function listed(tokens, positions) {
  if (!positions.length) return "nothing";
  const name = (i) => named(tokens, i);
  const runs = [];
  for (const i of positions) {
    if (runs.length && i === runs[runs.length - 1].at(-1) + 1) runs[runs.length - 1].push(i);
    else runs.push([i]);
  }
  const short = positions.length <= 6;
  const parts = runs.flatMap((run) => (short || run.length < 4 ? run.map(name) : [`${name(run[0])} to ${name(run.at(-1))}`]));
  const more = parts.length > 8 ? `, and ${parts.length - 8} more` : "";
  return parts.slice(0, 8).join(", ") + more;
}

// The simplest named mask with exactly these cells, or null: what was painted may have a name.
function recognised(cells, n) {
  const trees = [["bidirectional"], ["causal"]];
  for (let w = 1; w < n; w += 1) trees.push(["sliding_window", w, true], ["sliding_window", w, false]);
  for (let i = 1; i < n; i += 1) trees.push(["prefix", i], ["hybrid", i]);
  return trees.find(([kind, ...rest]) => {
    const allowed = RULES[kind](rest, n);
    return cells.every((cell, i) => cell === (allowed(Math.floor(i / n), i % n) ? 1 : 0));
  }) ?? null;
}

// ------------------------------------------------------------------------------- the two slots A and B of the page
// { a: { not, tree }, sign: "" | "&" | "|", b: { not, tree } or null }; every tree has exactly one such form.
function slotsOf(tree) {
  const slot = (part) => (part[0] === "~" ? { not: true, tree: part[1] } : { not: false, tree: part });
  if (tree[0] in SIGNS) return { a: slot(tree[1]), sign: tree[0], b: slot(tree[2]) };
  return { a: slot(tree), sign: "", b: null };
}

function treeOfSlots({ a, sign, b }) {
  const part = ({ not, tree }) => (not ? ["~", tree] : tree);
  return sign ? [sign, part(a), part(b)] : part(a);
}
