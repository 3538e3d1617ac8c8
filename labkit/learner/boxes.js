// A question and a place to write; in the box "explain" also what was predicted. With a kernel Python keeps the text;
// without one the browser's storage does. Nothing is sent anywhere.

const WRITTEN = "labkit-written"; // told to the other box of the same name on this page

const PATIENCE = 4000; // milliseconds until Python must have answered
const UNHEARD = "Not kept: no Python listens. Run this cell, then write.";

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

const key = (name, which) => `labkit:${name}:${which}`;

function stored(name, which) {
  try {
    return localStorage.getItem(key(name, which)) ?? "";
  } catch {
    return ""; // storage is forbidden here; writing says so
  }
}

function store(name, which, text) {
  try {
    if (text.trim()) localStorage.setItem(key(name, which), text);
    else localStorage.removeItem(key(name, which));
    return "Kept in this browser only.";
  } catch {
    return "Not kept: this browser allows no storage for the page.";
  }
}

function render({ model, el }) {
  const [name, stage, live] = ["name", "stage", "live"].map((trait) => model.get(trait));
  const which = stage === "predict" ? "prediction" : "explanation";
  const card = element("section", `labkit-box labkit-${stage}`);
  const title = element("strong", "labkit-title", stage === "predict" ? "Predict" : "Explain");
  const before = element("p", "labkit-before");
  const label = element("label", "labkit-question", model.get("question"));
  const area = element("textarea", "labkit-area");
  const note = element("p", "labkit-note");
  area.id = `labkit-${name}-${stage}-${Math.random().toString(36).slice(2, 8)}`;
  area.rows = 2;
  area.placeholder = stage === "predict" ? "Write it down before you look." : "";
  area.dataset.lmSuppressShortcuts = "true"; // in JupyterLab keys belong to the text
  label.htmlFor = area.id;
  note.setAttribute("role", "status");
  card.setAttribute("aria-label", title.textContent);

  const showPrediction = (text) => {
    before.textContent = text.trim() ? `You predicted: ${text}` : "You have written no prediction for this.";
  };
  area.value = live ? model.get("text") : stored(name, which);
  if (stage === "explain") {
    showPrediction(live ? model.get("prediction") : stored(name, "prediction"));
    card.append(title, before, label, area, note);
  } else {
    card.append(title, label, area, note);
  }
  let waiting;
  const answered = () => {
    clearTimeout(waiting);
    note.textContent = model.get("kept");
  };

  area.addEventListener("input", () => {
    window.dispatchEvent(new CustomEvent(WRITTEN, { detail: { name, which, text: area.value } }));
    if (!live) note.textContent = store(name, which, area.value);
  });
  area.addEventListener("change", () => {
    if (!live) return;
    model.set("text", area.value);
    model.save_changes();
    clearTimeout(waiting);
    waiting = setTimeout(() => (note.textContent = UNHEARD), PATIENCE);
  });
  const heard = ({ detail }) => {
    if (stage === "explain" && detail.name === name && detail.which === "prediction") showPrediction(detail.text);
  };
  window.addEventListener(WRITTEN, heard);
  model.on("change:answers", answered);
  el.append(card);
  return () => {
    window.removeEventListener(WRITTEN, heard);
    clearTimeout(waiting);
    model.off("change:answers", answered);
  };
}

export default { render };
