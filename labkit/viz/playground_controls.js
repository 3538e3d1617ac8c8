// The two slots of the mask, A and B: each a "not", a menu of presets and the numbers of the preset.

const PRESETS = {
  causal: "causal",
  bidirectional: "bidirectional",
  sliding_window: "sliding window",
  prefix: "prefix",
  hybrid: "hybrid",
  segments: "segments",
  padding: "padding",
};

// What a preset begins with when it is chosen.
function fresh(kind, n) {
  const few = Math.min(3, n);
  return {
    causal: ["causal"],
    bidirectional: ["bidirectional"],
    sliding_window: ["sliding_window", few, true],
    prefix: ["prefix", few],
    hybrid: ["hybrid", few],
    segments: ["segments", Array.from({ length: n }, (_, i) => Number(i >= n / 2)), "causal", null],
    padding: ["padding", [Math.max(1, n - Math.ceil(n / 4))], "right"],
  }[kind];
}

// The controls of each preset: name, range or choices, how it is read from the tree and written into it.
function numbersOf(kind, n) {
  const slider = (name, min, max, read, write, says = String) => ({ name, min, max, read, write, says });
  const menu = (name, choices, read, write) => ({ name, choices, read, write });
  return {
    sliding_window: [
      slider("window", 1, n, (t) => Math.min(n, t[1]), (t, v) => [t[0], v, t[2]], (v) => (v === 1 ? "1 token" : `${v} tokens`)),
      menu("sides", ["one side", "both sides"], (t) => (t[2] ? 0 : 1), (t, i) => [t[0], t[1], i === 0]),
    ],
    prefix: [slider("prefix", 0, n, (t) => Math.min(n, single(t[1])), (t, v) => [t[0], v], (v) => (v === 1 ? "1 token" : `${v} tokens`))],
    hybrid: [slider("open from", 0, n, (t) => Math.min(n, single(t[1])), (t, v) => [t[0], v], (v) => `position ${v}`)],
    segments: [
      { name: "segment of each token", read: (t) => t[1].slice(0, n).join(" "), write: (t, ids) => [t[0], ids, t[2], bounded(t[3], ids)] },
      menu("inside", ["causal", "bidirectional"], (t) => Number(t[2] === "bidirectional"), (t, i) => [t[0], t[1], i ? "bidirectional" : "causal", t[3]]),
      slider("fuse from", 0, n, (t) => Math.min(n, t[3] ?? n), (t, v) => [t[0], t[1], t[2], v === n ? null : v], (v) => (v === n ? "nowhere" : `position ${v}`)),
    ],
    padding: [
      slider("pads", 0, n, (t) => n - t[1][0], (t, v) => [t[0], [n - v], t[2]]),
      menu("side", ["right", "left"], (t) => Number(t[2] === "left"), (t, i) => [t[0], t[1], i ? "left" : "right"]),
    ],
  }[kind] ?? [];
}

const bounded = (fuseFrom, ids) => (fuseFrom === null || fuseFrom <= ids.length ? fuseFrom : ids.length);

// Whole numbers, one a token, from what was typed; the last one goes on to the end. Null: not such numbers.
function segmentIds(text, n) {
  const parts = text.split(/[\s,;]+/).filter(Boolean);
  if (!parts.length || parts.length > n || parts.some((part) => !/^\d{1,6}$/.test(part))) return null;
  const ids = parts.map(Number);
  return [...ids, ...Array(n - ids.length).fill(ids[ids.length - 1])];
}

// change(slot, key): the slot is new; changes with the same key, one after the other, are one step for Undo.
function makeSlot(letter, change) {
  const not = element("button", "pg-not", { type: "button", "aria-label": `not ${letter}`, "aria-pressed": "false" }, "not");
  const preset = element("select", "pg-preset", { "aria-label": `mask ${letter}` });
  for (const [kind, name] of Object.entries(PRESETS)) preset.append(element("option", "", { value: kind }, name));
  const custom = element("option", "", { value: "custom" }, "as set in Python");
  const numbers = element("div", "pg-numbers");
  const el = element("div", "pg-slot", { role: "group", "aria-label": `${letter}` }, not, preset, numbers);
  let slot = null;
  let n = 0;
  let made = "";
  let showing = [];

  not.addEventListener("click", () => set({ ...slot, not: !slot.not }, null));
  preset.addEventListener("change", () => {
    if (preset.value !== "custom") set({ ...slot, tree: fresh(preset.value, n) }, null);
  });

  // Kept here at once: a second change may come before the page has been drawn again.
  function set(next, key) {
    slot = next;
    change(slot, key);
  }

  function write(control, value) {
    set({ ...slot, tree: control.write(slot.tree, value) }, `${letter} ${control.name}`);
  }

  function makeNumber(control) {
    const label = `${control.name} of ${letter}`;
    const name = element("span", "lk-name", {}, control.name);
    if (control.choices) {
      const select = element("select", "", { "aria-label": label });
      control.choices.forEach((choice, i) => select.append(element("option", "", { value: i }, choice)));
      select.addEventListener("change", () => write(control, Number(select.value)));
      numbers.append(element("label", "pg-number", {}, name, select));
      return () => { select.value = control.read(slot.tree); };
    }
    if (control.says) {
      const input = element("input", "", { type: "range", min: control.min, max: control.max, step: 1, "aria-label": label });
      const now = element("output", "pg-now");
      input.addEventListener("input", () => write(control, Number(input.value)));
      input.addEventListener("change", () => change(null, null));
      numbers.append(element("label", "pg-number pg-range", {}, name, input, now));
      return () => {
        const value = control.read(slot.tree);
        input.value = value;
        input.style.setProperty("--done", (value - control.min) / Math.max(1, control.max - control.min));
        now.textContent = control.says(value);
        input.setAttribute("aria-valuetext", now.textContent);
      };
    }
    const input = element("input", "pg-ids", { type: "text", "aria-label": label, spellcheck: "false", autocomplete: "off" });
    const wrong = element("span", "pg-wrong", { role: "status" });
    input.addEventListener("input", () => {
      const ids = segmentIds(input.value, n);
      input.setAttribute("aria-invalid", String(ids === null));
      wrong.textContent = ids ? "" : `up to ${n} whole numbers, such as 0 0 1 1`;
      if (ids) write(control, ids);
    });
    input.addEventListener("change", () => change(null, null));
    numbers.append(element("label", "pg-number pg-wide", {}, name, input, wrong));
    return () => {
      const typed = segmentIds(input.value, n);
      const halfTyped = typed === null && input.getRootNode().activeElement === input; // left to whoever types
      if (halfTyped || typed?.join(" ") === control.read(slot.tree)) return;
      input.value = control.read(slot.tree);
      input.setAttribute("aria-invalid", "false");
      wrong.textContent = "";
    };
  }

  function show(next, count) {
    slot = next;
    n = count;
    const kind = slot.tree[0] in PRESETS ? slot.tree[0] : "custom";
    not.setAttribute("aria-pressed", String(slot.not));
    if (kind === "custom") preset.append(custom);
    else custom.remove();
    preset.value = kind;
    if (made !== `${kind} ${n}`) {
      made = `${kind} ${n}`;
      numbers.replaceChildren();
      showing = numbersOf(kind, n).map(makeNumber);
    }
    showing.forEach((update) => update());
  }

  return { el, show };
}
