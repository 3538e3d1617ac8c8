// d3 and jQuery for all views of a page. Neither becomes a global of the page: other scripts that use a `d3`, a `$` or a
// module loader keep their own.
const shared = (window.labkitBrowser = window.labkitBrowser || { count: 0 });
if (!shared.d3) {
  const d3 = {}, jquery = { exports: {} };
  (function (exports, module, define) {
/*D3*/
  }).call(window, d3, {}, undefined);
  (function (exports, module, define) {
/*JQUERY*/
  }).call(window, jquery.exports, jquery, undefined);
  shared.jquery = jquery.exports;
  shared.d3 = d3;
}

// Puts one view in its place and lets bertviz draw it. `width`: pixels that a drawing needs. `panels`: one drawing each,
// {heading, note, html, layers, draw(root, d3, jquery)}.
function labkitView(id, panels, width) {
  const here = document.querySelector(`[data-labkit-view="${id}"]:not([data-labkit-drawn])`);
  if (!here) return; // its output has been cleared
  here.dataset.labkitDrawn = "";
  const row = document.createElement("div");
  row.style.cssText = "display:flex;flex-wrap:wrap;gap:8px 32px";
  here.prepend(row);
  try {
    const choosers = panels.map(add).filter(Boolean);
    for (const chooser of choosers) chooser.addEventListener("change", () => follow(chooser, choosers));
    here.querySelector("[data-labkit-still]").style.display = "none";
  } catch (error) {
    row.remove();
    here.querySelector("[data-labkit-why]").textContent = `bertviz could not draw this view: ${error}`;
    console.error(error);
  }

  // Draws a panel; gives its chooser of layers.
  function add(panel) {
    const box = document.createElement("div");
    box.style.cssText = `flex:1 1 ${width}px;min-width:0;overflow-x:auto`;
    box.innerHTML = panel.html;
    box.prepend(line(panel.heading, "font-weight:bold"), line(panel.note, "color:#5B6670"));
    row.append(box);
    const root = box.querySelector('[id^="bertviz"]');
    root.id = `bertviz-${(shared.count += 1)}`; // the same output may stand in a page twice
    // bertviz's neuron view looks for "#vis" in the whole page and would find another view's.
    const d3 = Object.create(shared.d3);
    d3.select = (what) => shared.d3.select(what === "#vis" ? root.querySelector("#vis") : what);
    panel.draw(root, d3, shared.jquery);
    root.querySelector("#vis").style.minWidth = `${width}px`; // in a narrow notebook it is scrolled, not cut
    const [layer, head] = ["#layer", "#att_head"].map((which) => root.querySelector(which));
    layer?.setAttribute("aria-label", "layer");
    head?.setAttribute("aria-label", "head");
    Array.from(layer?.options ?? []).forEach((option, i) => (option.textContent = panel.layers[i])); // as in the model
    return layer;
  }

  function line(text, style) {
    const made = document.createElement("div");
    made.textContent = text;
    made.style.cssText = `${style};display:${text ? "block" : "none"}`;
    return made;
  }

  // Views beside each other show the same layer.
  function follow(chooser, choosers) {
    for (const other of choosers.filter((one) => one.value !== chooser.value)) {
      other.value = chooser.value;
      other.dispatchEvent(new Event("change"));
    }
  }
}
