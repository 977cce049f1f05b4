// Draws each chart of the page in its figure, in the colours of the page, and again if these change.
"use strict";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const tooltip = document.getElementById("tooltip");
let views = [];

function showTooltip(_handler, event, _item, value) {
  tooltip.hidden = value == null || value === "";
  if (tooltip.hidden) return;
  const lines = typeof value === "object" ? Object.entries(value) : [["", value]];
  tooltip.replaceChildren(...lines.map(([key, text]) => {
    const line = document.createElement("div");
    line.textContent = key ? `${key}: ${text}` : String(text); // text, never markup
    return line;
  }));
  const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - tooltip.offsetWidth - 8);
  tooltip.style.left = `${Math.max(left, 8)}px`;
  tooltip.style.top = `${event.clientY + 14}px`;
}

function themed() {
  const style = getComputedStyle(document.documentElement);
  const [ink, faint, paper] = ["--ink", "--faint", "--paper"].map((name) => style.getPropertyValue(name).trim());
  const axis = { labelColor: ink, titleColor: ink, domainColor: faint, tickColor: faint, gridColor: faint, titleFontWeight: "normal" };
  return {
    background: null, axis, legend: { labelColor: ink, titleColor: ink, titleFontWeight: "normal" },
    title: { color: ink }, text: { fill: ink }, group: { stroke: null },
    signals: [{ name: "outline", value: paper }], style: { cell: { stroke: null } },
  };
}

async function draw() {
  views.forEach((view) => view.finalize());
  views = [];
  const config = themed();
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const spec = JSON.parse(document.getElementById(figure.dataset.chart).textContent);
    figure.replaceChildren();
    const mode = spec.marks ? "vega" : "vega-lite";
    const options = { mode, actions: false, config, defaultStyle: false, renderer: "svg", tooltip: showTooltip };
    views.push(await vegaEmbed(figure, spec, options));
  }
  document.documentElement.dataset.drawn = String(views.length);
}

dark.addEventListener("change", draw);
draw();
