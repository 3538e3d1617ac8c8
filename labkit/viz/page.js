// Draws the anywidgets of a page that has no kernel. Their state is in the page, in the format that Jupyter writes into
// notebooks; the places for them are the elements with `data-widget`, which show something else until the widget is drawn.
{
  // The part of an anywidget's model that needs no kernel.
  function modelOf({ state, buffers = [] }) {
    for (const { path, data } of buffers) {
      const parent = path.slice(0, -1).reduce((value, key) => value[key], state);
      parent[path.at(-1)] = new DataView(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer);
    }
    if ("live" in state) state.live = false; // tells labkit's widgets that no Python will answer them
    const listeners = new Map();
    const of = (event) => listeners.get(event) ?? listeners.set(event, new Set()).get(event);
    return {
      get: (name) => state[name],
      set(name, value) {
        if (state[name] === value) return;
        state[name] = value;
        for (const call of [...of(`change:${name}`), ...of("change")]) call();
      },
      on: (event, call) => of(event).add(call),
      off: (event, call) => (call ? of(event).delete(call) : listeners.delete(event)),
      save_changes() {},
      send() {},
    };
  }

  const modules = new Map(); // a module that several widgets share is loaded once, with its style
  function moduleOf({ _esm, _css = "" }) {
    if (!modules.has(_esm)) {
      const style = document.createElement("style");
      style.textContent = _css;
      document.head.append(style);
      modules.set(_esm, import(URL.createObjectURL(new Blob([_esm], { type: "text/javascript" }))));
    }
    return modules.get(_esm);
  }

  const carried = document.querySelectorAll('script[type="application/vnd.jupyter.widget-state+json"]');
  const widgets = Object.assign({}, ...[...carried].map((script) => JSON.parse(script.textContent).state));
  const models = new Map();
  document.querySelectorAll("[data-widget]").forEach(async (place) => {
    const id = place.dataset.widget;
    if (!models.has(id)) models.set(id, modelOf(widgets[id]));
    const { default: widget } = await moduleOf(widgets[id].state);
    const el = document.createElement("div");
    await widget.render({ model: models.get(id), el });
    place.replaceChildren(el); // last, so that the fallback stays if the widget cannot be drawn
    place.dataset.drawn = "";
  });
}
