// Draws what the page carries as data: plotly figures, and widgets that need no kernel. Asks the network for nothing.

for (const figure of document.querySelectorAll("figure.plotly")) {
  const { data, layout, config, frames } = JSON.parse(figure.querySelector("script").textContent);
  const drawing = figure.querySelector(".drawing");
  Plotly.newPlot(drawing, { data, layout, frames, config: { ...config, responsive: true, displaylogo: false } });
}

// A figure in a fold that was closed has had no width to go by.
document.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")), true);

// What an anywidget's module asks of its model, without a kernel behind it.
function standalone(values) {
  const listeners = new Map();
  const calls = (name) => listeners.get(name) ?? listeners.set(name, new Set()).get(name);
  return {
    get: (name) => values[name],
    set(name, value) {
      if (values[name] === value) return;
      values[name] = value;
      for (const call of [...calls(`change:${name}`), ...calls("change")]) call();
    },
    on: (name, call) => calls(name).add(call),
    off: (name, call) => (call ? calls(name).delete(call) : listeners.delete(name)),
    save_changes() {},
    send() {},
  };
}

// Bytes travel beside the values as base64, each with its place among them; an anywidget expects a DataView there.
function restore(values, buffers) {
  for (const { path, data } of buffers) {
    const parent = path.slice(0, -1).reduce((inner, step) => inner[step], values);
    parent[path.at(-1)] = new DataView(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer);
  }
}

async function wake({ modules, models }) {
  const loaded = modules.map(({ esm, css }) => {
    const style = document.createElement("style");
    style.textContent = css;
    document.head.append(style);
    return import(URL.createObjectURL(new Blob([esm], { type: "text/javascript" })));
  });
  const made = new Map();
  for (const place of document.querySelectorAll("[data-widget]")) {
    const { module, values, buffers } = models[place.dataset.widget];
    const widget = (await loaded[module]).default;
    if (!made.has(values)) {
      restore(values, buffers);
      made.set(values, standalone(values));
      await widget.initialize?.({ model: made.get(values) });
    }
    const el = document.createElement("div");
    await widget.render({ model: made.get(values), el });
    place.replaceChildren(el); // only now: if anything fails before, the picture stays
  }
}

const carried = document.getElementById("labkit-widgets");
if (carried) wake(JSON.parse(carried.textContent));
