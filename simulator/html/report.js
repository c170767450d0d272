// The charts of a report within `scope`, drawn by `ready` (a promise of Plotly); returns what draws them anew.
function opcastReport(scope, ready) {
  "use strict";
  const root = document.documentElement;
  const layers = [...scope.querySelectorAll("figure.layers")].map(opcastLayers);
  const coarse = matchMedia("(pointer: coarse)").matches;
  const charts = [...scope.querySelectorAll("figure.chart")].map((element) => ({
    element,
    node: element.querySelector(".plot"),
    section: element.closest("section"),
    variants: JSON.parse(element.querySelector("script").textContent),
    variant: null,
  }));
  const legends = [...scope.querySelectorAll(".legend")].map((element) => {
    const section = element.closest("section");
    return { element, hidden: new Set(), charts: charts.filter((chart) => chart.section === section) };
  });
  for (const legend of legends) for (const chart of legend.charts) chart.legend = legend;

  // --- figures name colours; the theme gives them values
  function resolved(value, style) {
    if (typeof value === "string") {
      const name = value.startsWith("var(--") && value.slice(4, -1);
      return name ? style.getPropertyValue(name).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, style)]));
    }
    return value;
  }

  function shown(chart) {
    return chart.variants[chart.variant in chart.variants ? chart.variant : Object.keys(chart.variants)[0]];
  }

  function drawn(chart) {
    const figure = resolved(shown(chart), getComputedStyle(root));
    for (const trace of figure.data) if (chart.legend?.hidden.has(trace.legendgroup)) trace.visible = false;
    const layout = figure.layout;
    layout.uirevision = chart.variant;
    const narrow = chart.node.clientWidth < 520;
    if (narrow) { layout.font.size = 10.5; layout.margin.r = 8; }
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis/.test(key)) continue;
      if (coarse) layout[key].fixedrange = true; // a finger on the chart scrolls the page
      if (narrow && layout[key].nticks) layout[key].nticks = 4;
    }
    if (coarse) layout.dragmode = false;
    return figure;
  }

  let plotly = null;
  function draw(chart) {
    if (!plotly || !chart.node.isConnected) return; // drawn once Plotly is there, and as long as it is shown
    const figure = drawn(chart);
    const config = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false };
    plotly.react(chart.node, figure.data, figure.layout, config);
  }

  function fill(legend) {
    const entries = new Map();
    for (const trace of legend.charts.flatMap((chart) => shown(chart).data)) {
      if (trace.meta && !entries.has(trace.meta.name)) entries.set(trace.meta.name, trace);
    }
    const ordered = [...entries].sort((a, b) => (a[1].meta.place ?? 0) - (b[1].meta.place ?? 0));
    legend.element.replaceChildren(...ordered.map(([name, trace]) => {
      const button = document.createElement("button");
      const mark = document.createElement("i");
      button.type = "button";
      mark.style.background = (trace.marker || trace.line).color;
      button.append(mark, name);
      button.setAttribute("aria-pressed", String(!legend.hidden.has(trace.legendgroup)));
      button.addEventListener("click", () => {
        if (!legend.hidden.delete(trace.legendgroup)) legend.hidden.add(trace.legendgroup);
        button.setAttribute("aria-pressed", String(!legend.hidden.has(trace.legendgroup)));
        legend.charts.forEach(draw);
      });
      return button;
    }));
  }

  // --- zoom buttons, for fingers and keyboards
  function zoom(chart, button) {
    if (!chart.node.layout) return; // not drawn yet
    const axis = chart.node.layout.xaxis;
    const end = shown(chart).layout.xaxis.range[1];
    let [low, high] = axis.range;
    const width = high - low;
    if (button.dataset.move) { low += width * Number(button.dataset.move); high += width * Number(button.dataset.move); }
    if (button.dataset.scale) {
      const middle = (low + high) / 2;
      low = middle - (width * Number(button.dataset.scale)) / 2;
      high = middle + (width * Number(button.dataset.scale)) / 2;
    }
    const kept = Math.min(high - low, end);
    low = Math.min(Math.max(low, 0), end - kept);
    plotly?.relayout(chart.node, { "xaxis.range": "whole" in button.dataset ? [0, end] : [low, low + kept] });
  }
  for (const chart of charts) {
    for (const button of chart.element.querySelectorAll(".zoom button")) {
      button.addEventListener("click", () => zoom(chart, button));
    }
  }

  // --- choices: one variant of a section at a time
  function choose(section, name) {
    for (const button of section.querySelectorAll("[data-choose]")) {
      button.setAttribute("aria-pressed", String(button.dataset.choose === name));
    }
    for (const part of section.querySelectorAll("[data-variant]")) part.hidden = part.dataset.variant !== name;
    for (const chart of charts) {
      if (chart.section !== section || chart.variant === name) continue;
      const first = chart.variant === null;
      chart.variant = name;
      if (!first && name in chart.variants) draw(chart);
    }
    legends.filter((legend) => legend.element.closest("section") === section).forEach(fill);
  }
  for (const section of scope.querySelectorAll("section")) {
    const buttons = [...section.querySelectorAll("[data-choose]")];
    for (const button of buttons) button.addEventListener("click", () => choose(section, button.dataset.choose));
    if (buttons.length) choose(section, buttons[0].dataset.choose);
  }

  legends.forEach(fill);

  // One chart per task, so that the page answers while it is being drawn.
  ready.then((found) => {
    plotly = found;
    charts.forEach((chart) => setTimeout(() => draw(chart), 0));
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redraw();
  });
  function redraw() {
    charts.forEach(draw);
    layers.forEach((again) => again());
  }
  return redraw;
}
