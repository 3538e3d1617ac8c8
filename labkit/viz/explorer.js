// The attention explorer: which head, which mask, which query. Weights that the page does not hold are asked of Python;
// until they come, or where there is no Python, a coarse picture stands in and is called one.

const MEASURES = { entropy: "entropy", future: "future mass", distance: "mean distance" };
const MOST_KEPT = 48e6; // bytes of weights that the page keeps
const PATIENCE = 500; // milliseconds until weights that were asked for are missed

function render({ model, el }) {
  const get = (name) => model.get(name);
  const [tokens, names, layers, heads] = ["tokens", "names", "layers", "heads"].map(get);
  const n = tokens.length;
  const sets = names.length;
  const count = layers.length * heads;
  const views = sets > 1 ? { before: names[0], after: names[1], difference: "difference" } : { before: names[0] };
  const set = (values) => {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  };
  const exact = new Map(); // "layer.head" -> an exact head, oldest first
  const library = new Map(get("library").map((each) => [`${each.layer}.${each.head}`, each]));
  let coarse = null; // the head on show as the notebook keeps it
  let pictures = null;
  let left = false;
  let waiting = 0;
  const name = () => `${get("layer")}.${get("head")}`;
  const at = () => layers.indexOf(get("layer")) * heads + get("head");

  // --------------------------------------------------------------------------------------------------- the parts
  const sliders = { layer: slider("layer", layers.length), head: slider("head", heads) };
  const group = `labkit-view-${Math.random()}`;
  const choice = part("div", "ex-switch", { role: "radiogroup", "aria-label": "attention mask" });
  const strip = part("div", "ex-strip", { role: "group", "aria-label": "tokens: choose the query to follow" });
  const words = tokens.map((token, i) => {
    const word = part("button", "ex-token", { type: "button", tabindex: i ? "-1" : "0" }, token);
    word.addEventListener("click", () => follow(i));
    word.addEventListener("keydown", (event) => roam(event, words, i, 0));
    return word;
  });
  const map = makeMap(tokens, lines, follow);
  const note = part("p", "ex-note");
  const sentence = part("p", "ex-line", { "aria-live": "polite" });
  const spoken = part("p", "ex-hidden", { "aria-live": "polite" });
  const legend = part("canvas", "ex-scale", { width: 96, height: 10, "aria-hidden": "true" });
  const [low, high] = [part("span", ""), part("span", "")];
  const lift = part("input", "", { type: "checkbox" });
  const order = part("select", "", { "aria-label": "order of the small pictures" });
  for (const [value, text] of Object.entries({ layer: "layer and head", ...MEASURES })) order.append(part("option", "", { value }, text));
  const rising = part("button", "ex-rising", { type: "button" });
  const all = part("div", "ex-all", { role: "listbox", "aria-label": "all heads" });
  const small = Array.from({ length: count }, (_, i) => picture(i));
  strip.append(...words);
  for (const [value, text] of Object.entries(views)) choice.append(radio(value, text));
  map.el.addEventListener("spoken", (event) => { spoken.textContent = event.detail; });
  lift.addEventListener("change", () => set({ lifted: lift.checked }));
  order.addEventListener("change", () => set({ sort: order.value }));
  rising.addEventListener("click", () => set({ rising: !get("rising") }));
  const card = part("div", "labkit-explorer", { "data-lm-suppress-shortcuts": "true" },
    part("div", "ex-controls", {}, sliders.layer.el, sliders.head.el, ...(sets > 1 ? [choice] : [])),
    strip, sentence, spoken,
    part("div", "ex-body", {},
      part("div", "ex-large", {}, map.el, note,
        part("div", "ex-legend", {}, low, legend, high, part("label", "ex-lift", {}, lift, "lift small weights"))),
      part("div", "ex-small", {},
        part("div", "ex-order", {}, part("label", "", {}, part("span", "ex-name", {}, "all heads by "), order), rising), all)));
  el.append(card);

  function slider(what, length) {
    const input = part("input", "", { type: "range", min: 0, max: length - 1, step: 1, "aria-label": what });
    const now = part("output", "ex-now");
    input.disabled = length === 1;
    input.addEventListener("input", () => set({ [what]: what === "layer" ? layers[input.value] : Number(input.value) }));
    const show = (index, number) => {
      input.value = index;
      input.style.setProperty("--done", length > 1 ? index / (length - 1) : 1);
      input.setAttribute("aria-valuetext", `${what} ${number}`);
      now.textContent = number;
    };
    return { el: part("label", "ex-slider", {}, part("span", "ex-name", {}, what), input, now), show };
  }

  function radio(value, text) {
    const input = part("input", "", { type: "radio", name: group, value });
    input.addEventListener("change", () => set({ view: value }));
    return part("label", "ex-choice", {}, input, part("span", "", {}, text));
  }

  function picture(i) {
    const canvas = part("canvas", "", { "aria-hidden": "true" });
    const option = part("div", "ex-picture", { role: "option", tabindex: "-1" }, canvas, part("span", "ex-where"), part("span", "ex-value"));
    const choose = () => set({ layer: layers[Math.floor(i / heads)], head: i % heads });
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

  // The arrow keys move among `all` elements; of rows of `columns`, also up and down.
  function roam(event, among, i, columns) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -i, End: among.length - 1 - i };
    if (columns) Object.assign(steps, { ArrowUp: -columns, ArrowDown: columns });
    const next = event.key in steps ? among[i + steps[event.key]] : null;
    if (event.key in steps) event.preventDefault();
    if (!next) return;
    among.forEach((other) => other.setAttribute("tabindex", "-1"));
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  function follow(i) {
    set({ query: get("query") === i ? null : i });
  }

  // ---------------------------------------------------------------------------------------------------- the weights
  function current() {
    return exact.get(name()) ?? (coarse?.of === name() ? coarse : null) ?? pictures?.[at()] ?? null;
  }

  async function keep(key, bytes, size) {
    const head = await unpackedHead(bytes, size, n, sets);
    if (left) return;
    if (head.exact) {
      exact.set(key, head);
      for (const oldest of exact.keys()) {
        if (exact.size * sets * n * n * 4 <= MOST_KEPT || exact.size <= 2) break;
        if (oldest !== name()) exact.delete(oldest);
      }
    } else {
      coarse = { ...head, of: key };
    }
    if (key === name()) showHead();
  }

  // What the notebook keeps of the head on show; if that is coarse, the exact weights are asked for.
  async function receive() {
    const shown = get("shown");
    if (shown?.bytes === undefined) return;
    const key = `${shown.layer}.${shown.head}`;
    if (shown.size < n && !exact.has(key)) model.send?.({ ask: [shown.layer, shown.head] });
    await keep(key, shown.bytes, shown.size);
  }

  function answer(content, buffers) {
    if (buffers?.length) keep(`${content.layer}.${content.head}`, buffers[0], n);
  }

  async function arrive() {
    const [layer, head] = [get("layer"), get("head")];
    sliders.layer.show(layers.indexOf(layer), layer);
    sliders.head.show(head, head);
    const saved = library.get(name());
    if (saved && !exact.has(name())) await keep(name(), saved.bytes, n);
    else showHead();
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
    const each = Math.round(n / head.size);
    waiting = setTimeout(() => {
      note.textContent = `A coarse picture: each cell is the share of attention on about ${each} tokens, averaged over about ${each} ` +
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
    sentence.textContent = said(head, view, query);
    map.say(sentence.textContent);
  }

  const quoted = (i) => (tokens.indexOf(tokens[i]) === tokens.lastIndexOf(tokens[i]) ? `"${tokens[i]}"` : `"${tokens[i]}" (${i})`);
  const future = (weights, q) => weights.subarray(q * n + q + 1, (q + 1) * n).reduce((sum, weight) => sum + weight, 0);

  // The head, or the query that is followed, in one line.
  function said(head, view, query) {
    const where = `layer ${get("layer")} head ${get("head")}, ${views[view]}`;
    if (query === null || !head.exact) {
      const number = (key, digits, unit) => {
        const values = get("measures")[key].map((each) => each[at()]);
        const told = view === "difference" ? values : [values[view === "after" ? 1 : 0]];
        return `${MEASURES[key]} ${told.map((value) => value.toFixed(digits)).join(" → ")}${unit}`;
      };
      const rest = query === null ? " Click a token to follow it." : "";
      return `${where}: ${number("entropy", 2, " nats")}, ${number("future", 2, "")}, ${number("distance", 1, " tokens")}.${rest}`;
    }
    const rows = head.maps.map((weights) => weights.subarray(query * n, (query + 1) * n));
    const from = `${where}, query ${quoted(query)}: `;
    if (view === "difference") {
      const change = rows[0].map((weight, i) => rows[1][i] - weight);
      const [most, least] = [change.indexOf(Math.max(...change)), change.indexOf(Math.min(...change))];
      const [then, now] = head.maps.map((weights) => future(weights, query));
      if (change[most] <= 0 && change[least] >= 0) return `${from}no change.`;
      return `${from}most gained ${quoted(most)} (${nearSigned(change[most])}), most lost ${quoted(least)} ` +
        `(${nearSigned(change[least])}); future mass ${near(then)} → ${near(now)}.`;
    }
    const weights = rows[view === "after" ? 1 : 0];
    const best = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 3).filter((k, i) => i === 0 || weights[k] >= 0.05);
    const looks = best.map((k) => `${quoted(k)} (${near(weights[k])})`).join(", ");
    return `${from}looks most at ${looks}; future mass ${near(future(head.maps[view === "after" ? 1 : 0], query))}.`;
  }

  // What the tooltip says of a cell.
  function lines(q, k) {
    const head = current();
    if (!head.exact) {
      const [i, j] = [q, k].map((position) => Math.floor(((position + 1) * head.size - 1) / n));
      const span = (cell) => [Math.floor((cell * n) / head.size), Math.floor(((cell + 1) * n) / head.size) - 1];
      const told = head.maps.map((map, set) => `${names[set]} about ${near(map[i * head.size + j])}`);
      const name = ([a, b]) => (a === b ? `token ${a}` : `tokens ${a} to ${b}`);
      return [`${name(span(i))} on ${name(span(j))}, together:`, ...told];
    }
    const weights = head.maps.map((map) => map[q * n + k]);
    const told = weights.map((weight, set) => `${names[set]} ${exactly(weight)}`);
    if (sets > 1) told.push(`change ${signed(weights[1] - weights[0])}`);
    return [`"${tokens[q]}" (${q}) looks at "${tokens[k]}" (${k})${k > q ? ", its future" : ""}`, ...told];
  }

  function showPictures() {
    if (!pictures) return;
    const [view, lifted, sort] = [get("view"), get("lifted"), get("sort")];
    const value = (i) => {
      const numbers = get("measures")[sort].map((each) => each[i]);
      return view === "difference" ? numbers[1] - numbers[0] : numbers[view === "after" ? 1 : 0];
    };
    const direction = get("rising") ? 1 : -1;
    const places = small.map((_, i) => i);
    if (sort !== "layer") places.sort((a, b) => direction * (value(a) - value(b)) || a - b);
    small.forEach(({ option, canvas }, i) => {
      painted(pictures[i], view, lifted, canvas);
      const [layer, head] = [layers[Math.floor(i / heads)], i % heads];
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
    for (const i of exact.keys()) exact.delete(i);
    pictures = await unpackedPictures(get("pictures"), n, sets, count);
    if (left) return;
    showPictures();
    await Promise.all([arrive(), receive()]);
    card.dataset.ready = "true";
  }

  const listened = {
    "change:layer": arrive, "change:head": arrive, "change:shown": receive, "change:view": showAll, "change:lifted": showAll,
    "change:query": showHead, "change:sort": showPictures, "change:rising": showPictures, "msg:custom": answer,
  };
  for (const [event, call] of Object.entries(listened)) model.on(event, call);
  begin();
  return () => {
    left = true;
    clearTimeout(waiting);
    for (const [event, call] of Object.entries(listened)) model.off(event, call);
  };
}

export default { render };
