// A grid of queries x keys on a canvas, with one focusable cell over it for keyboards and screen readers. It draws what it
// is told and says what was pointed at; it knows nothing of masks, models or attention.

const INK = "#222222";
const QUIET = "#5b6670";
const OPEN = "#0072b2";
const CLOSED = "#e6e6e6";
const ATTENDED = "#d55e00";
const LETTERS = "12px ui-monospace, Menlo, Consolas, monospace";
const LARGEST = 40; // pixels, the side of a cell
const LINES_FROM = 6; // pixels: smaller cells have no lines between them

// A colour "#rrggbb" as one pixel of an ImageData seen as 32-bit words.
function pixel(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

let cellNumber = 0; // ids of cells are never used twice on a page

// act: { hover(q, k), begin(q, k), drag(cells), end(), key(event, q, k), words(q, k), selected(q, k) }; only hover and words
// are needed. update({ tokens, pixels, marks, row, width }) draws: pixels Uint32Array of n * n, marks [[q, k, sign], ...].
function makeGrid(name, act) {
  const canvas = element("canvas", "pg-canvas", { "aria-hidden": "true" });
  const cells = element("div", "pg-cells", { role: "grid", tabindex: 0, "aria-label": name });
  if (!act.begin) cells.setAttribute("aria-readonly", "true");
  const stage = element("div", "pg-stage", {}, canvas, cells);
  const box = element("div", "pg-grid", {}, stage);
  const small = element("canvas"); // one pixel a cell
  let shown = null;
  let place = null; // { left, top, cell, n }
  let [row, column] = [0, 0]; // where the keyboard is
  let last = null; // the cell a drag was at

  function update(spec) {
    shown = spec;
    place = layout(spec);
    row = Math.min(row, place.n - 1);
    column = Math.min(column, place.n - 1);
    draw();
    if (cells.firstChild) tell(false);
  }

  function layout({ tokens, width }) {
    const n = tokens.length;
    const pen = canvas.getContext("2d");
    pen.font = LETTERS;
    const widest = Math.max(...tokens.map((token) => pen.measureText(visible(token)).width));
    const left = Math.ceil(widest) + 12;
    const ratio = window.devicePixelRatio || 1;
    const room = (width - left - 4) / n;
    const cell = Math.min(LARGEST, room >= 3 ? Math.floor(room) : Math.max(2, Math.floor(room * ratio) / ratio));
    const upright = widest > cell - 4;
    return { n, cell, left, top: upright ? Math.ceil(widest) + 10 : 22, upright };
  }

  function draw() {
    const { n, cell, left, top } = place;
    const [wide, high] = [left + n * cell + 4, top + n * cell + 4];
    Object.assign(stage.style, { width: `${wide}px`, height: `${high}px` });
    Object.assign(cells.style, { left: `${left}px`, top: `${top}px`, width: `${n * cell}px`, height: `${n * cell}px` });
    cells.setAttribute("aria-rowcount", n);
    cells.setAttribute("aria-colcount", n);
    const pen = sized(canvas, wide, high);
    drawLabels(pen);
    small.width = n;
    small.height = n;
    small.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(shown.pixels.buffer), n, n), 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, left, top, n * cell, n * cell);
    if (cell >= LINES_FROM) drawLines(pen);
    drawMarks(pen);
    pen.strokeStyle = INK;
    pen.lineWidth = cell >= LINES_FROM ? 1.5 : 1;
    drawStairs(pen, place);
    if (shown.row >= 0) drawRow(pen, shown.row);
  }

  function drawLabels(pen) {
    const { n, cell, left, top, upright } = place;
    const step = Math.ceil(13 / cell);
    pen.textBaseline = "middle";
    for (let i = 0; i < n; i += step) {
      const chosen = shown.row >= i && shown.row < i + step;
      const text = visible(shown.tokens[chosen ? shown.row : i]);
      const middle = (i + 0.5) * cell;
      pen.font = `${chosen ? "bold " : ""}${LETTERS}`;
      pen.fillStyle = chosen || shown.row < 0 ? INK : QUIET;
      pen.textAlign = "right";
      pen.fillText(text, left - 7, top + middle);
      pen.textAlign = "center";
      if (upright) writeUpright(pen, text, left + middle, top - 6);
      else pen.fillText(text, left + middle, top - 10);
    }
  }

  function drawLines(pen) {
    const { n, cell, left, top } = place;
    pen.fillStyle = "#ffffff";
    for (let i = 1; i < n; i += 1) {
      pen.fillRect(left + i * cell - 0.5, top, 1, n * cell);
      pen.fillRect(left, top + i * cell - 0.5, n * cell, 1);
    }
  }

  function drawMarks(pen) {
    const { cell, left, top } = place;
    for (const [q, k, sign] of shown.marks ?? []) {
      const [x, y] = [left + k * cell, top + q * cell];
      if (sign === "ring") { // a query that may attend to nothing attends to itself
        const side = Math.max(2, cell - 5);
        pen.fillStyle = "#ffffff";
        pen.fillRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
        pen.strokeStyle = OPEN;
        pen.lineWidth = cell >= 12 ? 2 : 1;
        pen.setLineDash(cell >= 12 ? [3, 2] : []);
        pen.strokeRect(x + (cell - side) / 2, y + (cell - side) / 2, side, side);
        pen.setLineDash([]);
      } else if (cell >= LINES_FROM) {
        pen.fillStyle = sign === "light" ? "#ffffff" : INK;
        pen.beginPath();
        pen.arc(x + cell / 2, y + cell / 2, Math.max(1.2, Math.min(4, cell / 6)), 0, 2 * Math.PI);
        pen.fill();
      }
    }
  }

  // A row (what this token attends to) and its column (what attends to it), framed in the colours of the sentence.
  function drawRow(pen, i) {
    const { n, cell, left, top } = place;
    const slim = cell < LINES_FROM; // then the frame lies around the row, not on it
    const frame = (x, y, wide, high, colour, dashes) => {
      for (const [thick, ink, dash] of [[slim ? 0 : 4, "#ffffff", []], [slim ? 1 : 2, colour, dashes]]) {
        if (!thick) continue;
        pen.lineWidth = thick;
        pen.strokeStyle = ink;
        pen.setLineDash(dash);
        pen.strokeRect(x - (slim ? 0.5 : 0), y - (slim ? 0.5 : 0), wide + (slim ? 1 : 0), high + (slim ? 1 : 0));
      }
      pen.setLineDash([]);
    };
    frame(left + i * cell, top, cell, n * cell, ATTENDED, [5, 3]);
    frame(left, top + i * cell, n * cell, cell, INK, []);
  }

  // ------------------------------------------------------------------------------------------------ pointing
  function cellAt(event) {
    const { left, top, cell, n } = place;
    const where = stage.getBoundingClientRect();
    const [q, k] = [Math.floor((event.clientY - where.top - top) / cell), Math.floor((event.clientX - where.left - left) / cell)];
    return { q, k, inRow: q >= 0 && q < n && k < n, inside: q >= 0 && q < n && k >= 0 && k < n };
  }

  stage.addEventListener("pointermove", (event) => {
    if (!place) return;
    const at = cellAt(event);
    if (last !== null) {
      const to = [clamp(at.q, place.n), clamp(at.k, place.n)];
      act.drag(between(last, to));
      last = to;
      act.hover(to[0], to[1]);
    } else act.hover(at.inRow ? at.q : -1, at.inside ? at.k : -1);
  });
  stage.addEventListener("pointerleave", () => { if (last === null) act.hover(-1, -1); });
  cells.addEventListener("pointerdown", (event) => {
    const at = cellAt(event);
    if (event.button !== 0 || !at.inside) return;
    [row, column] = [at.q, at.k];
    cells.replaceChildren(); // the keyboard's cell is for the keyboard
    if (act.begin) {
      cells.setPointerCapture(event.pointerId);
      last = [at.q, at.k];
      act.begin(at.q, at.k);
    }
  });
  for (const over of ["pointerup", "pointercancel"]) {
    cells.addEventListener(over, () => {
      if (last === null) return;
      last = null;
      act.end();
    });
  }

  // ------------------------------------------------------------------------------------------- the keyboard
  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-8, 0], PageDown: [8, 0] };
  cells.addEventListener("keydown", (event) => {
    const { n } = place;
    const from = [row, column];
    const ends = { Home: [event.ctrlKey ? 0 : row, 0], End: [event.ctrlKey ? n - 1 : row, n - 1] }[event.key];
    const step = STEPS[event.key];
    if (step) [row, column] = [clamp(row + step[0], n), clamp(column + step[1], n)];
    else if (ends) [row, column] = ends;
    else {
      act.key?.(event, row, column);
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    if (event.shiftKey && act.begin) act.key(event, row, column, between(from, [row, column]));
    tell(true);
  });
  cells.addEventListener("focus", () => {
    if (place && cells.matches(":focus-visible")) tell(true);
  });
  cells.addEventListener("blur", () => {
    cells.replaceChildren();
    act.hover(-1, -1);
  });

  // Puts the cell under the keyboard into the page, with its words, so that it is visible and read: a new one where the
  // keyboard has moved, else the same one, which may have other words now.
  function tell(moved) {
    const { cell } = place;
    const one = moved ? element("div", "pg-cell", { role: "gridcell", id: `labkit-cell-${(cellNumber += 1)}` })
      : cells.querySelector(".pg-cell");
    one.setAttribute("aria-colindex", column + 1);
    one.setAttribute("aria-label", act.words(row, column));
    if (act.selected) one.setAttribute("aria-selected", String(act.selected(row, column)));
    Object.assign(one.style, { left: `${column * cell}px`, top: `${row * cell}px`, width: `${cell}px`, height: `${cell}px` });
    if (!moved) return;
    cells.replaceChildren(element("div", "", { role: "row", "aria-rowindex": row + 1 }, one));
    cells.setAttribute("aria-activedescendant", one.id);
    one.scrollIntoView({ block: "nearest", inline: "nearest" });
    act.hover(row, column);
  }

  return { el: box, update };
}

// Every cell on the straight line between two: a fast drag leaves none out.
function between([q0, k0], [q1, k1]) {
  const steps = Math.max(Math.abs(q1 - q0), Math.abs(k1 - k0), 1);
  return Array.from({ length: steps + 1 }, (_, i) => [
    Math.round(q0 + ((q1 - q0) * i) / steps), Math.round(k0 + ((k1 - k0) * i) / steps),
  ]);
}
