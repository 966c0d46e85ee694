// Who works: lanes, their jobs by stage, the broker, engines and ranks.

import { $, each, el, named, rows, say, set, svg } from "./dom.js";
import { count, gained, mean, merged, quantile } from "./history.js";
import { NOTHING, device, duration, latency, number, percent, several, size } from "./words.js";

const STAGES = {
  queued: "until it started",
  stream_wait: "its turn had come, the engine's stream was not there yet",
  copied: "first to last byte",
  reported: "until the engine is told",
};
const TONES = { up: "good", starting: "warn", ending: "warn", down: "bad" };

export function showLanes(report) {
  rows($("lanes-table"), report.lanes.map((lane) => ({
    key: lane.device,
    cells: [
      { draw: (box) => { say(box, device(lane.device)); set(box, "title", lane.device); } },
      lane.stopped ? { text: lane.stopped, tone: "bad" } : { text: lane.state, tone: TONES[lane.state] },
      lane.seconds_since_heard == null ? NOTHING : `${latency(lane.seconds_since_heard)} ago`,
      lane.queued_jobs ? `${several(lane.queued_jobs, "job")}, ${latency(lane.oldest_job_seconds)}` : "empty",
      size(lane.bytes_in_flight),
      { draw: (box) => meter(box, lane) },
      number(lane.workers),
      number(lane.counters.restarts),
      { text: [lane.pin_error, lane.last_error].filter(Boolean).join("; ") || "none" },
    ],
  })));
}

