// Charts over time: lines in SVG, stretched to their place; words beside them in SVG too.

import { $, each, rows, say, set, svg } from "./dom.js";
import { KEEP_SECONDS, byMinute } from "./history.js";
import { NOTHING, clock, duration, percent, rate } from "./words.js";

const [WIDE, HIGH, TOP] = [600, 120, 8];
const HOLE_SECONDS = 12; // no line is drawn over a longer silence

/** A chart of some series, each with a class for its looks, in one SVG with a name. */
class Chart {
  #lines;

  constructor(id, kinds) {
    this.svg = $(id);
    set(this.svg, "viewBox", `0 0 ${WIDE} ${HIGH}`);
    set(this.svg, "preserveAspectRatio", "none");
    const grid = [0, 0.5, 1].map((part) => {
      const y = HIGH - part * (HIGH - TOP);
      return svg("line", { class: "grid", x1: 0, x2: WIDE, y1: y, y2: y });
    });
    this.marks = svg("g", { class: "marks" });
    this.#lines = kinds.map((kind) => [
      svg("path", { class: `area ${kind}` }), svg("path", { class: `line ${kind}` }),
    ]);
    this.svg.append(...grid, this.marks, ...this.#lines.flat());
    const scale = document.createElement("div");
    scale.className = "scale";
    scale.setAttribute("aria-hidden", "true");
    this.labels = ["top", "left", "right"].map((place) => {
      const label = document.createElement("span");
      label.className = place;
      scale.append(label);
      return label;
    });
    this.svg.after(scale);
  }

  /** `seconds`: how far back the chart reaches, which is to the start of a daemon that is young. */
  draw(serieses, most, label, restarts, seconds) {
    const end = serieses[0].at(-1)?.time ?? 0;
    const x = (time) => WIDE * (1 - (end - time) / seconds);
    const y = (value) => HIGH - (HIGH - TOP) * Math.min(1, value / most);
    serieses.forEach((series, i) => {
      const [area, line] = this.#lines[i];
      const { filled, drawn } = paths(series, x, y);
      set(area, "d", filled);
      set(line, "d", drawn);
    });
    each(this.marks, restarts, (time) => time, () => svg("line", { y1: 0, y2: HIGH }), (line, time) => {
      set(line, "x1", x(time));
      set(line, "x2", x(time));
    });
    const [top, left, right] = this.labels;
    say(top, label);
    say(left, seconds < KEEP_SECONDS ? `start, ${duration(seconds)} ago` : `${duration(seconds)} ago`);
    say(right, "now");
  }
}

/** SVG paths of a series; a hole where values are missing. */
function paths(series, x, y) {
  let filled = "";
  let drawn = "";
  let run = [];
  const flush = () => {
    if (run.length) {
      const points = run.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");
      drawn += `M${points}`;
      filled += `M${run[0][0].toFixed(1)} ${HIGH}L${points}L${run.at(-1)[0].toFixed(1)} ${HIGH}Z`;
    }
    run = [];
  };
  let last = -Infinity;
  for (const { time, value } of series) {
    if (value == null || time - last > HOLE_SECONDS) flush();
    if (value != null) run.push([x(time), y(value)]);
    last = time;
  }
  flush();
  return { filled, drawn };
}

/** The next round figure: 1, 2 or 5 times a power of ten. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function highest(serieses) {
  return Math.max(0, ...serieses.flat().map(({ value }) => value ?? 0));
}

export class Charts {
  #throughput = new Chart("throughput-chart", ["out", "in"]);
  #hits = new Chart("hits-chart", ["out", "in"]);

  show(history) {
    const rates = ["load_bytes", "store_bytes"].map((counter) => history.rates(counter));
    const [out, into] = rates.map((series) => series.at(-1).value);
    const most = round(Math.max(highest(rates), 1e6));
    say($("rate-out"), rate(out));
    say($("rate-in"), rate(into));
    this.#throughput.draw(rates, most, rate(most), history.restarts, history.seconds);
    set(this.#throughput.svg, "aria-label", `Throughput of the last minutes: now ${rate(out)} out and`
      + ` ${rate(into)} in; at most ${rate(highest([rates[0]]))} out and ${rate(highest([rates[1]]))} in.`);
    table("throughput", [rates[1], rates[0]], rate);

    const shares = ["tokens", "chunks"].map((unit) => history.shares(`hit_${unit}`, `lookup_${unit}`));
    const [tokens, keys] = shares.map((series) => series.at(-1).value);
    say($("hit-tokens"), percent(tokens));
    say($("hit-keys"), percent(keys));
    this.#hits.draw(shares, 1, "100 %", history.restarts, history.seconds);
    set(this.#hits.svg, "aria-label", keys == null && tokens == null
      ? "Hit rate: nothing was looked up in the last seconds."
      : `Hit rate: now ${percent(tokens)} of prompt tokens and ${percent(keys)} of keys looked up.`);
    say($("hits-total"), total(history.now.counters));
    table("hits", shares, percent);
  }
}

function total(counters) {
  const { lookup_tokens: tokens, hit_tokens: foundTokens, lookup_chunks: keys, hit_chunks: foundKeys } = counters;
  if (tokens) return `${percent(foundTokens / tokens)} of prompt tokens since the daemon's start.`;
  if (!keys) return "Nothing has been looked up yet.";
  return `${percent(foundKeys / keys)} of keys looked up since the daemon's start. No engine counts prompt tokens.`;
}

function table(id, serieses, word) {
  if (!$(`${id}-details`).open) return;
  rows($(`${id}-details`).querySelector("table"), byMinute(serieses).map(({ time, values }) => ({
    key: time,
    cells: [clock(time).slice(0, 5), ...values.map((value) => (value == null ? NOTHING : word(value)))],
  })));
}
