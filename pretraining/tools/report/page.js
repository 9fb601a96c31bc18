// Draws the plots of the page from the data that stands in it, and again where the reader asks for another view.
// Nothing is fetched: data, this script and the plotting library are all in the page.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const root = document.documentElement;
  const one = data.runs.length === 1;
  const view = { x: "steps", smoothing: 0, logX: false, logY: new Set(), marks: new Set(), range: null };
  const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
  const MARKS = [
    // name in the page, events, whether they are shown at first
    ["start", "starts", ["start", "restart", "restore"], true],
    ["rollback", "rollbacks", ["rollback"], true],
    ["phase", "phases", ["phase"], true],
    ["skip", "skipped", ["skip"], true],
    ["checkpoint", "checkpoints", ["checkpoint"], false],
    ["evaluation", "evaluations", ["evaluation"], false],
    ["end", "ends", ["end"], false],
  ];
  const KNOWN = new Set(MARKS.flatMap((mark) => mark[2]));
  for (const kind of new Set(data.runs.flatMap((run) => Object.keys(run.marks)))) {
    if (!KNOWN.has(kind)) MARKS.push(["end", kind, [kind], false]);
  }

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const palette = () => colour("--series").split(" ");
  // Plotly reads a little HTML in its texts; what comes from files is none.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shortened = (text) => {
    const most = window.innerWidth < 720 ? 30 : 60;
    return plain(text.length > most ? text.slice(0, most - 1) + "…" : text);
  };

  // The axis that is chosen

  const longest = data.runs.flatMap((run) => [run.training.seconds, run.evaluations.seconds]).flat().reduce((most, value) => Math.max(most, value ?? 0), 0);
  const [unitSeconds, timeUnit] = longest > 5400 ? [3600, "hours"] : longest > 90 ? [60, "minutes"] : [1, "seconds"];
  const AXES = {
    steps: { title: "step", of: (run, at) => at.step },
    tokens: { title: "tokens", of: (run, at) => at.tokens },
    time: { title: `${timeUnit} since the first start`, of: (run, at) => at.seconds.map((value) => (value === null ? null : value / unitSeconds)) },
    flops: { title: "training FLOPs", of: (run, at) => at.tokens.map((value) => (value === null || run.flops === null ? null : value * run.flops)) },
  };
  const xCache = new Map();
  const xOf = (place, kind) => {
    const key = `${view.x} ${place} ${kind}`;
    if (!xCache.has(key)) xCache.set(key, AXES[view.x].of(data.runs[place], data.runs[place][kind]));
    return xCache.get(key);
  };

  // An exponential moving average over points, without the pull of its first value.
  const smoothed = (values, weight) => {
    let sum = 0;
    let share = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * weight + value * (1 - weight);
      share = share * weight + (1 - weight);
      return sum / share;
    });
  };

  // Traces and layouts

  const tracesOf = (plot) => {
    const colours = palette();
    const labels = [...new Set(plot.series.map((series) => series.label))];
    const traces = [];
    for (const series of plot.series) {
      const curve = data.runs[series.run][series.kind].curves[series.name];
      const xs = xOf(series.run, series.kind);
      const x = curve.at === null ? xs : curve.at.map((place) => xs[place]);
      const number = labels.indexOf(series.label);
      const stroke = colours[(one ? number : series.run) % colours.length];
      const isSparse = series.kind === "evaluations" || x.length < 3;
      const name = one ? series.label : labels.length === 1 ? data.runs[series.run].name : `${data.runs[series.run].name} · ${series.label}`;
      const trace = {
        type: "scatter", x, y: curve.y, name: shortened(name), connectgaps: true, mode: isSparse ? "lines+markers" : "lines",
        line: { color: stroke, width: 1.6, dash: one ? "solid" : DASHES[number % DASHES.length] },
        marker: { color: stroke, size: x.length > 60 ? 4 : 6 },
        hovertemplate: `%{y:${plot.format}}<extra>%{fullData.name}</extra>`,
      };
      if (view.smoothing > 0 && !isSparse) {
        traces.push({ ...trace, opacity: 0.25, hoverinfo: "skip", hovertemplate: undefined, showlegend: false });
        trace.y = smoothed(curve.y, view.smoothing);
      }
      traces.push(trace);
    }
    return traces.concat(markTraces());
  };

  const marksOf = (run, kinds) => kinds.map((kind) => run.marks[kind]).filter(Boolean);

  // All vertical lines of a kind are one trace: thousands of them cost no more than a curve.
  const markTraces = () => {
    const traces = [];
    MARKS.forEach(([style, label, kinds], place) => {
      if (!view.marks.has(place)) return;
      for (const run of data.runs) {
        const xs = marksOf(run, kinds).flatMap((marks) => AXES[view.x].of(run, marks)).filter((x) => x !== null);
        if (xs.length === 0) continue;
        traces.push({
          type: "scatter", mode: "lines", x: xs.flatMap((x) => [x, x, null]), y: xs.flatMap(() => [0, 1, null]), yaxis: "y2",
          line: { color: colour(`--mark-${style}`), width: 1, dash: style === "checkpoint" ? "dot" : "solid" },
          opacity: 0.7, hoverinfo: "skip", showlegend: false, name: plain(label),
        });
      }
    });
    return traces;
  };

  const isCoarse = matchMedia("(pointer: coarse)").matches;
  const baseLayout = () => ({
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--text") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 12, r: 14, t: 8, b: 12 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--accent") },
    hovermode: "x unified", dragmode: isCoarse ? false : "zoom",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") }, namelength: 40 },
    legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { size: 12 } },
    xaxis: {
      title: { text: AXES[view.x].title, font: { size: 12, color: colour("--muted") }, standoff: 6 },
      type: view.logX ? "log" : "linear", gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true,
      tickformat: view.x === "time" ? "" : "~s", exponentformat: view.x === "flops" ? "power" : "SI", nticks: window.innerWidth < 720 ? 5 : 8,
      ...(view.x === "flops" ? { tickformat: ".2~e" } : {}),
      ...(view.range ? { range: view.range } : { autorange: true }),
    },
  });
  const layoutOf = (plot) => {
    const layout = baseLayout();
    const shown = new Set(plot.series.map((series) => `${series.run} ${series.label}`));
    layout.showlegend = shown.size > 1;
    layout.yaxis = {
      type: view.logY.has(plot.key) ? "log" : "linear", gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false,
      automargin: true, tickformat: plot.format.endsWith("%") ? "~%" : plot.format.endsWith("s") ? "~s" : "", exponentformat: "power", nticks: 7,
    };
    layout.yaxis2 = { overlaying: "y", range: [0, 1], fixedrange: true, visible: false };
    layout.uirevision = `${view.x} ${view.logX} ${view.logY.has(plot.key)}`;
    return layout;
  };
  const configOf = (name) => ({
    responsive: true, displaylogo: false, doubleClick: "reset", displayModeBar: isCoarse ? false : "hover",
    // Named one by one: among the usual ones is one that sends the chart, with its data, to the library's makers.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: name, width: 900, height: 480 },
  });

  // The strip of what happened: a row a kind, or several runs in one

  const STRIP = "events";
  const stripTraces = () => {
    const rows = stripRows();
    const traces = [];
    data.runs.forEach((run, number) => {
      const height = 0.5 - (number + 0.5) / data.runs.length; // runs lie above each other within a row
      rows.forEach(([style, , kinds], row) => {
        const stroke = one ? colour(`--mark-${style}`) : palette()[number % palette().length];
        for (const marks of marksOf(run, kinds)) {
          traces.push({
            type: "scatter", mode: "markers", x: AXES[view.x].of(run, marks), y: marks.step.map(() => -row + 0.7 * height), showlegend: false,
            text: marks.text.map((text) => plain(one ? text : `${run.name}: ${text}`).replace(/(.{50,70}?) /g, "$1<br>")),
            marker: { symbol: "line-ns", size: one ? 9 : 5, line: { width: 2, color: stroke } },
            hovertemplate: "%{text}<extra></extra>",
          });
        }
      });
    });
    return traces;
  };
  const stripRows = () => MARKS.filter(([, , kinds]) => data.runs.some((run) => marksOf(run, kinds).length > 0));
  const stripLayout = () => ({
    ...baseLayout(), hovermode: "closest",
    yaxis: {
      tickvals: stripRows().map((row, place) => -place), ticktext: stripRows().map((row) => plain(row[1])), range: [0.6 - stripRows().length, 0.6],
      automargin: true, gridcolor: colour("--grid"), fixedrange: true, zeroline: false,
    },
    uirevision: `${view.x} ${view.logX}`,
  });

  // Drawing

  const figures = [...document.querySelectorAll(".plot")].map((node) => ({ node, key: node.dataset.plot, plot: data.plots.find((plot) => plot.key === node.dataset.plot) }));
  let isFollowing = false;
  const draw = (figure) => {
    const { node, key, plot } = figure;
    const [traces, layout] = key === STRIP ? [stripTraces(), stripLayout()] : [tracesOf(plot), layoutOf(plot)];
    layout.height = node.clientHeight;
    const isFirst = !figure.drawn;
    if (isFirst) node.replaceChildren(); // the sketch
    Plotly.react(node, traces, layout, configOf(key));
    if (!isFirst) return;
    figure.drawn = true;
    node.on("plotly_relayout", (change) => follow(figure, change));
  };
  const drawAll = () => figures.filter((figure) => figure.drawn).forEach(draw);

  // A zoom into one plot's x axis is one into all.
  const follow = (source, change) => {
    if (isFollowing) return;
    const begin = change["xaxis.range[0]"];
    const isReset = change["xaxis.autorange"] === true;
    if (begin === undefined && !isReset) return;
    isFollowing = true;
    view.range = isReset ? null : [begin, change["xaxis.range[1]"]];
    const update = isReset ? { "xaxis.autorange": true } : { "xaxis.range": view.range };
    Promise.all(figures.filter((each) => each !== source && each.drawn).map((each) => Plotly.relayout(each.node, { ...update }))).then(() => { isFollowing = false; });
  };

  const drawInTurn = (place) => {
    root.dataset.plots = String(figures.length);
    root.dataset.drawn = String(place);
    if (place === 1) root.dataset.first = String(Math.round(performance.now()));
    if (place === figures.length) {
      root.dataset.milliseconds = String(Math.round(performance.now()));
      return;
    }
    draw(figures[place]);
    setTimeout(() => drawInTurn(place + 1), 0);
  };

  // Controls

  const bindAxis = () => {
    for (const input of document.querySelectorAll('input[name="x"]')) {
      const isKnown = data.runs.some((run) => ["training", "evaluations"].some((kind) => AXES[input.value].of(run, run[kind]).some((x) => x !== null)));
      input.disabled = !isKnown;
      input.addEventListener("change", () => {
        view.x = input.value;
        view.range = null;
        drawAll();
      });
    }
    document.getElementById("log-x").addEventListener("change", (event) => {
      view.logX = event.target.checked;
      view.range = null;
      drawAll();
    });
  };
  const bindSmoothing = () => {
    const slider = document.getElementById("smoothing");
    let isWaiting = false;
    slider.addEventListener("input", () => {
      view.smoothing = Number(slider.value);
      document.getElementById("smoothing-value").textContent = view.smoothing === 0 ? "off" : view.smoothing.toFixed(2);
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(() => {
        isWaiting = false;
        drawAll();
      });
    });
  };
  const bindMarks = () => {
    const field = document.getElementById("marks");
    MARKS.forEach(([style, label, kinds, isShown], place) => {
      const count = data.runs.flatMap((run) => marksOf(run, kinds)).reduce((sum, marks) => sum + marks.total, 0);
      if (count === 0) return;
      const box = document.createElement("input");
      box.type = "checkbox";
      // A single start is where the curves begin anyway.
      box.checked = isShown && (style !== "start" || data.runs.some((run) => run.marks.restart)) && (style !== "phase" || count > data.runs.length);
      if (box.checked) view.marks.add(place);
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.borderTopColor = `var(--mark-${style})`;
      const holder = document.createElement("label");
      holder.append(box, swatch, document.createTextNode(label));
      field.append(holder);
      box.addEventListener("change", () => {
        if (box.checked) view.marks.add(place);
        else view.marks.delete(place);
        drawAll();
      });
    });
    if (field.querySelector("input") === null) field.remove();
  };
  const bindLogs = () => {
    for (const button of document.querySelectorAll("button[data-log]")) {
      button.addEventListener("click", () => {
        const key = button.dataset.log;
        const isOn = !view.logY.has(key);
        if (isOn) view.logY.add(key);
        else view.logY.delete(key);
        button.setAttribute("aria-pressed", String(isOn));
        figures.filter((figure) => figure.key === key && figure.drawn).forEach(draw);
      });
    }
  };
  const bindPrinting = () => {
    window.addEventListener("beforeprint", () => {
      root.classList.add("printing");
      drawAll();
      figures.filter((figure) => figure.drawn).forEach((figure) => Plotly.relayout(figure.node, { width: 660 }));
    });
    window.addEventListener("afterprint", () => {
      root.classList.remove("printing");
      figures.filter((figure) => figure.drawn).forEach((figure) => Plotly.relayout(figure.node, { width: null, autosize: true }));
      drawAll();
    });
  };

  bindAxis();
  bindSmoothing();
  bindMarks();
  bindLogs();
  bindPrinting();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  // The page is shown first, with its sketches: to read the plotting library takes longer than all else.
  const begin = () => {
    const library = document.createElement("script");
    library.textContent = document.getElementById("plotly").textContent;
    document.head.append(library);
    drawInTurn(0);
  };
  if (document.hidden) begin();
  else requestAnimationFrame(() => setTimeout(begin, 0));
})();
