// Shows one of the pictures that the model holds; a slider or a row of buttons chooses it. Asks no kernel, loads nothing.

function element(tag, className, attributes = {}) {
  const made = document.createElement(tag);
  made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// JupyterLab has commands of its own for Enter and the arrow keys; on these controls they belong to the control.
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };

function slider(model, choose) {
  const row = element("label", "labkit-slider");
  const name = element("span", "labkit-name");
  const last = model.get("labels").length - 1;
  const input = element("input", "", {
    type: "range", min: 0, max: last, step: 1, "aria-label": model.get("control"), ...OWN_KEYS,
  });
  const now = element("output", "labkit-now");
  name.textContent = model.get("control");
  input.addEventListener("input", () => choose(Number(input.value)));
  row.append(name, input, now);
  const show = (index) => {
    const label = model.get("labels")[index];
    input.value = index;
    input.style.setProperty("--labkit-done", last > 0 ? index / last : 1);
    input.setAttribute("aria-valuetext", label);
    now.textContent = label;
  };
  return [row, show];
}

function buttons(model, choose) {
  const row = element("div", "labkit-buttons", { role: "group", "aria-label": model.get("control") });
  const made = model.get("labels").map((label, index) => {
    const button = element("button", "labkit-button", { type: "button", "aria-label": `hide ${label}`, ...OWN_KEYS });
    const word = element("span", "labkit-word");
    word.textContent = label;
    button.append(word);
    button.addEventListener("click", () => choose(index));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const next = made[index + step];
      if (next) {
        next.focus();
        event.preventDefault();
      }
    });
    row.append(button);
    return button;
  });
  return [row, (index) => made.forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)))];
}

function render({ model, el }) {
  const card = element("div", "labkit-frames");
  const picture = element("div", "labkit-picture");
  const sentence = element("p", "labkit-sentence", { "aria-live": "polite" });
  const choose = (index) => {
    model.set("index", index);
    model.save_changes();
  };
  const [control, showControl] = (model.get("buttons") ? buttons : slider)(model, choose);
  const show = () => {
    const index = model.get("index");
    const lines = model.get("lines");
    picture.innerHTML = model.get("frames")[index].map((line) => lines[line]).join("\n");
    sentence.textContent = model.get("sentences")[index];
    showControl(index);
  };
  card.append(control, picture, sentence);
  el.append(card);
  show();
  model.on("change:index", show);
  return () => model.off("change:index", show);
}

export default { render };