function meter(box, lane) {
  const share = lane.pool_bytes ? lane.usable_bytes / lane.pool_bytes : 0;
  if (!box.children.length) {
    const bar = svg("svg", { class: "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "track", width: 100, height: 6 }), svg("rect", { class: "fill", height: 6 }));
    box.append(el("span"), bar);
  }
  const how = lane.pins ? "pinned" : "ready";
  say(box.querySelector("span"), share < 1 ? `${percent(share)} of ${size(lane.pool_bytes)}` : `${size(lane.pool_bytes)} ${how}`);
  set(box.querySelector(".fill"), "width", (100 * share).toFixed(1));
}

/** Latency by stage of the chosen lane's jobs, or of all lanes'. */
export function showJobs(history) {
  const { now, before } = history;
  const chosen = $("jobs-lane");
  each(chosen, ["", ...now.lanes.map((lane) => lane.device)], (name) => name,
    (name) => el("option", { value: name }),
    (option, name) => say(option, name ? device(name) : "all lanes"));
  const lanes = now.lanes.filter((lane) => !chosen.value || lane.device === chosen.value);
  const older = (lane) => before.lanes.find((one) => one.device === lane.device);
  const stage = (direction, name) => merged(lanes.map((lane) =>
    gained(lane.counters.stages[`${direction}_${name}`], older(lane)?.counters.stages[`${direction}_${name}`])));

  const found = Object.keys(STAGES).map((name) => ({ name, store: stage("store", name), load: stage("load", name) }));
  rows($("jobs-table"), found.map(({ name, store, load }, i) => ({
    key: name,
    cells: [
      { draw: (box) => head(box, name, i) },
      ...[store, load].flatMap((one) => [latency(quantile(one, 0.5)), latency(quantile(one, 0.99))]),
    ],
  })));
  for (const direction of ["store", "load"]) {
    shares(direction, found.map((one) => ({ name: one.name, seconds: mean(one[direction]) ?? 0 })), count(found[0][direction]));
  }
  say($("outcomes"), outcomes(lanes, older));
}

function head(box, name, i) {
  if (box.children.length) return;
  const swatch = svg("rect", { width: 10, height: 10, rx: 2, class: `stage${i}` });
  box.append(svg("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" }, swatch),
    name, el("small", {}, STAGES[name]));
}

/** A bar of the stages' mean times: where the time of a job goes. */
function shares(direction, stages, jobs) {
  const bar = $(`share-${direction}`);
  const total = stages.reduce((sum, one) => sum + one.seconds, 0);
  const words = jobs ? `${number(jobs)} ${direction}s in the last minute, ${latency(total)} each on average` : `No ${direction} in the last minute`;
  say($(`share-${direction}-text`), `${words}.`);
  set(bar, "viewBox", "0 0 100 4");
  set(bar, "preserveAspectRatio", "none");
  let x = 0;
  each(bar, stages, (one) => one.name, () => svg("rect", { height: 4 }), (rect, one) => {
    const width = total ? (100 * one.seconds) / total : 0;
    set(rect, "class", `stage${stages.indexOf(one)}`);
    set(rect, "x", x.toFixed(2));
    set(rect, "width", width.toFixed(2));
    x += width;
  });
  set(bar, "aria-label", `${words}: ${stages.map((one) => `${one.name} ${latency(one.seconds)}`).join(", ")}.`);
}

function outcomes(lanes, older) {
  const sums = new Map();
  for (const lane of lanes) {
    for (const [name, value] of Object.entries(lane.counters.jobs)) {
      const rise = value - (older(lane)?.counters.jobs[name] ?? 0);
      if (rise > 0 && !name.endsWith("_ok")) sums.set(name, (sums.get(name) ?? 0) + rise);
    }
  }
  if (!sums.size) return "Every job of the last minute went well.";
  return `Of the last minute: ${[...sums].map(([name, times]) => `${number(times)} ${name.replace("_", " ")}`).join(", ")}.`;
}

export function showBroker(history) {
  const { now, before } = history;
  const { broker, sessions } = now;
  const seconds = now.time - before.time;
  const requests = (report) => Object.values(report.broker.requests).reduce((sum, one) => sum + one, 0);
  const perSecond = (rise) => (seconds > 0 ? rise / seconds : null);
  const figures = {
    Requests: seconds > 0 ? `${number(perSecond(requests(now) - requests(before)))} a second` : NOTHING,
    "Loop lag": `p99 ${latency(quantile(gained(broker.loop_lag, before.broker.loop_lag), 0.99))}, worst ${latency(broker.loop_lag_max_seconds)}`,
    Processor: percent(perSecond(broker.cpu_seconds - before.broker.cpu_seconds)),
    Memory: `${size(broker.rss_bytes)} besides the pool`,
    Sessions: `${number(sessions.open)} of ${number(sessions.limit)}`,
    Leases: number(now.leases),
    "Open files": `${number(broker.open_fds)} of ${number(broker.max_fds)}`,
    Evicted: `${number(now.counters.evicted)} chunks since the start`,
    ...kvEvents(now, before, seconds),
  };
  each($("broker-figures"), Object.entries(figures), ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
    (line, [, text]) => say(line.lastChild, text));
}

/** What engines publish for routers; nothing where none does. */
function kvEvents(now, before, seconds) {
  const { counters, engines } = now;
  if (!counters.kv_events) return {};
  const late = Math.max(0, ...engines.map((engine) => engine.published.lag_max_seconds));
  const told = counters.kv_events - before.counters.kv_events;
  return {
    "KV events": seconds > 0 ? `${number(told / seconds)} a second, at most ${latency(late)} late` : NOTHING,
    "Events' gaps": `${several(counters.kv_event_snapshots, "snapshot")}, ${several(counters.kv_event_overruns, "overrun")}`,
  };
}

export function showEngines(history) {
  const { now, before } = history;
  set($("no-engines"), "hidden", now.engines.length ? "" : null);
  set($("engines-table"), "hidden", now.engines.length ? null : "");
  const models = new Map(now.namespaces.map((namespace) => [namespace.id, namespace.model]));
  rows($("engines-table"), now.engines.map((engine) => {
    const older = before.engines.find((one) => one.name === engine.name);
    const rise = (name) => engine.counters[name] - (older?.counters[name] ?? 0);
    const seconds = Math.max(0, ...engine.sessions.map((session) => session.seconds));
    return {
      key: engine.name,
      cells: [
        named(engine.name),
        engine.attached ? { text: "attached", tone: "good" } : { text: "waiting", tone: "warn" },
        { draw: (box) => ranks(box, engine) },
        named(models.get(engine.namespace) ?? NOTHING),
        found(rise),
        duration(seconds),
      ],
    };
  }));
}

/** The share of prompt tokens; of keys looked up, and named so, where none are counted. */
function found(rise) {
  if (rise("lookup_tokens") > 0) return percent(rise("hit_tokens") / rise("lookup_tokens"));
  return rise("lookup_chunks") > 0 ? `${percent(rise("hit_chunks") / rise("lookup_chunks"))} of keys` : NOTHING;
}

function ranks(box, engine) {
  if (!box.children.length) box.append(el("ul", { class: "ranks" }));
  const missing = new Set(engine.missing_ranks);
  const all = Array.from({ length: engine.world_size }, (_, rank) => rank);
  each(box.firstChild, all, (rank) => rank, () => el("li"), (item, rank) => {
    const session = engine.sessions.find((one) => one.rank === rank);
    say(item, missing.has(rank) ? `${rank} missing` : String(rank));
    set(item, "data-tone", missing.has(rank) ? "bad" : "good");
    set(item, "title", session ? `rank ${rank}: pid ${session.pid} on ${session.device}` : `rank ${rank}`);
  });
}
