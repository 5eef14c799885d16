"use strict";
// Draws what is in the element "run". Names of units are put in as text, never as HTML.
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const LANE = 22;
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const timed = run.timelines.filter((timeline) => !timeline.missing);
  const lastEnd = Math.max(...timed.map((timeline) => timeline.end));
  const hasUnsharded = timed.some((timeline) => timeline.unsharded.length > 0);
  let charts = [];

  function element(tag, text, parent) {
    const made = document.createElement(tag);
    made.textContent = text;
    parent.append(made);
    return made;
  }

  function bytes(value) {
    const names = ["bytes", "KiB", "MiB", "GiB"];
    let unit = 0;
    for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
    return (unit === 0 ? Math.round(value) : value.toFixed(1)) + " " + names[unit];
  }
  const percent = (share) => (100 * share).toFixed(share < 0.1 ? 1 : 0) + " %";
  const milliseconds = (value) => value.toFixed(value < 10 ? 2 : 1) + " ms";

  function showTexts() {
    document.title = run.title;
    byId("title").textContent = run.title;
    for (const [name, value] of run.facts) {
      const entry = element("div", "", byId("facts"));
      element("dt", name, entry);
      element("dd", value, entry);
    }
    for (const { title, reason } of run.advice) {
      const entry = element("div", "", byId("advice"));
      entry.className = "advice";
      element("h3", title, entry);
      element("p", reason, entry);
    }
    if (run.advice.length === 0) {
      const entry = element("div", "", byId("advice"));
      entry.className = "advice fine";
      element("p", "Nothing to advise.", entry);
    }
    byId("about_advice").textContent = run.about_advice;
    byId("profiled").textContent = run.profiled;
    byId("about_bound").textContent = run.about_bound;
    byId("missing").textContent = run.timelines.filter((timeline) => timeline.missing)
      .map((timeline) => `No timeline of rank ${timeline.rank}: ${timeline.missing}.`).join(" ");
  }

  function showUnits() {
    for (const unit of run.units) {
      const row = element("tr", "", byId("units"));
      const used = unit.prefetched - unit.unused;
      element("td", unit.name, row);
      element("td", unit.parameters, row);
      element("td", bytes(unit.bytes), row);
      element("td", +unit.gathers.toFixed(2), row);
      element("td", bytes(unit.gathered_bytes), row);
      element("td", unit.gathers > 0 ? `${+used.toFixed(2)} of ${+unit.gathers.toFixed(2)}` : "-", row);
      element("td", milliseconds(unit.exposed), row);
      element("td", percent(unit.unsharded_share), row);
    }
  }

  // A power of two, so that ticks of bytes are round.
  const stepOfBytes = (most) => 2 ** Math.ceil(Math.log2(Math.max(most, 8) / 8));

  // Lines over numbers on both axes; `y` and other axes by their names.
  function lines(id, datasets, axes, title, xMax) {
    const x = { type: "linear", max: xMax, title: { display: true, text: title }, ticks: { precision: 0 } };
    const style = (set) => ({ pointRadius: set.data.length > 60 ? 0 : 2, borderWidth: 2, ...set,
      borderColor: set.color, backgroundColor: set.color });
    const write = axes.y.ticks && axes.y.ticks.callback;
    return new Chart(byId(id), {
      type: "line",
      data: { datasets: datasets.map(style) },
      options: { maintainAspectRatio: false, interaction: { mode: "nearest", axis: "x", intersect: false }, scales: { x, ...axes },
        plugins: { legend: { labels: { usePointStyle: true, pointStyle: "line" } },
          tooltip: { callbacks: write ? { label: (item) => `${item.dataset.label}: ${write(item.parsed.y)}` } : {} } } },
    });
  }

  function bytesAxis(datasets, title) {
    const most = 1.1 * Math.max(8, ...datasets.flatMap((set) => set.data.map(({ y }) => y)));
    return { min: 0, suggestedMax: most, title: { display: true, text: title },
      ticks: { stepSize: stepOfBytes(most), callback: (value) => bytes(value) } };
  }

  // Drawn over the others.
  const bound = (label, points, y) => ({ label: `${label}, ${bytes(y)}`, data: level(points, y), color: colour("red"),
    borderDash: [6, 4], pointRadius: 0, order: -1 });

  const over = (key) => run.steps.map((point) => ({ x: point.step, y: point[key] }));
  const level = (points, y) => points.length === 0 ? [] : [{ x: points[0].x, y }, { x: points[points.length - 1].x, y }];

  function drawLoss() {
    const sets = [{ label: "training", data: over("loss"), color: colour("blue") }];
    if (run.validations.length > 0)
      sets.push({ label: "validation", data: run.validations.map(([x, y]) => ({ x, y })), color: colour("orange"), pointRadius: 3 });
    return lines("loss", sets, { y: { title: { display: true, text: "nats per token" } } }, "step");
  }

  function drawThroughput() {
    return lines("throughput", [
      { label: "tokens per second", data: over("tokens_per_second"), color: colour("green") },
      { label: "waiting", data: run.steps.map((point) => ({ x: point.step, y: 100 * point.waiting })), color: colour("red"),
        yAxisID: "waiting", borderWidth: 1 },
    ], { y: { min: 0, title: { display: true, text: "tokens per second" } },
      waiting: { position: "right", min: 0, max: 100, grid: { drawOnChartArea: false },
        title: { display: true, text: "waiting, % of the time" } } }, "step");
  }

  function drawMemory() {
    const peaks = over("peak_bytes");
    const sets = [{ label: "highest in each step", data: peaks, color: colour("blue") }];
    if (run.bound !== null) sets.push(bound("bound", peaks, run.bound));
    return lines("memory", sets, { y: bytesAxis(sets, "beside shards and states") }, "step");
  }

  // Bars from one time to another, in lanes.
  function bars(id, lanes, datasets) {
    byId(id).parentElement.style.height = `${lanes.length * LANE + 100}px`;
    return new Chart(byId(id), {
      type: "bar",
      data: { labels: lanes, datasets: datasets.filter((set) => set.data.length > 0).map((set) => ({ ...set,
        backgroundColor: set.color, grouped: false, barPercentage: 0.8, categoryPercentage: 1, maxBarThickness: LANE, minBarLength: 1 })) },
      options: { maintainAspectRatio: false, indexAxis: "y",
        scales: { x: { type: "linear", min: 0, max: lastEnd, title: { display: true, text: "milliseconds of the step" } },
          y: { ticks: { autoSkip: false }, grid: { display: false } } },
        plugins: { legend: { display: datasets.length > 1 }, tooltip: { callbacks: {
          title: (items) => items[0].raw.of,
          label: ({ raw, dataset }) => `${dataset.label}: ${milliseconds(raw.x[1] - raw.x[0])} from ${milliseconds(raw.x[0])} on${raw.note || ""}` } } } },
    });
  }

  const span = ([of, begin, end], y) => ({ x: [begin, end], y, of });

  function drawTimeline() {
    const lanes = [];
    const kinds = { forward: "blue", backward: "purple", optimizer: "green" };
    const set = (label, name) => ({ label, color: colour(name), data: [] });
    const sets = { other: set("data and exchange of losses", "grey"), gather: set("gather", "teal"), reduction: set("reduction", "orange"),
      wait: set("waiting", "red"), redistribution: set("redistribution", "pink") };
    const redistributes = timed.some((timeline) => timeline.redistributions.length > 0);
    for (const [phase, name] of Object.entries(kinds)) sets[phase] = set(phase, name);
    for (const timeline of timed) {
      const lane = (name) => `rank ${timeline.rank} ${name}`;
      if (lanes.length > 0) lanes.push("");
      lanes.push(lane("computing"), lane("gathers"), lane("reductions"), lane("waiting"));
      if (redistributes) lanes.push(lane("redistributions"));
      for (const each of timeline.phases) (sets[each[0]] || sets.other).data.push(span(each, lane("computing")));
      for (const each of timeline.gathers) {
        const [, , , ahead, used, size, waited] = each;
        sets.gather.data.push({ ...span(each, lane("gathers")),
          note: `, ${bytes(size)}, ${ahead ? "ahead" : "when needed"}${used ? "" : ", unused"}, waited ${milliseconds(waited)}` });
      }
      for (const each of timeline.reductions) sets.reduction.data.push(span(each, lane("reductions")));
      for (const each of timeline.waits) sets.wait.data.push(span(each, lane("waiting")));
      for (const each of timeline.redistributions) sets.redistribution.data.push(span(each, lane("redistributions")));
    }
    const order = ["forward", "backward", "optimizer", "other", "gather", "reduction", "wait", "redistribution"];
    return bars("timeline", lanes, order.map((name) => sets[name]));
  }

  const chosen = () => timed.find((timeline) => String(timeline.rank) === byId("rank").value);

  function drawResidency() {
    const timeline = chosen();
    const lanes = run.units.map((unit) => unit.name);
    return bars("residency", lanes, [{ label: "unsharded", color: colour("blue"),
      data: timeline.unsharded.filter(([of]) => lanes.includes(of)).map((each) => span(each, each[0])) }]);
  }

  // Bytes after each moment in which a unit comes or goes.
  function drawUnsharded() {
    const timeline = chosen();
    const size = new Map(run.units.map((unit) => [unit.name, unit.bytes]));
    const changes = timeline.unsharded.flatMap(([of, begin, end]) => [[begin, size.get(of) || 0], [end, -(size.get(of) || 0)]]);
    changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let now = 0;
    const data = [{ x: timeline.begin, y: 0 }];
    for (const [at, change] of changes) data.push({ x: at, y: now += change });
    data.push({ x: timeline.end, y: now });
    const sets = [{ label: "unsharded parameters", data, color: colour("blue"), stepped: true, pointRadius: 0 },
      bound("the root and the two largest units", data, run.unsharded_bound)];
    return lines("unsharded", sets, { y: bytesAxis(sets, "") }, "milliseconds of the step", lastEnd);
  }

  function draw() {
    charts.forEach((chart) => chart.destroy());
    Chart.defaults.animation = false;
    Chart.defaults.color = colour("muted");
    Chart.defaults.borderColor = colour("line");
    Chart.defaults.plugins.legend.labels.boxWidth = 14;
    Chart.defaults.plugins.legend.position = "bottom";
    charts = [drawLoss(), drawThroughput(), drawMemory()];
    if (timed.length > 0) charts.push(drawTimeline());
    if (hasUnsharded) charts.push(drawResidency(), drawUnsharded());
  }

  showTexts();
  showUnits();
  for (const { rank } of timed) element("option", rank, byId("rank"));
  byId("timeline").closest("figure").hidden = timed.length === 0;
  for (const id of ["residency", "unsharded"]) byId(id).closest("figure").hidden = !hasUnsharded;
  byId("rank").addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
