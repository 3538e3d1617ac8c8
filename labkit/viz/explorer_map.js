// The large map of the attention explorer: rows are queries, columns are keys; labels, staircase, cursor and tooltip.

const MAP_SIDE = 448; // pixels that the cells may take, where one cell is more than a pixel
const LABEL_FONT = "ui-monospace, Menlo, Consolas, monospace";

// `say(q, k)` gives the lines of the tooltip, `pick(q)` is called when a row is clicked.
function makeMap(tokens, say, pick) {
  const n = tokens.length;
  const cell = Math.max(1, Math.min(40, Math.floor(MAP_SIDE / n)));
  const side = n * cell;
  const step = Math.ceil(13 / cell); // every how many-th token has a label
  const size = Math.min(12, Math.max(9, cell * step - 1));
  const base = part("canvas", "ex-base");
  const context = base.getContext("2d");
  context.font = `${size}px ${LABEL_FONT}`;
  const longest = Math.ceil(Math.max(...tokens.filter((_, i) => i % step === 0).map((t) => context.measureText(short(t)).width)));
  const left = longest + 14;
  const top = longest + 8;
  const over = part("canvas", "ex-over");
  const tip = part("div", "ex-tip", { hidden: "" });
  const surface = part("div", "ex-surface", {
    tabindex: "0", role: "application", "aria-roledescription": "attention map",
    "aria-label": "attention map: rows are queries, columns are keys. Arrow keys move a cursor, Enter follows its query.",
  }, base, over);
  const scroller = part("div", "ex-map", {}, surface);
  const el = part("div", "ex-frame", {}, scroller, tip);
  const wide = left + side + 2;
  const high = top + side + 2;
  surface.style.width = `${wide}px`;
  surface.style.height = `${high}px`;
  let drawn = { head: null };
  let cursor = null;

  function fresh(canvas) {
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(wide * scale);
    canvas.height = Math.round(high * scale);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    return pen;
  }

  function draw(head, view, lifted, query) {
    drawn = { head, view, query };
    const pen = fresh(base);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(painted(head, view, lifted), left, top, side, side);
    pen.strokeStyle = "#d8dde1";
    if (cell >= 12 && head.exact) {
      pen.beginPath();
      for (let i = 0; i <= n; i += 1) {
        pen.moveTo(left + i * cell, top);
        pen.lineTo(left + i * cell, top + side);
        pen.moveTo(left, top + i * cell);
        pen.lineTo(left + side, top + i * cell);
      }
      pen.stroke();
    } else {
      pen.strokeRect(left, top, side, side);
    }
    labels(pen);
    staircase(pen);
    mark();
  }

  function labels(pen) {
    pen.font = `${size}px ${LABEL_FONT}`;
    pen.fillStyle = "#222222";
    pen.textBaseline = "middle";
    for (let i = 0; i < n; i += step) {
      const middle = (i + 0.5) * cell;
      pen.textAlign = "right";
      pen.fillText(short(tokens[i]), left - 10, top + middle);
      pen.save();
      pen.translate(left + middle, top - 5);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillText(short(tokens[i]), 0, 0);
      pen.restore();
    }
  }

  // The border between a token's past, on its left, and its future.
  function staircase(pen) {
    pen.strokeStyle = "#333333";
    pen.lineWidth = cell >= 3 ? 1.5 : 1;
    pen.beginPath();
    pen.moveTo(left + cell, top);
    for (let i = 0; i < n; i += 1) {
      pen.lineTo(left + (i + 1) * cell, top + (i + 1) * cell);
      if (i + 1 < n) pen.lineTo(left + (i + 2) * cell, top + (i + 1) * cell);
    }
    pen.stroke();
    pen.lineWidth = 1;
  }

  // The row of the query that is followed, and the cell under the mouse or the cursor.
  function mark() {
    const pen = fresh(over);
    const { query } = drawn;
    if (query !== null && query !== undefined) {
      pen.strokeStyle = "#d55e00";
      pen.lineWidth = 2;
      pen.strokeRect(left - 1, top + query * cell - 1, side + 2, cell + 2);
      pen.fillStyle = "#d55e00";
      pen.beginPath();
      const middle = top + (query + 0.5) * cell;
      pen.moveTo(left - 1, middle);
      pen.lineTo(left - 7, middle - 5);
      pen.lineTo(left - 7, middle + 5);
      pen.fill();
    }
    if (cursor) {
      pen.strokeStyle = "#000000";
      pen.lineWidth = 1;
      pen.strokeRect(left + cursor.k * cell - 0.5, top + cursor.q * cell - 0.5, cell + 1, cell + 1);
      pen.strokeStyle = "#ffffff";
      pen.strokeRect(left + cursor.k * cell - 1.5, top + cursor.q * cell - 1.5, cell + 3, cell + 3);
      pen.fillStyle = "rgb(213 94 0 / 0.85)"; // where the cell lies, on the edges
      pen.fillRect(left - 4, top + cursor.q * cell, 3, Math.max(2, cell));
      pen.fillRect(left + cursor.k * cell, top - 4, Math.max(2, cell), 3);
    }
  }

  function point(q, k) {
    cursor = { q, k };
    mark();
    const lines = say(q, k);
    tip.replaceChildren(...lines.map((line) => part("div", "", {}, line)));
    tip.hidden = false;
    const card = el.closest(".labkit-explorer"); // outside of it, a notebook may cut the tooltip off
    const room = card.clientWidth - el.offsetLeft - tip.offsetWidth - 8;
    const x = left + (k + 1) * cell + 12 - scroller.scrollLeft;
    const beside = left + k * cell - 12 - scroller.scrollLeft - tip.offsetWidth;
    tip.style.left = `${Math.max(0, x <= room ? x : beside)}px`;
    const y = top + (q + 1) * cell + 12;
    const fits = y <= card.clientHeight - el.offsetTop - tip.offsetHeight - 4;
    tip.style.top = `${fits ? y : top + q * cell - 12 - tip.offsetHeight}px`;
    return lines.join("; ");
  }

  function leave() {
    cursor = null;
    tip.hidden = true;
    mark();
  }

  function cellAt(event) {
    const box = base.getBoundingClientRect();
    const k = Math.floor((event.clientX - box.left - left) / cell);
    const q = Math.floor((event.clientY - box.top - top) / cell);
    return q >= 0 && q < n && k < n ? { q, k } : null;
  }

  surface.addEventListener("mousemove", (event) => {
    const at = cellAt(event);
    if (!drawn.head || !at || at.k < 0) leave();
    else point(at.q, at.k);
  });
  surface.addEventListener("mouseleave", leave);
  surface.addEventListener("blur", leave);
  surface.addEventListener("click", (event) => {
    const at = cellAt(event); // a label left of its row counts as the row
    if (at) pick(at.q);
  });
  surface.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move && drawn.head) {
      const from = cursor ?? { q: (drawn.query ?? 0) - move[0], k: (drawn.query ?? 0) - move[1] };
      const clamp = (i) => Math.max(0, Math.min(n - 1, i));
      const spoken = point(clamp(from.q + move[0]), clamp(from.k + move[1]));
      el.dispatchEvent(new CustomEvent("spoken", { detail: spoken }));
    } else if ((event.key === "Enter" || event.key === " ") && cursor) {
      pick(cursor.q);
    } else if (event.key === "Escape") {
      leave();
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  });

  return { el, draw, say: (words) => surface.setAttribute("aria-description", words) };
}

// An element with its attributes and what is inside; text is set as text.
// JupyterLab has commands of its own for Enter and the arrow keys; on these controls they belong to the control itself,
// and JupyterLab looks at what has the focus first: marking the card around it is not enough.
function part(tag, className, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (made.matches("input, select, button, textarea, [tabindex]")) made.setAttribute("data-lm-suppress-shortcuts", "true");
  made.append(...inside);
  return made;
}
