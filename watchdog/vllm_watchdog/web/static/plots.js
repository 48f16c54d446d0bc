"use strict";
// Samples to plots: stacked memory of each card with its thresholds and the incidents, and lines of each engine.
const COLOURS = { light: ["#3b76c4", "#2a9d8f", "#8a63c9", "#c77f22", "#5b8a3a", "#b5527f"],
                  dark: ["#5b93dc", "#3fae9f", "#a381dc", "#d69c49", "#7fae5b", "#cf739d"] };
const SPANS = { "10m": 600, "6h": 21600, "7d": 604800 };
const EVERY_S = { "10m": 2, "6h": 10, "7d": 60 };
const HOLE_S = { "10m": 5, "6h": 30, "7d": 360 };       // longer without a sample is a hole in the plot

const dark = () => (document.documentElement.dataset.theme
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => COLOURS[dark() ? "dark" : "light"][index % 6];

class Plots {
  constructor() {
    this.range = localStorage.getItem("range") in SPANS ? localStorage.getItem("range") : "10m";
    this.series = {};
    this.drawn = new Map();         // key -> { plot, signature, element }
    this.incidents = [];
    this.gpus = [];
    this.engines = [];
    this.last = this.due = 0;       // the newest sample's time; when to ask again
  }

  choose(range) {
    this.range = range;
    localStorage.setItem("range", range);
    this.series = {};
    this.last = this.due = 0;
    return this.fetch();
  }

  async fetch() {
    if (performance.now() < this.due) return;
    this.due = performance.now() + EVERY_S[this.range] * 1000;
    const range = this.range;
    const answer = await fetch(`api/v1/samples?range=${range}` + (this.last ? `&since=${this.last}` : ""));
    const fresh = answer.ok ? (await answer.json()).series : {};
    if (range !== this.range) return;
    for (const [subject, columns] of Object.entries(fresh)) this.merge(subject, columns);
    this.draw();
  }

  merge(subject, fresh) {
    const old = this.series[subject] || { t: [] }, n = old.t.length, m = fresh.t.length;
    const since = Date.now() / 1000 - SPANS[this.range], kept = old.t.findIndex((at) => at >= since);
    const cut = kept < 0 ? n : kept, joined = {};
    for (const key of new Set([...Object.keys(old), ...Object.keys(fresh)])) {
      joined[key] = (old[key] || Array(n).fill(null)).slice(cut).concat(fresh[key] || Array(m).fill(null));
    }
    this.series[subject] = joined;
    this.last = Math.max(this.last, ...fresh.t.slice(-1));
  }

  holed(times, columns) {
    const at = [], out = columns.map(() => []);
    times.forEach((time, i) => {
      if (i && time - times[i - 1] > HOLE_S[this.range]) {
        at.push(times[i - 1] + 0.001);
        out.forEach((column) => column.push(null));
      }
      at.push(time);
      out.forEach((column, j) => column.push(columns[j][i] ?? null));
    });
    return [at, ...out];
  }

  draw() {
    for (const gpu of this.gpus) this.card(gpu);
    this.lines("rss", ["rss_bytes"], GIB, 0);
    this.lines("kv", ["kv_usage"], 0.01, 100);
    this.lines("requests", ["running", "waiting"], 1, 0);
    this.lines("tokens", ["tokens_per_s"], 1, 0);
  }

  card(gpu) {
    const element = document.querySelector(`[data-plot="gpu-${gpu.index}"]`);
    const found = this.series[`gpu/${gpu.index}`];
    if (!element || !found || !found.t.length) return;
    const names = this.engines.map((engine) => engine.name), order = (name) => (names.includes(name) ? names.indexOf(name) : 99);
    const holders = Object.keys(found).filter((key) => key.startsWith("held:")).map((key) => key.slice(5))
      .sort((a, b) => order(a) - order(b));
    const sums = found.t.map(() => 0);
    const stacked = holders.map((name) => found[`held:${name}`].map((value, i) => (sums[i] += (value ?? 0) / GIB)));
    const used = found.used_bytes.map((value, i) => (value === null ? null : Math.max(value / GIB, sums[i])));
    // From the top of the stack down: each area covers what lies above it.
    const series = ["rest", ...[...holders].reverse()].map((name) => {
      const tone = name === "rest" ? css("--rest") : name === "others" ? css("--others") : colour(names.indexOf(name));
      return { label: name, stroke: tone, fill: `color-mix(in srgb, ${tone} 70%, ${css("--panel")})`, width: 1, points: { show: false }, spanGaps: false };
    });
    const total = gpu.total_bytes / GIB;
    const marks = [["warn", gpu.vram_warn, "--amber"], ["degrade", gpu.vram_degrade, "--red"]].filter((one) => one[1])
      .map(([name, share, tone]) => ({ name: t(name), at: share * total, tone }));
    const rows = [used, ...stacked.reverse()];
    const here = this.incidents.filter((one) => {
      const engine = this.engines.find((each) => each.name === one.engine);
      return !engine || engine.gpus.includes(gpu.index);
    });
    this.plot(`gpu-${gpu.index}`, element, this.holed(found.t, rows), series, 168, total * 1.02, marks, here);
  }

  lines(key, figures, unit, top) {
    const element = document.querySelector(`[data-plot="${key}"]`), tables = [], series = [];
    this.engines.forEach((engine, i) => {
      const found = this.series[`engine/${engine.name}`] || {};
      for (const one of figures.filter((name) => found[name])) {
        tables.push(this.holed(found.t, [found[one].map((value) => (value === null ? null : value / unit))]));
        series.push({ label: engine.name, stroke: colour(i), width: 1.5, points: { show: false },
                      dash: one === "waiting" ? [4, 3] : undefined });
      }
    });
    if (!element || !tables.length) return;
    const data = tables.length > 1 ? uPlot.join(tables, tables.map((table) => table.map(() => 2))) : tables[0];
    this.plot(key, element, data, series, 112, top, [], this.incidents);
  }

  plot(key, element, data, series, height, top, marks, incidents) {
    const signature = JSON.stringify([series.map((one) => [one.label, one.stroke]), marks, top, language, this.range]);
    const width = element.clientWidth, known = this.drawn.get(key);
    if (known && known.signature === signature && known.element === element) {
      known.incidents = incidents;
      if (known.plot.width !== width) known.plot.setSize({ width, height });
      known.plot.setData(data);
      return;
    }
    known?.plot.destroy();
    element.replaceChildren();
    const axis = { stroke: css("--soft"), ticks: { show: false }, font: "11px system-ui", grid: { stroke: css("--line"), width: 1 } };
    const plot = new uPlot({
      width, height, series: [{}, ...series], legend: { show: false }, padding: [8, 16, 0, 0],
      cursor: { show: false },
      scales: { x: { time: true, range: () => [Date.now() / 1000 - SPANS[this.range], Date.now() / 1000] },
                y: { range: (_, low, high) => [0, top || Math.max((high || 0) * 1.15, 1)] } },
      axes: [{ ...axis, size: 22, gap: 2, space: 70, values: (_, at) => at.map((s) => this.when(s)) },
             { ...axis, size: 36, gap: 4, space: 28, values: (_, at) => at.map((v) => (v >= 1000 ? `${v / 1000}k` : +v.toFixed(1))) }],
      hooks: { draw: [(u) => this.mark(u, marks, this.drawn.get(key)?.incidents || incidents)] },
    }, data, element);
    this.drawn.set(key, { plot, signature, element, incidents });
  }

  when(seconds) {
    const at = new Date(seconds * 1000), two = (n) => String(n).padStart(2, "0");
    return this.range === "7d" ? `${two(at.getMonth() + 1)}-${two(at.getDate())}` : `${two(at.getHours())}:${two(at.getMinutes())}`;
  }

  mark(u, marks, incidents) {
    const { ctx, bbox } = u, px = devicePixelRatio, right = bbox.left + bbox.width;
    ctx.save();
    ctx.font = `${10 * px}px system-ui`;
    ctx.lineWidth = px;
    for (const { name, at, tone } of marks) {
      const y = u.valToPos(at, "y", true), far = tone === "--red";
      ctx.strokeStyle = ctx.fillStyle = css(tone);
      ctx.setLineDash([5 * px, 4 * px]);
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(right, y); ctx.stroke();
      ctx.textAlign = far ? "right" : "left";
      ctx.fillText(name, far ? right - 4 * px : bbox.left + 4 * px, far ? y - 3 * px : y + 10 * px);
    }
    ctx.setLineDash([]);
    for (const { wall_opened: at, urgency } of incidents) {
      if (at < u.scales.x.min || at > u.scales.x.max) continue;
      const x = u.valToPos(at, "x", true), top = bbox.top;
      ctx.strokeStyle = ctx.fillStyle = css(urgency === "warning" ? "--amber" : "--red");
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + bbox.height); ctx.stroke();
      ctx.beginPath(); ctx.moveTo(x - 5 * px, top); ctx.lineTo(x + 5 * px, top); ctx.lineTo(x, top + 7 * px); ctx.fill();
    }
    ctx.restore();
  }

  redraw() {
    for (const known of this.drawn.values()) known.plot.destroy();
    this.drawn.clear();
    this.draw();
  }
}
const plots = new Plots();
