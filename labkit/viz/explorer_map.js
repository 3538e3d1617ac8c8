// The large map of the attention explorer: rows are queries, columns are keys; labels, staircase, cursor and tooltip.

const MAP_SIDE = 448; // pixels that the cells may take, where one cell is more than a pixel
const LABEL_FONT = "ui-monospace, Menlo, Consolas, monospace";
const FOLLOWED = "#d55e00";

// `describe(q, k)` gives the lines of the tooltip, `pick(q)` is called when a row is clicked.
function makeMap(tokens, describe, pick) {
  const n = tokens.length;
  const cell = Math.max(1, Math.min(40, Math.floor(MAP_SIDE / n)));
  const side = n * cell;
  const step = Math.ceil(13 / cell); // every how many-th token has a label
  const font = `${Math.min(12, Math.max(9, cell * step - 1))}px ${LABEL_FONT}`;
  const base = element("canvas", "ex-base");
  const context = base.getContext("2d");
  context.font = font;
  const longest = Math.ceil(Math.max(...tokens.filter((_, i) => i % step === 0).map((t) => context.measureText(visible(t)).width)));
  const left = longest + 14;
  const top = longest + 8;
  const over = element("canvas", "ex-over");
  const tip = element("div", "ex-tip", { hidden: "" });
  const surface = element("div", "ex-surface", {
    tabindex: "0", role: "application", "aria-roledescription": "attention map",
    "aria-label": "attention map: rows are queries, columns are keys. Arrow keys move a cursor, Enter follows its query.",
  }, base, over);
  const scroller = element("div", "ex-map", {}, surface);
  const el = element("div", "ex-frame", {}, scroller, tip);
  const [wide, high] = [left + side + 2, top + side + 2];
  Object.assign(surface.style, { width: `${wide}px`, height: `${high}px` });
  let followed = null; // the query
  let cursor = null;

  function draw(head, view, lifted, query) {
    followed = query;
    const pen = sized(base, wide, high);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(painted(head, view, lifted), left, top, side, side);
    pen.strokeStyle = "#d8dde1";
    if (cell >= 12 && head.exact) {
      pen.beginPath();
      for (let at = 0; at <= side; at += cell) {
        pen.moveTo(left + at, top);
        pen.lineTo(left + at, top + side);
        pen.moveTo(left, top + at);
        pen.lineTo(left + side, top + at);
      }
      pen.stroke();
    } else {
      pen.strokeRect(left, top, side, side);
    }
    pen.font = font;
    pen.fillStyle = "#222222";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (let i = 0; i < n; i += step) {
      const middle = (i + 0.5) * cell;
      pen.fillText(visible(tokens[i]), left - 10, top + middle);
      writeUpright(pen, visible(tokens[i]), left + middle, top - 5);
    }
    pen.strokeStyle = "#333333";
    pen.lineWidth = cell >= 3 ? 1.5 : 1;
    drawStairs(pen, { n, cell, left, top });
    mark();
  }

  // The row of the query that is followed, and the cell under the mouse or the cursor.
  function mark() {
    const pen = sized(over, wide, high);
    if (followed !== null) {
      pen.strokeStyle = FOLLOWED;
      pen.lineWidth = 2;
      pen.strokeRect(left - 1, top + followed * cell - 1, side + 2, cell + 2);
      pen.fillStyle = FOLLOWED;
      pen.beginPath();
      const middle = top + (followed + 0.5) * cell;
      pen.moveTo(left - 1, middle);
      pen.lineTo(left - 7, middle - 5);
      pen.lineTo(left - 7, middle + 5);
      pen.fill();
    }
    if (cursor) {
      const [x, y] = [left + cursor.k * cell, top + cursor.q * cell];
      pen.lineWidth = 1;
      pen.strokeStyle = "#000000";
      pen.strokeRect(x - 0.5, y - 0.5, cell + 1, cell + 1);
      pen.strokeStyle = "#ffffff";
      pen.strokeRect(x - 1.5, y - 1.5, cell + 3, cell + 3);
      pen.fillStyle = "rgb(213 94 0 / 0.85)"; // where the cell lies, on the edges
      pen.fillRect(left - 4, y, 3, Math.max(2, cell));
      pen.fillRect(x, top - 4, Math.max(2, cell), 3);
    }
  }

  function point(q, k) {
    cursor = { q, k };
    mark();
    const lines = describe(q, k);
    tip.replaceChildren(...lines.map((line) => element("div", "", {}, line)));
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
    if (!at || at.k < 0) leave();
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
    if (move) {
      const from = cursor ?? { q: (followed ?? 0) - move[0], k: (followed ?? 0) - move[1] };
      const spoken = point(clamp(from.q + move[0], n), clamp(from.k + move[1], n));
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

  return { el, draw, describe: (text) => surface.setAttribute("aria-description", text) };
}
