// The panel of an attached model: what is asked, what it answers before and after, its attention, what was measured.
// Python answers; this only shows the last answer, and says when one is under way, late, cancelled or impossible.

const LATE = 4000; // milliseconds without a sign from Python
const SHADES = Array.from({ length: 256 }, (_, i) => { // from 0, nearly white, to the largest weight, dark blue
  const mix = (from, to) => Math.round(from + ((to - from) * i) / 255).toString(16).padStart(2, "0");
  return pixel(`#${mix(247, 8)}${mix(251, 48)}${mix(255, 107)}`);
});
const percent = (p) => (p > 0 && p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(p < 0.0995 ? 1 : 0)} %`);

// ask(values): sets these and asks again; hover(row); see render.
function makePanel(model, ask, hover) {
  const name = element("h3", "pg-heading");
  const status = element("span", "pg-status", { role: "status" });
  const elapsed = element("span", "pg-elapsed", { "aria-hidden": "true" }); // would be read aloud ten times a second
  const spinner = element("span", "pg-spinner", { "aria-hidden": "true" });
  const cancel = element("button", "pg-button", { type: "button" }, "Cancel");
  const again = element("button", "pg-button", { type: "button" }, "Ask again");
  const kind = element("select", "", { "aria-label": "what the model is asked" });
  kind.append(element("option", "", { value: "next" }, "the next token"), element("option", "", { value: "fill-in" }, "a hidden token"));
  const place = element("select", "pg-preset", { "aria-label": "which token" });
  const placeName = element("span", "lk-name");
  const layer = element("select", "", { "aria-label": "layer" });
  const head = element("select", "", { "aria-label": "head" });
  const labelled = (text, control) => element("label", "pg-number", {}, element("span", "lk-name", {}, text), control);
  const how = element("p", "pg-hint");
  const error = element("p", "pg-error", { role: "alert" });
  const columns = { before: makeColumn("Before", "under its own mask", hover), after: makeColumn("After", "under the mask above", hover) };
  const weight = element("p", "pg-weight");
  const leak = element("p", "pg-note");
  const verdict = element("p", "pg-verdict", { role: "status" });
  const el = element("section", "pg-panel", { "aria-label": "live model" },
    element("div", "pg-line", {}, name, spinner, status, elapsed, cancel, again),
    element("div", "pg-line", {}, labelled("ask for", kind), element("label", "pg-number", {}, placeName, place),
      labelled("attention of layer", layer), labelled("head", head)),
    how, error, element("div", "pg-columns", {}, columns.before.el, columns.after.el), weight, leak, verdict);
  let began = 0;
  let clock = null;

  kind.addEventListener("change", () => {
    const last = model.get("tokens").length - 1;
    ask({ question: kind.value, place: kind.value === "next" ? last : Math.min(Math.max(1, model.get("place")), last) });
  });
  place.addEventListener("change", () => ask({ place: Number(place.value) }));
  layer.addEventListener("change", () => ask({ layer: Number(layer.value) }));
  head.addEventListener("change", () => ask({ head: Number(head.value) }));
  again.addEventListener("click", () => ask({}));
  cancel.addEventListener("click", () => {
    model.set("cancelled", model.get("asked"));
    model.save_changes();
    showStatus();
  });

  function options(select, texts) {
    if (select.dataset.made === texts.join("\n")) return;
    select.dataset.made = texts.join("\n");
    select.replaceChildren(...texts.map((text, i) => element("option", "", { value: i }, text)));
  }

  function showControls() {
    say(name, `Live model: ${model.get("model_name")}`);
    options(place, model.get("tokens").map((token, i) => `${i}  ${visible(token)}`));
    options(layer, Array.from({ length: model.get("layers") }, (_, i) => `${i}`));
    options(head, Array.from({ length: model.get("heads") }, (_, i) => `${i}`));
    placeName.textContent = model.get("question") === "next" ? "after" : "hide";
    kind.value = model.get("question");
    for (const [select, trait] of [[place, "place"], [layer, "layer"], [head, "head"]]) select.value = model.get(trait);
    for (const control of [kind, place, layer, head]) control.disabled = !model.get("live");
  }

  // Computing, waiting for Python, cancelled, or done.
  function showStatus() {
    const [asked, answer] = [model.get("asked"), model.get("answer")];
    const cancelled = model.get("cancelled") === asked;
    const waiting = model.get("live") && !cancelled && answer.number !== asked;
    if (waiting && clock === null) {
      began = performance.now();
      clock = setInterval(showStatus, 100);
    } else if (!waiting && clock !== null) {
      clearInterval(clock);
      clock = null;
    }
    const seconds = (performance.now() - began) / 1000;
    const late = waiting && model.get("received") !== asked && 1000 * seconds > LATE;
    el.classList.toggle("pg-stale", waiting || cancelled);
    spinner.hidden = !waiting;
    cancel.hidden = !waiting;
    again.hidden = !(cancelled || (answer.error && model.get("live")));
    say(elapsed, waiting && seconds > 0.3 ? `${seconds.toFixed(1)} s` : "");
    if (!model.get("live")) say(status, "The last answers, kept in this page; there is no Python behind it.");
    else if (late) say(status, "Python has not answered: it is busy with another cell, or no longer running. Shown are the last answers.");
    else if (waiting) say(status, "computing …");
    else if (cancelled) say(status, "Cancelled. Shown are the last answers.");
    else say(status, answer.seconds === undefined ? "" : `answered in ${answer.seconds.toFixed(2)} s`);
  }

  function showAnswer() {
    const answer = model.get("answer");
    say(error, answer.error ?? "");
    error.hidden = !answer.error;
    say(how, answer.how ?? "");
    for (const side of ["before", "after"]) columns[side].show(answer[side], answer);
    say(leak, answer.leak ?? "");
    leak.hidden = !answer.leak;
    const measured = model.get("verdict");
    const current = measured.number !== undefined && measured.number === answer.number;
    verdict.hidden = !current && (!answer.before || Boolean(answer.error));
    say(verdict, current ? measured.text : "Measuring which token really reaches which …");
    verdict.dataset.agrees = current ? String(measured.agrees) : "";
    showStatus();
  }

  // row: whose attention is followed; cell: [q, k] under the pointer, or null.
  function showAttention(row, cell, width) {
    const maps = model.get("attention");
    const drawn = maps.n !== undefined;
    weight.hidden = !maps.n && !maps.note;
    if (!drawn) say(weight, maps.note ?? "");
    const side = Math.floor((width - 24) / (width < 520 ? 1 : 2)) - 2;
    const weights = drawn ? { before: bytesOf(maps.before), after: bytesOf(maps.after) } : {};
    const top = drawn ? Math.max(1, ...Object.values(weights).map((bytes) => bytes.reduce((a, b) => Math.max(a, b), 0))) : 1;
    for (const which of ["before", "after"]) columns[which].draw(drawn ? maps : null, weights[which], top, row, side);
    if (!drawn) return;
    const tokens = maps.tokens;
    const share = (bytes, q, k) => (bytes[q * maps.n + k] / 255).toFixed(2);
    if (cell && cell[0] < maps.n && cell[1] < maps.n) {
      const [q, k] = cell;
      say(weight, `Layer ${maps.layer}, head ${maps.head}: ${quoted(tokens[q])} attends to ${quoted(tokens[k])} with weight `
        + `${share(weights.before, q, k)} before and ${share(weights.after, q, k)} after.`);
    } else if (row >= 0 && row < maps.n) {
      const most = (bytes) => {
        const own = bytes.subarray(row * maps.n, (row + 1) * maps.n);
        const k = own.indexOf(own.reduce((a, b) => Math.max(a, b), 0));
        return `${quoted(tokens[k])} (${share(bytes, row, k)})`;
      };
      say(weight, `Layer ${maps.layer}, head ${maps.head}: ${quoted(tokens[row])} attends most to ${most(weights.before)} before, `
        + `to ${most(weights.after)} after.`);
    } else say(weight, `Layer ${maps.layer}, head ${maps.head}: each row shares out a weight of 1; darker is more, to ${(top / 255).toFixed(2)}.`);
  }

  const stop = () => { if (clock !== null) clearInterval(clock); };
  return { el, showControls, showAnswer, showAttention, stop };
}

// One of the two columns: five answers with bars, what it says of the true token, one attention map.
function makeColumn(title, under, hover) {
  const list = element("ol", "pg-answers");
  const truth = element("p", "pg-truth");
  let bytes = null;
  let maps = null;
  const grid = makeGrid(`attention ${title.toLowerCase()}`, {
    hover: (q, k) => hover(q, k),
    words: (q, k) => `${visible(maps.tokens[q], true)} attends to ${visible(maps.tokens[k], true)}: ${(bytes[q * maps.n + k] / 255).toFixed(2)}`,
  });
  const el = element("div", "pg-column", {}, element("h4", "pg-heading", {}, `${title} `, element("span", "pg-under", {}, under)), list, truth, grid.el);

  function show(answers, { question, truth: right }) {
    list.replaceChildren(...(answers?.top ?? []).map(([token, p]) => {
      const bar = element("span", "pg-bar");
      bar.style.setProperty("--p", p);
      const row = element("li", "pg-answer", {}, element("span", "pg-token", {}, visible(token)), bar, element("span", "pg-percent", {}, percent(p)));
      if (right !== null && token === right) {
        row.classList.add("pg-right");
        row.append(element("span", "lk-hidden", {}, " (what stands there)"));
      }
      return row;
    }));
    const known = answers && answers.rank !== null && answers.rank !== undefined;
    const what = question === "next" ? "what follows" : "what is hidden";
    truth.textContent = known ? `${quoted(right)}, ${what}: rank ${answers.rank}, ${percent(answers.p)}` : answers ? "Nothing follows: there is no right answer." : "";
  }

  function draw(next, weights, top, row, width) {
    grid.el.hidden = !next;
    if (!next) return;
    [maps, bytes] = [next, weights];
    const pixels = Uint32Array.from(bytes, (byte) => SHADES[Math.round((byte / top) * 255)]);
    grid.update({ tokens: maps.tokens, pixels, row: row < maps.n ? row : -1, width });
  }

  return { el, show, draw };
}

const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
