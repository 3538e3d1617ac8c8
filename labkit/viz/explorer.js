// The attention explorer: which head, which mask, which query. Weights that the page does not hold are asked of Python;
// until they come, or where there is no Python, a coarse picture is shown, with a note.

const MEASURES = { entropy: "entropy", future: "future mass", distance: "mean distance" };
const NAMES = ["causal", "bidirectional"];
const PATIENCE = 500; // milliseconds until a note explains a coarse picture

function render({ model, el }) {
  const get = (name) => model.get(name);
  const [tokens, layers, heads] = ["tokens", "layers", "heads"].map(get);
  const n = tokens.length;
  const count = layers * heads;
  const views = { before: NAMES[0], after: NAMES[1], difference: "difference" };
  const set = (values) => {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  };
  let held = null; // the head that is shown: { of: "layer.head", size, exact, maps }
  let pictures = null; // the same of all heads, coarse
  let left = false;
  let waiting = 0;
  const key = () => `${get("layer")}.${get("head")}`;
  const at = () => get("layer") * heads + get("head");
  const current = () => (held?.of === key() ? held : pictures?.[at()]);

  // --------------------------------------------------------------------------------------------------- the parts
  const sliders = { layer: slider("layer", layers), head: slider("head", heads) };
  const group = `labkit-view-${Math.random()}`;
  const choice = element("div", "ex-switch", { role: "radiogroup", "aria-label": "attention mask" });
  const strip = element("div", "ex-strip", { role: "group", "aria-label": "tokens: choose the query to follow" });
  const words = tokens.map((token, i) => {
    const word = element("button", "ex-token", { type: "button", tabindex: i ? "-1" : "0" }, token);
    word.addEventListener("click", () => follow(i));
    word.addEventListener("keydown", (event) => roam(event, words, i, 0));
    return word;
  });
  const map = makeMap(tokens, describe, follow);
  const note = element("p", "ex-note");
  const sentence = element("p", "ex-line", { "aria-live": "polite" });
  const spoken = element("p", "lk-hidden", { "aria-live": "polite" });
  const legend = element("canvas", "ex-scale", { width: 96, height: 10, "aria-hidden": "true" });
  const [low, high] = [element("span"), element("span")];
  const lift = element("input", "", { type: "checkbox" });
  const order = element("select", "", { "aria-label": "order of the small pictures" });
  for (const [value, text] of Object.entries({ layer: "layer and head", ...MEASURES })) order.append(element("option", "", { value }, text));
  const rising = element("button", "ex-rising", { type: "button" });
  const all = element("div", "ex-all", { role: "listbox", "aria-label": "all heads" });
  const small = Array.from({ length: count }, (_, i) => picture(i));
  strip.append(...words);
  for (const [value, text] of Object.entries(views)) choice.append(radio(value, text));
  map.el.addEventListener("spoken", (event) => { spoken.textContent = event.detail; });
  lift.addEventListener("change", () => set({ lifted: lift.checked }));
  order.addEventListener("change", () => set({ sort: order.value }));
  rising.addEventListener("click", () => set({ rising: !get("rising") }));
  const card = element("div", "labkit-widget labkit-explorer", { "data-lm-suppress-shortcuts": "true" },
    element("div", "ex-controls", {}, sliders.layer.el, sliders.head.el, choice),
    strip, sentence, spoken,
    element("div", "ex-body", {},
      element("div", "ex-large", {}, map.el, note,
        element("div", "ex-legend", {}, low, legend, high, element("label", "ex-lift", {}, lift, "lift small weights"))),
      element("div", "ex-small", {},
        element("div", "ex-order", {}, element("label", "", {}, element("span", "lk-name", {}, "all heads by "), order), rising), all)));
  el.append(card);

  function slider(what, length) {
    const input = element("input", "", { type: "range", min: 0, max: length - 1, step: 1, "aria-label": what });
    const now = element("output", "ex-now");
    input.disabled = length === 1;
    input.addEventListener("input", () => set({ [what]: Number(input.value) }));
    const show = (number) => {
      input.value = number;
      input.setAttribute("aria-valuetext", `${what} ${number}`);
      now.textContent = number;
    };
    return { el: element("label", "ex-slider", {}, element("span", "lk-name", {}, what), input, now), show };
  }

  function radio(value, text) {
    const input = element("input", "", { type: "radio", name: group, value });
    input.addEventListener("change", () => set({ view: value }));
    return element("label", "ex-choice", {}, input, element("span", "", {}, text));
  }

  function picture(i) {
    const canvas = element("canvas", "", { "aria-hidden": "true" });
    const option = element("div", "ex-picture", { role: "option", tabindex: "-1" }, canvas, element("span", "ex-where"), element("span", "ex-value"));
    const choose = () => set({ layer: Math.floor(i / heads), head: i % heads });
    option.addEventListener("click", choose);
    option.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        choose();
        event.preventDefault();
      } else {
        const shown = [...all.children];
        const columns = shown.filter((other) => other.offsetTop === shown[0].offsetTop).length;
        roam(event, shown, shown.indexOf(option), columns);
      }
    });
    return { option, canvas };
  }

  // The arrow keys move among `options`; of rows of `columns`, also up and down.
  function roam(event, options, i, columns) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -i, End: options.length - 1 - i };
    if (columns) Object.assign(steps, { ArrowUp: -columns, ArrowDown: columns });
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = options[i + steps[event.key]];
    if (!next) return;
    for (const option of options) option.setAttribute("tabindex", option === next ? "0" : "-1");
    next.focus();
  }

  function follow(i) {
    set({ query: get("query") === i ? null : i });
  }

  // ---------------------------------------------------------------------------------------------------- the weights
  // Another layer or head, or its weights have come.
  async function arrive() {
    const [layer, head] = [get("layer"), get("head")];
    sliders.layer.show(layer);
    sliders.head.show(head);
    showHead();
    const kept = get("held").find((entry) => entry.layer === layer && entry.head === head);
    if (!kept) return;
    if (kept.size < n) model.send?.({ ask: [layer, head] });
    await receive(kept, kept.bytes);
  }

  async function receive({ layer, head, size }, bytes) {
    const weights = await unpackedHead(bytes, size, n);
    const of = `${layer}.${head}`;
    if (left || of !== key() || (held?.of === of && held.exact)) return;
    held = { ...weights, of };
    showHead();
  }

  // ---------------------------------------------------------------------------------------------------- the drawing
  function showHead() {
    const head = current();
    if (!head) return;
    const [view, lifted, query] = [get("view"), get("lifted"), get("query")];
    map.draw(head, view, lifted, query);
    const { top } = viewed(head, view);
    const difference = view === "difference";
    low.textContent = difference ? `−${near(top)}` : "0";
    high.textContent = difference ? `+${near(top)} change` : `${near(top)} weight`;
    const pen = legend.getContext("2d");
    for (let x = 0; x < 96; x += 1) {
      const share = difference ? (2 * x) / 95 - 1 : x / 95;
      pen.fillStyle = cssColour(depth(share, 1, lifted), view);
      pen.fillRect(x, 0, 1, 10);
    }
    lift.checked = lifted;
    for (const input of choice.querySelectorAll("input")) input.checked = input.value === view;
    showNote(head);
    small.forEach(({ option }, i) => {
      option.setAttribute("aria-selected", String(i === at()));
      option.setAttribute("tabindex", i === at() ? "0" : "-1");
    });
    showQuery(head, view, lifted, query);
  }

  // That the picture is coarse, once it is likely to stay so.
  function showNote(head) {
    clearTimeout(waiting);
    note.hidden = true;
    if (head.exact) return;
    const block = Math.round(n / head.size);
    waiting = setTimeout(() => {
      note.textContent = `A coarse picture: each cell is the share of attention on about ${block} tokens, averaged over about ${block} ` +
        `queries. This page does not hold the weights of this head; they come from Python, if it is still running.`;
      note.hidden = false;
    }, PATIENCE);
  }

  function showQuery(head, view, lifted, query) {
    const shaded = query !== null && head.exact ? viewed(head, view) : null;
    words.forEach((word, i) => {
      const deep = shaded ? depth(shaded.values[query * n + i], shaded.top, lifted) : 0;
      word.style.background = shaded ? cssColour(deep, view) : "";
      word.style.color = Math.abs(deep) > 0.5 ? "#ffffff" : "";
      word.setAttribute("aria-pressed", String(i === query));
      if (shaded) word.title = (view === "difference" ? signed : exactly)(shaded.values[query * n + i]);
      else word.removeAttribute("title");
    });
    sentence.textContent = summary(head, view, query);
    map.describe(sentence.textContent);
  }

  const future = (row, q) => row.subarray(q + 1).reduce((sum, weight) => sum + weight, 0);

  // The head, or the query that is followed, in one line.
  function summary(head, view, query) {
    const where = `layer ${get("layer")} head ${get("head")}, ${views[view]}`;
    const one = view === "after" ? 1 : 0; // the set of a view that is not the difference
    if (query === null || !head.exact) {
      const number = (measure, digits, unit) => {
        const values = get("measures")[measure].map((ofSet) => ofSet[at()].toFixed(digits));
        return `${MEASURES[measure]} ${view === "difference" ? values.join(" → ") : values[one]}${unit}`;
      };
      const hint = query === null ? " Click a token to follow it." : "";
      return `${where}: ${number("entropy", 2, " nats")}, ${number("future", 2, "")}, ${number("distance", 1, " tokens")}.${hint}`;
    }
    const rows = head.maps.map((weights) => weights.subarray(query * n, (query + 1) * n));
    const futures = rows.map((row) => near(future(row, query)));
    const token = (k) => named(tokens, k);
    const from = `${where}, query ${token(query)}: `;
    if (view === "difference") {
      const change = rows[0].map((weight, i) => rows[1][i] - weight);
      const [most, least] = [change.indexOf(Math.max(...change)), change.indexOf(Math.min(...change))];
      if (change[most] <= 0 && change[least] >= 0) return `${from}no change.`;
      return `${from}most gained ${token(most)} (${nearSigned(change[most])}), most lost ${token(least)} ` +
        `(${nearSigned(change[least])}); future mass ${futures.join(" → ")}.`;
    }
    const row = rows[one];
    const best = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 3).filter((k, i) => i === 0 || row[k] >= 0.05);
    const targets = best.map((k) => `${token(k)} (${near(row[k])})`).join(", ");
    return `${from}attends most to ${targets}; future mass ${futures[one]}.`;
  }

  // The tooltip of a cell.
  function describe(q, k) {
    const head = current();
    if (!head) return [];
    if (!head.exact) {
      const [i, j] = [q, k].map((position) => Math.floor(((position + 1) * head.size - 1) / n));
      const span = (cell) => [Math.floor((cell * n) / head.size), Math.floor(((cell + 1) * n) / head.size) - 1];
      const weights = head.maps.map((map, set) => `${NAMES[set]} about ${near(map[i * head.size + j])}`);
      const name = ([a, b]) => (a === b ? `token ${a}` : `tokens ${a} to ${b}`);
      return [`${name(span(i))} on ${name(span(j))}, together:`, ...weights];
    }
    const weights = head.maps.map((map) => map[q * n + k]);
    const lines = weights.map((weight, set) => `${NAMES[set]} ${exactly(weight)}`);
    lines.push(`change ${signed(weights[1] - weights[0])}`);
    return [`"${tokens[q]}" (${q}) attends to "${tokens[k]}" (${k})${k > q ? ", its future" : ""}`, ...lines];
  }

  function showPictures() {
    if (!pictures) return;
    const [view, lifted, sort] = [get("view"), get("lifted"), get("sort")];
    const value = (i) => {
      const numbers = get("measures")[sort].map((ofSet) => ofSet[i]);
      return view === "difference" ? numbers[1] - numbers[0] : numbers[view === "after" ? 1 : 0];
    };
    const direction = get("rising") ? 1 : -1;
    const places = small.map((_, i) => i);
    if (sort !== "layer") places.sort((a, b) => direction * (value(a) - value(b)) || a - b);
    small.forEach(({ option, canvas }, i) => {
      painted(pictures[i], view, lifted, canvas);
      const [layer, head] = [Math.floor(i / heads), i % heads];
      const number = sort === "layer" ? "" : (view === "difference" && value(i) > 0 ? "+" : "") + value(i).toFixed(2).replace("-", "−");
      option.children[1].textContent = `${layer}·${head}`;
      option.children[2].textContent = number;
      option.setAttribute("aria-label", `layer ${layer} head ${head}${number && `, ${MEASURES[sort]} ${number}`}`);
    });
    all.replaceChildren(...places.map((i) => small[i].option));
    order.value = sort;
    rising.hidden = sort === "layer";
    rising.textContent = get("rising") ? "lowest first" : "highest first";
  }

  function showAll() {
    showPictures();
    showHead();
  }

  async function begin() {
    pictures = await unpackedPictures(get("pictures"), count);
    if (left) return;
    showPictures();
    await arrive();
    card.dataset.ready = "true";
  }

  const handlers = {
    "change:layer": arrive, "change:head": arrive, "change:held": arrive, "change:view": showAll, "change:lifted": showAll,
    "change:query": showHead, "change:sort": showPictures, "change:rising": showPictures,
    "msg:custom": (head, buffers) => { if (buffers?.length) receive(head, buffers[0]); },
  };
  for (const [event, call] of Object.entries(handlers)) model.on(event, call);
  begin();
  return () => {
    left = true;
    clearTimeout(waiting);
    for (const [event, call] of Object.entries(handlers)) model.off(event, call);
  };
}

export default { render };
