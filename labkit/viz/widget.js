// What the playground and the explorer share: elements, tokens as text, and the canvases of their maps.

// An element with its attributes and what is inside; text is set as text.
// JupyterLab has commands of its own for Enter and the arrow keys; on these controls they belong to the control itself,
// and JupyterLab looks at what has the focus first: marking the card around it is not enough.
function element(tag, className = "", attributes = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (made.matches("input, select, button, textarea, [tabindex]")) made.setAttribute("data-lm-suppress-shortcuts", "true");
  made.append(...children);
  return made;
}

// New words where they differ: a screen reader reads a live region again each time it is written to.
function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// A token as it is drawn: without the space before a word, white space visible, at most 12 letters (all: uncut).
function visible(token, all = false) {
  const clean = token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f]/g, "�");
  const text = [...(clean.trim() || clean.replace(/\s/g, "␣") || "∅")];
  return all || text.length <= 12 ? text.join("") : `${text.slice(0, 11).join("")}…`;
}

const quoted = (token) => `"${visible(token, true)}"`;

// A token in a sentence, with its position where the token occurs twice.
const named = (tokens, i) => quoted(tokens[i]) + (tokens.indexOf(tokens[i]) === tokens.lastIndexOf(tokens[i]) ? "" : ` (${i})`);

const clamp = (i, n) => Math.max(0, Math.min(n - 1, i));

// ------------------------------------------------------------------------------------------------------- canvases
// A canvas of this size in pixels of the page, emptied; gives its pen.
function sized(canvas, wide, high) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(wide * scale);
  canvas.height = Math.round(high * scale);
  Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return pen;
}

// Text that reads upwards from this point.
function writeUpright(pen, text, x, y) {
  pen.save();
  pen.translate(x, y);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "left";
  pen.fillText(text, 0, 0);
  pen.restore();
}

// The border between a token's past, on its left, and its future.
function drawStairs(pen, { n, cell, left, top }) {
  pen.beginPath();
  pen.moveTo(left + cell, top);
  for (let i = 1; i < n; i += 1) {
    pen.lineTo(left + i * cell, top + i * cell);
    pen.lineTo(left + (i + 1) * cell, top + i * cell);
  }
  pen.lineTo(left + n * cell, top + n * cell);
  pen.stroke();
}
