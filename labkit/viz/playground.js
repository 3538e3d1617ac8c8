// The mask playground: a sentence, a mask composed of two slots and painted by hand, and the model that is attached. All
// cells are computed here; Python receives what was composed and painted, and computes only the answers of a model.

const PAINTED_OPEN = "#56b4e9"; // painted cells too small for a dot
const PAINTED_CLOSED = "#cdb37f";
const PIXELS = { open: pixel(OPEN), closed: pixel(CLOSED), paintedOpen: pixel(PAINTED_OPEN), paintedClosed: pixel(PAINTED_CLOSED) };
const NARROW = 280; // pixels
const TYPING = 350; // milliseconds of rest before a model's tokenizer is asked

function render({ model, el }) {
  const sentence = element("input", "pg-text", { type: "text", "aria-label": "sentence", spellcheck: "false", autocomplete: "off" });
  const splitter = element("p", "pg-hint");
  const notice = element("p", "pg-wrong", { role: "status" });
  const sign = element("select", "pg-sign", { "aria-label": "how A and B are combined" });
  for (const [value, text] of [["", "combine with …"], ["&", "and"], ["|", "or"]]) sign.append(element("option", "", { value }, text));
  const slots = { a: makeSlot("A", (slot, key) => turn("a", slot, key)), b: makeSlot("B", (slot, key) => turn("b", slot, key)) };
  const code = element("code", "pg-code");
  const meaning = element("p", "pg-meaning");
  const undo = element("button", "pg-button", { type: "button" }, "Undo");
  const clear = element("button", "pg-button", { type: "button" }, "Clear painted");
  const rule = element("p", "pg-hint");
  const strip = element("div", "pg-strip", { "aria-hidden": "true" }); // the sentence in words is said by `words`
  const words = element("p", "pg-words", { "aria-live": "polite" });
  const legend = element("p", "pg-legend");
  const grid = makeGrid("attention mask: rows are queries, columns are keys", {
    hover, begin, drag, end, key,
    words: (q, k) => {
      const tokens = model.get("tokens");
      const painted = view.painted.which[q * tokens.length + k] ? ", painted" : "";
      return `${visible(tokens[q], true)} ${allowed(q, k) ? "may" : "may not"} attend to ${visible(tokens[k], true)}${painted}`;
    },
    selected: allowed,
  });
  const panel = makePanel(model, (values) => change(values, "panel", { undoable: false }), hover);
  const card = element("div", "labkit-widget labkit-playground", { "data-lm-suppress-shortcuts": "true" },
    element("label", "pg-sentence", {}, element("span", "lk-name", {}, "sentence"), sentence), notice, splitter,
    element("div", "pg-mask", {}, slots.a.el, sign, slots.b.el),
    element("div", "pg-said", {}, code, meaning),
    strip, words, grid.el, legend,
    element("div", "pg-line", {}, undo, clear, rule),
    panel.el);
  el.append(card);

  const view = { cells: null, painted: null, row: -1, cell: null, brush: null, sign: null, frame: 0, width: 0 };
  const history = []; // { expression, painted, n }, oldest first
  let lastKey = null;
  let typing = null;

  // ------------------------------------------------------------------------------------------------- changing
  function attached() {
    return model.get("model_name") !== "";
  }

  function allowed(q, k) {
    return view.cells[q * model.get("tokens").length + k] === 1;
  }

  // Sets these values, together; a change of the same key as the one before is one step with it for Undo.
  function change(values, key = null, { undoable = true } = {}) {
    if (undoable && (key === null || key !== lastKey)) {
      history.push({ expression: model.get("expression"), painted: model.get("painted"), n: model.get("tokens").length });
      history.splice(0, Math.max(0, history.length - 200));
    }
    if (undoable) lastKey = key;
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    if (attached() && model.get("live")) model.set("asked", model.get("asked") + 1);
    model.save_changes();
    schedule();
  }

  function turn(which, slot, key) {
    if (slot === null) { lastKey = null; return; } // the slider was let go
    const both = slotsOf(model.get("expression"));
    change({ expression: treeOfSlots({ ...both, [which]: slot }) }, key);
  }

  sign.addEventListener("change", () => {
    const { a, b } = slotsOf(model.get("expression"));
    const n = model.get("tokens").length;
    const second = b ?? view.second ?? { not: false, tree: fresh("sliding_window", n) };
    view.second = second;
    const tree = treeOfSlots({ a, sign: sign.value, b: second });
    change({ expression: tree });
  });

  undo.addEventListener("click", takeBack);
  clear.addEventListener("click", () => change({ painted: {} }));

  function takeBack() {
    const before = history.pop();
    if (!before) return;
    const n = model.get("tokens").length;
    change({
      expression: fitted(before.expression, n, before.n),
      painted: stateOfPainted(paintedOf(before.painted, n)),
    }, null, { undoable: false });
    lastKey = null;
  }

  sentence.addEventListener("input", () => {
    clearTimeout(typing);
    if (attached() && model.get("live")) {
      typing = setTimeout(() => {
        model.set("sentence", sentence.value);
        model.set("asked", model.get("asked") + 1);
        model.save_changes();
        schedule();
      }, TYPING);
      return;
    }
    const tokens = splitWords(sentence.value);
    const before = model.get("tokens").length;
    const wrong = tokens.length > MOST_TOKENS ? `${tokens.length} tokens are too many: the playground shows at most ${MOST_TOKENS}.`
      : tokens.length ? "" : "Type at least one word.";
    if (wrong) {
      say(notice, wrong);
      return;
    }
    const n = tokens.length;
    model.set("notice", "");
    say(notice, "");
    change({
      sentence: sentence.value, tokens, expression: fitted(model.get("expression"), n, before),
      painted: stateOfPainted(paintedOf(model.get("painted"), n)), focus: Math.min(model.get("focus"), n - 1),
    }, "sentence", { undoable: false });
  });

  // -------------------------------------------------------------------------------------------------- painting
  // A cell painted back to what the expression says is no longer painted.
  function paint(q, k) {
    const n = model.get("tokens").length;
    const i = q * n + k;
    if (view.cells[i] === view.brush) return;
    view.painted.which[i] = Number(view.base[i] !== view.brush);
    view.painted.value[i] = view.brush;
    view.cells[i] = view.brush;
  }

  function begin(q, k) {
    if (view.frame) show(); // painted over what holds now, though it is not drawn yet
    view.brush = allowed(q, k) ? 0 : 1;
    paint(q, k);
    schedule(false);
  }

  function drag(cells) {
    for (const [q, k] of cells) paint(q, k);
    schedule(false);
  }

  function end() {
    view.brush = null;
    change({ painted: stateOfPainted(view.painted), focus: view.row });
  }

  // Space and Enter turn a cell over; with Shift, the arrow keys carry the cell they leave along.
  function key(event, q, k, cells) {
    if (view.frame) show();
    if (cells) {
      view.brush = Number(allowed(...cells[0]));
      for (const [row, column] of cells) paint(row, column);
      view.brush = null;
      change({ painted: stateOfPainted(view.painted) }, "keys");
    } else if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      event.stopPropagation();
      view.brush = allowed(q, k) ? 0 : 1;
      paint(q, k);
      view.brush = null;
      change({ painted: stateOfPainted(view.painted) });
    } else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
      event.preventDefault();
      event.stopPropagation();
      takeBack();
    }
  }

  // ---------------------------------------------------------------------------------------------------- showing
  function hover(q, k) {
    const next = q >= 0 ? q : model.get("focus");
    if (next === view.row && (view.cell?.[0] ?? -1) === q && (view.cell?.[1] ?? -1) === k) return;
    view.row = next;
    view.cell = q >= 0 && k >= 0 ? [q, k] : null;
    schedule(false);
  }

  // Redraws once before the page is next painted; `recompute`: the cells too.
  function schedule(recompute = true) {
    view.stale = view.stale || recompute;
    if (!view.frame) view.frame = requestAnimationFrame(show);
  }

  function show() {
    cancelAnimationFrame(view.frame);
    view.frame = 0;
    const tokens = model.get("tokens");
    const n = tokens.length;
    if (view.stale && view.brush === null) { // a stroke under way is not overwritten
      view.stale = false;
      view.base = cellsOf(model.get("expression"), n);
      view.painted = paintedOf(model.get("painted"), n);
      view.cells = withPainted(view.base, view.painted);
      view.row = Math.min(view.row, n - 1);
      showControls(tokens);
    }
    const empty = emptyRows(n);
    showGrid(tokens, empty);
    showSentence(tokens);
    sayWords(inWords(tokens, empty));
    if (attached()) panel.showAttention(view.row, view.cell, view.width);
  }

  function showControls(tokens) {
    const n = tokens.length;
    const tree = model.get("expression");
    const both = slotsOf(tree);
    slots.a.show(both.a, n);
    sign.value = both.sign;
    say(sign.options[0], both.sign ? "alone" : "combine with …");
    slots.b.el.hidden = !both.b;
    if (both.b) slots.b.show(view.second = both.b, n);
    const count = view.painted.which.reduce((a, b) => a + b, 0);
    say(code, codeOf(tree));
    const plain = `A token may attend to ${meaningOf(tree)}.`;
    const name = count && n <= 64 ? recognised(view.cells, n) : null;
    say(meaning, !count ? plain
      : `${plain} ${count === 1 ? "1 cell is" : `${count} cells are`} painted over it${name ? `: together they are exactly ${codeOf(name)}` : ""}.`);
    undo.disabled = !history.length;
    clear.disabled = !count;
    clear.textContent = count ? `Clear ${count} painted` : "Clear painted";
    say(rule, count ? "Painted cells stay as they are when the mask above is changed."
      : "Drag over cells to paint them; or arrow keys, Space, and Shift with the arrows.");
    if (document.activeElement !== sentence && sentence.getRootNode().activeElement !== sentence) sentence.value = model.get("sentence");
    say(notice, model.get("notice") || notice.textContent);
    say(splitter, attached() && model.get("live")
      ? `${n} tokens, as the tokenizer of ${model.get("model_name")} cuts them.`
      : `${n} tokens: split into words and signs, here in the browser.`);
    panel.el.hidden = !attached();
    if (attached()) {
      panel.showControls();
      panel.showAnswer();
    }
  }

  function emptyRows(n) {
    const rows = [];
    for (let q = 0; q < n; q += 1) if (!view.cells.subarray(q * n, (q + 1) * n).includes(1)) rows.push(q);
    return rows;
  }

  function showGrid(tokens, empty) {
    const n = tokens.length;
    const { which } = view.painted;
    const pixels = new Uint32Array(n * n);
    const marks = [];
    const width = view.width;
    const tiny = (width - 100) / n < LINES_FROM + 1;
    for (let i = 0; i < n * n; i += 1) {
      const open = view.cells[i] === 1;
      pixels[i] = which[i] && tiny ? (open ? PIXELS.paintedOpen : PIXELS.paintedClosed) : open ? PIXELS.open : PIXELS.closed;
      if (which[i] && !tiny) marks.push([Math.floor(i / n), i % n, open ? "light" : "dark"]);
    }
    for (const q of empty) marks.push([q, q, "ring"]);
    grid.update({ tokens, pixels, marks, row: view.row, width });
    const keys = [["open", "may attend"], ["closed", "may not"]];
    if (which.includes(1)) keys.push([tiny ? "tiny" : "painted", "painted"]);
    if (empty.length) keys.push(["ring", "may attend to nothing, so it attends to itself alone"]);
    const made = keys.map(([kind, text]) => element("span", "pg-item", {}, element("span", `pg-swatch pg-${kind}`), text));
    legend.replaceChildren(element("span", "pg-item", {}, "rows attend (queries), columns are attended to (keys)"), ...made);
  }

  function showSentence(tokens) {
    const { row } = view;
    const n = tokens.length;
    if (strip.childElementCount !== n || view.stripped !== tokens) {
      view.stripped = tokens;
      strip.replaceChildren(...tokens.map((token) => element("span", "pg-chip", {}, visible(token, true))));
    }
    [...strip.children].forEach((chip, i) => {
      const state = row < 0 ? "" : `${allowed(row, i) ? "attends " : ""}${allowed(i, row) ? "attended " : ""}${i === row ? "self" : ""}`;
      if (chip.dataset.state !== state) chip.dataset.state = state;
    });
    const chip = strip.children[row];
    if (chip && row !== view.followed && !strip.matches(":hover")) {
      const top = chip.offsetTop - strip.offsetTop;
      if (top < strip.scrollTop || top + chip.offsetHeight > strip.scrollTop + strip.clientHeight) strip.scrollTop = top - 30;
    }
    view.followed = row;
  }

  strip.addEventListener("pointermove", (event) => {
    const chip = event.target.closest(".pg-chip");
    hover(chip ? [...strip.children].indexOf(chip) : -1, -1);
  });
  strip.addEventListener("pointerleave", () => hover(-1, -1));
  strip.addEventListener("click", (event) => {
    const chip = event.target.closest(".pg-chip");
    if (!chip) return;
    const i = [...strip.children].indexOf(chip);
    model.set("focus", i === model.get("focus") ? -1 : i);
    model.save_changes();
  });

  // The pieces of the sentence below the tokens; those with a class carry the sign that the tokens carry.
  function inWords(tokens, empty) {
    const n = tokens.length;
    const { row } = view;
    if (row < 0) {
      const count = view.cells.reduce((a, b) => a + b, 0);
      let future = 0;
      for (let q = 0; q < n; q += 1) for (let k = q + 1; k < n; k += 1) future += view.cells[q * n + k];
      return [[`${count} of ${n * n} cells are open, ${future} of them in the future. Point at a token or a row to show what it attends to.`]];
    }
    const positions = (test) => tokens.map((_, i) => i).filter(test);
    const keys = positions((i) => allowed(row, i));
    const queries = positions((i) => allowed(i, row));
    const alone = empty.includes(row) ? " The weights of a row sum to 1, so it attends to itself alone." : "";
    return [
      [`${quoted(tokens[row])} `, "pg-self"], ["attends to", "pg-attends"], [` ${listed(tokens, keys)} (${keys.length} of ${n}).${alone} It `],
      ["is attended to by", "pg-attended"], [` ${listed(tokens, queries)} (${queries.length} of ${n}).`],
    ];
  }

  function sayWords(pieces) {
    if (words.textContent === pieces.map(([text]) => text).join("")) return;
    words.replaceChildren(...pieces.map(([text, sort]) => (sort ? element("span", sort, {}, text) : text)));
  }

  // -------------------------------------------------------------------------------------------------- listening
  const redraw = () => schedule();
  const refocus = () => {
    view.row = model.get("focus");
    schedule(false);
  };
  const handlers = { focus: refocus };
  for (const name of ["expression", "painted", "tokens", "sentence", "notice", "model_name", "question", "place", "layer", "head", "layers",
    "heads", "answer", "attention", "verdict", "asked", "cancelled", "received"]) handlers[name] = redraw;
  for (const [name, call] of Object.entries(handlers)) model.on(`change:${name}`, call);
  const watcher = new ResizeObserver(() => {
    const width = Math.max(NARROW, card.clientWidth - 30);
    if (width === view.width) return;
    view.width = width;
    schedule();
  });
  watcher.observe(card);
  view.width = Math.max(NARROW, (card.clientWidth || 760) - 30);
  view.row = model.get("focus");
  schedule();
  return () => {
    watcher.disconnect();
    panel.stop();
    clearTimeout(typing);
    if (view.frame) cancelAnimationFrame(view.frame);
    for (const [name, call] of Object.entries(handlers)) model.off(`change:${name}`, call);
  };
}

export default { render };
