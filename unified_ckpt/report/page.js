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

// Shows what changed between the selected steps, as StepChanges.compare does.
function compareSteps(view) {
  const { patterns, layers } = JSON.parse(document.getElementById("step-changes").textContent);
  const [before, after] = ["before", "after"].map((id) => Number(document.getElementById(id).value));
  const rows = [], changedByLayer = new Map();
  let total = 0, changed = 0;
  for (const [part, layer, sizes] of layers) {
    const present = sizes.filter(([number]) => patterns[number][after] >= 0);
    const differing = present.filter(([number]) => patterns[number][before] !== patterns[number][after]);
    const [whole, different] = [present, differing].map((list) => list.reduce((sum, [, size]) => sum + size, 0));
    if (!whole) continue;
    rows.push({ part, layer, changed: different / whole });
    changedByLayer.set(layer, (changedByLayer.get(layer) ?? 0) + different);
    total += whole; changed += different;
  }
  const [share, count] = document.querySelectorAll("dl.compared dd");
  share.textContent = `${(100 * changed / Math.max(total, 1)).toFixed(1)}%`;
  count.textContent = `${[...changedByLayer.values()].filter((size) => size === 0).length} of ${changedByLayer.size}`;
  view.data("changes", rows).run();
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
    const result = await vegaEmbed(figure, spec, options);
    views.push(result);
    if (spec.data.name === "changes") {
      const update = () => compareSteps(result.view);
      for (const id of ["before", "after"]) document.getElementById(id).onchange = update;
      update();
    }
  }
  document.documentElement.dataset.drawn = String(views.length);
}

dark.addEventListener("change", draw);
draw();
