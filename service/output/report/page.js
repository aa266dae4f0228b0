"use strict";
// Draws every figure of the report in the colours of the page, and again when those change.
(() => {
  const written = document.getElementById("figures").textContent;
  const figures = JSON.parse(written);
  // Dark blue on a dark page is hard to see: the two blues of the palette change places there.
  const brighter = JSON.parse(written.replace(/#0072B2|#56B4E9/g, (blue) => (blue === "#0072B2" ? "#56B4E9" : "#0072B2")));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displayModeBar: false };

  const colours = (printing) => {
    const style = getComputedStyle(document.documentElement);
    const of = (name, printed) => (printing ? printed : style.getPropertyValue(name).trim());
    return { text: of("--text", "#000"), line: of("--line", "#ccc"), dim: of("--dim", "#444") };
  };

  const themed = (layout, { text, line, dim }) => ({
    ...layout,
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: text },
    xaxis: { ...layout.xaxis, gridcolor: line, zerolinecolor: dim, linecolor: dim },
    yaxis: { ...layout.yaxis, gridcolor: line, zerolinecolor: dim, linecolor: dim },
  });

  const draw = (printing) => Promise.all((dark.matches && !printing ? brighter : figures).map(({ id, data, layout }) =>
    Plotly.react(id, data, themed(layout, colours(printing)), config)));

  draw(false).then(() => { document.documentElement.dataset.drawn = String(figures.length); });
  dark.addEventListener("change", () => draw(false));
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw(false));
})();
