// Draws the plotly figures of a page, which the page carries as JSON. Only such a page loads plotly.js.
{
  const figures = document.querySelectorAll("figure.plotly");

  function draw() {
    for (const figure of figures) {
      const { data, layout, config, frames } = JSON.parse(figure.querySelector("script").textContent);
      const drawing = figure.querySelector(".drawing");
      const { text = "", subtitle = {} } = layout.title ?? {};
      drawing.setAttribute("aria-label", `${text} ${subtitle.text ?? ""}`.replace(/<[^>]*>/g, " ").trim() || "Figure");
      Plotly.newPlot(drawing, { data, layout, frames, config: { ...config, responsive: true, displaylogo: false } });
    }
  }

  if (figures.length) {
    const library = document.createElement("script");
    library.src = new URL("plotly.min.js", document.currentScript.src);
    library.addEventListener("load", draw);
    document.head.append(library);
  }

  // A figure in a closed fold was drawn without a width.
  document.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")), true);
}
