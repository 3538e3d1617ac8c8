// Puts one view in its place and lets bertviz draw it. `fill`: pixels that a drawing needs in width. `panels`: one drawing
// each, {heading, note, alt, html, layers, heads, draw(root, d3, jquery)}. `shared` holds d3 and jQuery.
function labkitView(id, panels, fill) {
  const here = document.querySelector(`[data-labkit-view="${id}"]:not([data-labkit-drawn])`);
  if (!here) return; // its output has been cleared
  here.dataset.labkitDrawn = "";
  const row = document.createElement("div");
  row.style.cssText = "display:flex;flex-wrap:wrap;gap:8px 32px";
  here.prepend(row);
  try {
    link(panels.map(add));
    here.querySelector("[data-labkit-still]").style.display = "none";
  } catch (error) {
    row.remove();
    here.querySelector("[data-labkit-why]").textContent = `bertviz could not draw this view: ${error}`;
    console.error(error);
  }

  function add(panel) {
    const box = document.createElement("div");
    box.style.cssText = `flex:1 1 ${fill}px;min-width:0;overflow-x:auto`;
    box.innerHTML = panel.html;
    box.prepend(line(panel.heading, "font-weight:bold"), line(panel.note, "color:#5B6670"));
    row.append(box);
    const root = box.querySelector('[id^="bertviz"]');
    root.id = `bertviz-${(shared.count += 1)}`; // the same output may stand in a page twice
    panel.draw(root, within(root), shared.jquery);
    name(root, "#layer", panel.layers, "layer");
    name(root, "#att_head", panel.heads, "head");
    root.querySelector("#vis").style.minWidth = `${fill}px`; // in a narrow notebook it is scrolled, not cut
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", panel.alt);
    return root;
  }

  function line(text, style) {
    const made = document.createElement("div");
    made.textContent = text;
    made.style.cssText = `${style};display:${text ? "block" : "none"}`;
    return made;
  }

  // d3 for one view. bertviz's neuron view looks for "#vis" in the whole page and would find another view's.
  function within(root) {
    const own = Object.create(shared.d3);
    own.select = (what) => shared.d3.select(what === "#vis" ? root.querySelector("#vis") : what);
    return own;
  }

  // A chooser for screen readers; its choices under the numbers that they have in the model.
  function name(root, which, numbers, what) {
    const chooser = root.querySelector(which);
    if (!chooser) return;
    chooser.setAttribute("aria-label", what);
    Array.from(chooser.options).forEach((option, i) => (option.textContent = numbers[i]));
  }

  // Views beside each other show the same layer.
  function link(roots) {
    const choosers = roots.map((root) => root.querySelector("#layer")).filter(Boolean);
    choosers.forEach((one) =>
      one.addEventListener("change", () => {
        const others = choosers.filter((other) => other.value !== one.value);
        others.forEach((other) => {
          other.value = one.value;
          other.dispatchEvent(new Event("change"));
        });
      })
    );
  }
}
