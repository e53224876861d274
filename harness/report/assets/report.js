"use strict";
// Draws the figures from the embedded data and lets a reader browse positions. Text from recordings reaches the page
// through textContent, or through `plain` where Plotly would read it as markup; never through innerHTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const ints = (text) => new Int32Array(bytes(text).buffer);
  const array = (packed) => (packed && packed.f32 !== undefined ? Array.from(floats(packed.f32)) : packed);
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const number = (x) => (x === null || Number.isNaN(x) ? "-" : x === 0 ? "0" : Math.abs(x) < 0.01 || Math.abs(x) >= 1e6 ? x.toExponential(2) : String(Number(x.toPrecision(3))));
  const element = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  // ---------------------------------------------------------------- positions

  const places = data.positions && {
    segments: data.positions.segments,
    segment: ints(data.positions.segment),
    index: ints(data.positions.index),
    step: ints(data.positions.step),
    facts: data.positions.facts.map(([name, values]) => [name, ints(values)]),
  };
  const DETAIL = ["row", "phase", "kl", "margin", "flip", "context", "target", "reference", "candidate", "segment", "index", "step"];
  const details = new Map();

  async function readDetails() {
    const packed = document.getElementById("details").textContent;
    if (!packed || typeof DecompressionStream === "undefined") return;
    const stream = new Blob([bytes(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
    for (const item of JSON.parse(await new Response(stream).text())) {
      const named = Object.fromEntries(DETAIL.map((name, i) => [name, item[i]]));
      details.set(named.row, named);
    }
  }

  const tops = (list) => list.map(([text, share, id]) => `${plain(JSON.stringify(text))} ${share} (${id})`).join("  ");

  function wrapped(text, width) {
    const lines = [];
    for (let at = 0; at < text.length; at += width) lines.push(plain(text.slice(at, at + width)));
    return lines.join("<br>");
  }

  function describe(row) {
    const step = places.step[row];
    const place = `<b>${plain(places.segments[places.segment[row]])}</b>, index ${places.index[row]}${step >= 0 ? `, decode step ${step}` : ", prefill"}`;
    const facts = places.facts.filter(([, values]) => values[row] >= 0).map(([name, values]) => `${name} ${values[row]}`).join(", ");
    const found = details.get(row);
    const known = facts ? `${place}<br>${facts}` : place;
    if (!found) return known;
    return `${known}<br>${wrapped(found.context, 90)}<br>→ ${plain(found.target)}<br>reference  ${tops(found.reference)}<br>candidate  ${tops(found.candidate)}`;
  }

  // ---------------------------------------------------------------- figures

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const SYMBOLS = { candidate: "circle", floor: "square-open", flip: "x", predicted: "diamond-open", detectable: "diamond", rest: "circle", one: "circle", two: "square", three: "diamond", four: "triangle-up", five: "x" };
  const MANY = 400; // points from which markers are small

  function trace(figure, series, axes, seen) {
    const colour = style(`--c-${series.role}`);
    const x = array(series.x), y = array(series.y);
    const rows = series.rows && ints(series.rows);
    const many = x.length > MANY;
    const across = figure.y.scale === "category";
    const values = across ? x : y;
    const made = {
      type: "scatter", x, y, ...axes, name: plain(series.name), legendgroup: plain(series.name), showlegend: !seen.has(series.name),
      mode: [series.line && "lines", series.points && "markers"].filter(Boolean).join("+"),
      line: { color: colour, width: 2, dash: series.dashed ? "dash" : "solid" },
      marker: { color: colour, symbol: SYMBOLS[series.role], size: many ? 4 : 8, opacity: many ? 0.55 : 1, line: { width: series.role === "flip" ? 1 : 0, color: colour } },
      hovertemplate: `${plain(figure.x.label)} %{x}<br>${plain(figure.y.label)} %{y}<extra>${plain(series.name)}</extra>`,
    };
    seen.add(series.name);
    if (rows) {
      made.text = Array.from(rows, describe);
      made.hovertemplate = `%{text}<br>margin %{x:.3g}, KL20 %{y:.3g}<extra>${plain(series.name)}</extra>`;
    }
    if (series.low) {
      const low = array(series.low), high = array(series.high);
      const gap = (a, b) => (a === null || b === null ? 0 : Math.max(0, a - b));
      made[across ? "error_x" : "error_y"] = {
        type: "data", symmetric: false, color: colour, thickness: 1.6, width: 4,
        array: values.map((v, i) => gap(high[i], v)), arrayminus: values.map((v, i) => gap(v, low[i])),
      };
    }
    return made;
  }

  function range(figure, axis, name) {
    const across = figure.y.scale === "category";
    const valued = across ? "x" : "y";
    if (axis.scale === "category") return name === "y" ? { autorange: "reversed" } : {};
    let numbers = figure.panels.flatMap((p) => p.series.flatMap((s) => array(s[name]))).filter((v) => Number.isFinite(v));
    if (name === valued && figure.limit !== null) numbers = numbers.concat([figure.limit, 1]);
    if (!numbers.length) return {};
    let low = Math.min(...numbers), high = Math.max(...numbers);
    if (axis.scale === "log") {
      // Intervals may be endless; they are cut off rather than allowed to squeeze the values together.
      const room = name === valued ? 0.12 * (Math.log10(high / low) || 0) + 0.15 : 0.04 * (Math.log10(high / low) || 0) + 0.06;
      return { range: [Math.log10(low) - room, Math.log10(high) + room] };
    }
    const room = 0.05 * (high - low || 1);
    if (name === valued) {
      const bounds = figure.panels.flatMap((p) => p.series.flatMap((s) => (s.high ? array(s.high) : []))).filter((v) => Number.isFinite(v));
      high = Math.max(high, ...bounds);
    }
    return { range: [low === 0 ? -room : low - room, high + room] };
  }

  function scale(figure, axis, name) {
    const made = { type: axis.scale, title: { text: plain(axis.label), standoff: 8 }, gridcolor: style("--line"), linecolor: style("--line"), zeroline: false, automargin: true, tickfont: { size: 12 }, ...range(figure, axis, name) };
    if (axis.scale === "log") {
      const own = [...new Set(figure.panels.flatMap((p) => p.series.flatMap((s) => array(s[name]))))].filter((v) => Number.isFinite(v));
      if (axis.label.startsWith("context depth") && own.length <= 8) Object.assign(made, { tickvals: own, ticktext: own.map(String), minor: { showgrid: false } });
      else Object.assign(made, ticks(made.range));
    }
    if (axis.scale === "category") made.type = "category";
    return made;
  }

  // Decades, or where there are few of them 1, 2, 5 as well: written out near 1, as powers elsewhere.
  function ticks(span) {
    if (!span) return {};
    const [low, high] = span;
    const every = Math.max(1, Math.ceil((high - low) / 7));
    const factors = high - low < 2.2 ? [1, 2, 5] : [1];
    const tickvals = [], ticktext = [];
    for (let power = Math.ceil(low) - 1; power <= high; power += 1) {
      if (((power % every) + every) % every) continue;
      for (const factor of factors) {
        const value = factor * 10 ** power;
        if (Math.log10(value) < low || Math.log10(value) > high) continue;
        tickvals.push(value);
        ticktext.push(power >= -2 && power <= 3 ? String(Number(value.toPrecision(3))) : (factor === 1 ? "" : `${factor}·`) + `10<sup>${power}</sup>`);
      }
    }
    return { tickvals, ticktext };
  }

  function columnsFor(figure, width) {
    const least = figure.y.scale === "category" ? 420 : 290;
    return Math.max(1, Math.min(figure.panels.length, Math.floor(width / least), 4));
  }

  function layout(figure, width) {
    const count = figure.panels.length, across = figure.y.scale === "category";
    const columns = columnsFor(figure, width), rows = Math.ceil(count / columns);
    const categories = across ? Math.max(...figure.panels.flatMap((p) => p.series.map((s) => s.y.length))) : 0;
    const inner = across ? Math.max(90, 26 * categories) : figure.id === "margin-against-kl" ? 420 : 240;
    const top = 56, bottom = 52, gap = 84;
    const height = top + bottom + rows * inner + (rows - 1) * gap;
    const plotted = height - top - bottom;
    const lined = figure.panels.some((p) => p.series.some((s) => s.line)); // their legend shows dashes; dots are enlarged
    const made = {
      width, height, margin: { l: 66, r: 14, t: top, b: bottom }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--ink"), family: "system-ui, Segoe UI, Roboto, Liberation Sans, sans-serif", size: 13 },
      hoverlabel: { bgcolor: style("--panel"), bordercolor: style("--soft"), font: { color: style("--ink"), size: 12, family: "ui-monospace, DejaVu Sans Mono, monospace" }, align: "left", namelength: -1 },
      hovermode: "closest", legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", xanchor: "left", yref: "paper", itemsizing: lined ? "trace" : "constant", font: { size: 12 } },
      annotations: [], shapes: [], dragmode: "zoom",
    };
    made.legend.y = 1 + (count > 1 || figure.panels[0].title ? 24 : 6) / plotted;
    const space = columns > 1 ? (across ? 0.02 : 0.045) : 0;
    const width1 = (1 - space * (columns - 1)) / columns;
    figure.panels.forEach((panel, i) => {
      const column = i % columns, row = Math.floor(i / columns), n = i ? String(i + 1) : "";
      const x0 = column * (width1 + space), y1 = 1 - (row * (inner + gap)) / plotted;
      const lowest = i + columns >= count, leftmost = column === 0;
      made[`xaxis${n}`] = { ...scale(figure, figure.x, "x"), domain: [x0, x0 + width1], anchor: `y${n}`, ...(i ? { matches: "x" } : {}) };
      made[`yaxis${n}`] = { ...scale(figure, figure.y, "y"), domain: [Math.max(0, y1 - inner / plotted), y1], anchor: `x${n}`, ...(i ? { matches: "y" } : {}) };
      if (!lowest) delete made[`xaxis${n}`].title;
      if (!leftmost) { delete made[`yaxis${n}`].title; made[`yaxis${n}`].showticklabels = false; }
      if (across) delete made[`yaxis${n}`].title;
      if (panel.title) made.annotations.push({ text: `<b>${plain(panel.title)}</b>`, x: x0, y: y1, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 13 } });
      if (figure.limit !== null) {
        for (const [value, dash, name] of [[1, "dot", "1"], [figure.limit, "dash", figure.limitName]]) {
          const along = across ? { x0: value, x1: value, y0: 0, y1: 1, xref: `x${n}`, yref: `y${n} domain` } : { y0: value, y1: value, x0: 0, x1: 1, yref: `y${n}`, xref: `x${n} domain` };
          made.shapes.push({ type: "line", ...along, line: { color: style("--ink"), width: 1.2, dash }, layer: "below" });
          if (name === "1") continue;
          const at = Math.log10(value);
          made.annotations.push({ text: `${plain(name)} ${number(value)}`, showarrow: false, font: { size: 11 }, ...(across ? { x: at, y: 0, xref: `x${n}`, yref: `y${n} domain`, xanchor: "left", yanchor: "bottom" } : { y: at, x: 1, yref: `y${n}`, xref: `x${n} domain`, xanchor: "right", yanchor: "bottom" }) });
        }
      }
    });
    return made;
  }

  // A page in the background is never painted: it draws all the same.
  const painted = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); setTimeout(done, 300); });
  const figureOf = (holder) => data.figures.find((f) => f.id === holder.dataset.figure);

  // A figure takes its height before it is drawn, so that nothing moves under a reader.
  function reserve(holder) {
    holder.style.minHeight = `${layout(figureOf(holder), Math.floor(holder.clientWidth)).height}px`;
  }

  function draw(holder) {
    const figure = figureOf(holder);
    reserve(holder);
    const seen = new Set();
    const traces = figure.panels.flatMap((panel, i) => panel.series.map((series) => trace(figure, series, { xaxis: `x${i ? i + 1 : ""}`, yaxis: `y${i ? i + 1 : ""}` }, seen)));
    return Plotly.react(holder, traces, layout(figure, Math.floor(holder.clientWidth)), { displayModeBar: false, responsive: false });
  }

  const holders = [...document.querySelectorAll(".plot")];

  // Plotly takes a second to start: the page is shown first, and it runs from where it is kept.
  async function drawAll() {
    for (const holder of holders) reserve(holder);
    await painted();
    document.body.append(Object.assign(document.createElement("script"), { textContent: document.getElementById("plotly").textContent }));
    // One after the other, so that the page answers while they are drawn.
    for (const holder of holders) {
      try {
        await draw(holder);
        holder.dataset.drawn = "yes";
      } catch (error) {
        console.error(error);
        holder.replaceChildren(element("p", { class: "problem" }, "This browser could not draw the figure; its numbers are in the table below."));
      }
      await new Promise((done) => setTimeout(done));
    }
    document.documentElement.dataset.drawn = "yes";
  }

  function redraw() {
    for (const holder of holders) if (holder.dataset.drawn) draw(holder);
  }

  // ---------------------------------------------------------------- browsing positions

  const PAGE = 20;

  function browser(host) {
    const all = [...details.values()];
    const orders = {
      "KL20, largest first": (a, b) => (b.kl ?? Infinity) - (a.kl ?? Infinity),
      "flips, largest margin first": (a, b) => b.flip - a.flip || (b.margin ?? 0) - (a.margin ?? 0),
      "in the order of the texts": (a, b) => a.row - b.row,
    };
    let page = 0, sorted = [];
    const order = element("select", { "aria-label": "Order of the positions" }, ...Object.keys(orders).map((name) => element("option", {}, name)));
    const back = element("button", { type: "button" }, "Previous"), next = element("button", { type: "button" }, "Next");
    const where = element("span", { role: "status" });
    const body = element("tbody");
    const heads = ["position", "KL20", "margin", "flip", "text", "reference", "candidate"].map((name) => element("th", { scope: "col" }, name));
    const cell = (text, name) => element("td", name ? { class: name } : {}, text);
    const top = (list) => list.slice(0, 3).map(([text, share]) => `${text} ${share}`).join(", ");
    const show = () => {
      const pages = Math.max(1, Math.ceil(sorted.length / PAGE));
      page = Math.min(Math.max(page, 0), pages - 1);
      body.replaceChildren(...sorted.slice(page * PAGE, (page + 1) * PAGE).map((d) => element("tr", {},
        element("th", { scope: "row" }, `${d.segment}, ${d.phase}, index ${d.index}${d.step >= 0 ? `, step ${d.step}` : ""}`),
        cell(d.kl === null ? "NaN" : number(d.kl)), cell(number(d.margin)), cell(d.flip ? "flip" : "", "flip"),
        cell(`${d.context.slice(-110)} → ${d.target}`, "context"), cell(top(d.reference)), cell(top(d.candidate)))));
      where.textContent = `${sorted.length} positions, page ${page + 1} of ${pages}`;
      back.disabled = page === 0;
      next.disabled = page === pages - 1;
    };
    const sort = () => { sorted = all.slice().sort(orders[order.value]); page = 0; show(); };
    back.addEventListener("click", () => { page -= 1; show(); });
    next.addEventListener("click", () => { page += 1; show(); });
    order.addEventListener("change", sort);
    const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": host.dataset.labelled }, element("table", { class: "browse" }, element("thead", {}, element("tr", {}, ...heads)), body));
    host.replaceChildren(element("div", { class: "controls" }, order, back, next, where), scroll);
    sort();
  }

  // ---------------------------------------------------------------- start

  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const printing = (on) => { document.documentElement.classList.toggle("printing", on); redraw(); };
  window.addEventListener("beforeprint", () => printing(true));
  window.addEventListener("afterprint", () => printing(false));

  readDetails().then(() => {
    const host = document.getElementById("browse");
    if (host && details.size) browser(host);
    return holders.length ? drawAll() : undefined;
  });
})();
