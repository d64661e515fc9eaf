// Draws the plots of a page when they come into view, switches their curves, and keeps zooms together.
"use strict";
(() => {
  const SETTINGS = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };
  const touched = matchMedia("(pointer: coarse)").matches;
  const off = new Set(); // legend entries that are switched off
  const across = new Map(); // horizontal ranges, by what zooms together
  const upright = new Map(); // vertical ranges, by plot
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;

  // The colour that the style sheet has now, which plotly could not find out.
  function colour(paint, alpha = 1) {
    probe.style.color = paint;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${r}, ${g}, ${b}, ${alpha})`;
  }

  function dressed(trace, plot) {
    const { paint, alpha, group, series } = trace.meta;
    const visible = !off.has(`group ${group}`) && !off.has(`${plot.id} ${series}`);
    const plain = colour(paint);
    if (trace.type === "bar") return { ...trace, marker: { color: plain } };
    if (alpha !== undefined) {
      return { ...trace, visible, fillcolor: colour(paint, alpha), line: { ...trace.line, color: plain } };
    }
    return { ...trace, visible, line: { ...trace.line, color: plain }, marker: { ...trace.marker, color: plain } };
  }

  function layoutOf(given, plot) {
    const soft = colour("var(--soft)");
    const faint = colour("var(--faint)");
    const axis = { color: soft, gridcolor: faint, zerolinecolor: faint, linecolor: colour("var(--line)"), ticks: "" };
    const xaxis = { ...axis, nticks: 7, showline: true, ...given.xaxis };
    const yaxis = { ...axis, nticks: 6, ...given.yaxis };
    if (xaxis.title) xaxis.title = { ...xaxis.title, standoff: 8 };
    if (across.has(plot.dataset.link)) xaxis.range = [...across.get(plot.dataset.link)];
    if (upright.has(plot.id)) yaxis.range = [...upright.get(plot.id)];
    return {
      xaxis,
      yaxis,
      autosize: true,
      showlegend: false,
      hovermode: "closest",
      hoverdistance: 40,
      dragmode: touched ? false : "zoom",
      margin: { l: 48, r: 10, t: 8, b: xaxis.title ? 42 : 26 },
      font: { family: "system-ui, sans-serif", size: 11, color: soft },
      hoverlabel: { bgcolor: colour("var(--card)"), bordercolor: soft, font: { color: colour("var(--ink)"), size: 12 } },
      paper_bgcolor: "rgba(0, 0, 0, 0)",
      plot_bgcolor: "rgba(0, 0, 0, 0)",
    };
  }

  function draw(plot) {
    const { data, layout } = JSON.parse(document.getElementById(`${plot.id}-figure`).textContent);
    const first = !plot.classList.contains("drawn");
    plot.classList.add("drawn");
    Plotly.react(plot, data.map((trace) => dressed(trace, plot)), layoutOf(layout, plot), SETTINGS);
    if (!first) return;
    plot.on("plotly_relayout", (change) => zoomed(plot, Object.keys(change)));
    plot.on("plotly_doubleclick", () => {
      across.delete(plot.dataset.link);
      upright.delete(plot.id);
      drawn().filter((other) => other.dataset.link === plot.dataset.link).forEach(draw);
    });
  }

  function drawn() {
    return [...document.querySelectorAll(".plot.drawn")];
  }

  function zoomed(plot, changed) {
    if (changed.some((key) => key.startsWith("yaxis.range"))) upright.set(plot.id, plot.layout.yaxis.range);
    if (!changed.some((key) => key.startsWith("xaxis.range"))) return;
    across.set(plot.dataset.link, plot.layout.xaxis.range);
    drawn().filter((other) => other !== plot && other.dataset.link === plot.dataset.link).forEach(draw);
  }

  function entry(button) {
    const { group, plot, series } = button.dataset;
    return group === undefined ? `${plot} ${series}` : `group ${group}`;
  }

  const seen = new IntersectionObserver(
    (found) => {
      for (const { target, isIntersecting } of found) {
        if (!isIntersecting) continue;
        seen.unobserve(target);
        if (!target.classList.contains("drawn")) draw(target);
      }
    },
    { rootMargin: "400px" },
  );

  // Also after the page has got new elements.
  function start() {
    document.documentElement.classList.add("scripted");
    for (const button of document.querySelectorAll("[data-group], [data-series]")) {
      button.setAttribute("aria-pressed", String(!off.has(entry(button))));
    }
    for (const plot of document.querySelectorAll(".plot")) {
      if (plot.classList.contains("drawn")) draw(plot);
      else seen.observe(plot);
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-group], [data-series]");
    if (!button) return;
    const name = entry(button);
    if (!off.delete(name)) off.add(name);
    button.setAttribute("aria-pressed", String(!off.has(name)));
    drawn().filter((plot) => !button.dataset.plot || plot.id === button.dataset.plot).forEach(draw);
  });
  document.addEventListener("theme", () => drawn().forEach(draw));
  document.addEventListener("renewed", start);
  addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach(draw));
  start();
})();
