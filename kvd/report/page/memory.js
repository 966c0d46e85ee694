// What would more memory bring, and why chunks are missed.

import { $, each, el, rows, say, set, svg } from "./dom.js";
import { gained, quantile } from "./history.js";
import { NOTHING, duration, number, percent, shorten, size } from "./words.js";

const POOLS = { now: "now", unlimited: "without limit" };
const REASONS = {
  never_seen: ["never seen", "asked for the first time"],
  evicted: ["evicted", "was here, had to make room"],
  being_stored: ["being stored", "or on its way up from a tier"],
  ready: ["ready", "behind a miss, or a moment late"],
  refused: ["refused", "no slot was at hand to store it"],
  quota: ["quota", "the model held what its cap allows"],
  reset: ["reset", "an engine, or kvd clear, dropped all"],
  removed: ["removed", "by kvd evict"],
  other_layout: ["other layout", "another namespace has it"],
  no_daemon: ["no daemon", "none served the engine"],
};

const UNREPORTED = "Keys were not found, and no engine has reported why (report_missed).";

/** The forecast of the chosen model: a line for each size of the pool, and advice. */
export function showForecast(report) {
  const known = report.namespaces.filter((namespace) => namespace.forecast);
  for (const id of ["forecast-advice", "forecast-table", "forecast-note"]) set($(id), "hidden", known.length ? null : "");
  set($("no-forecast"), "hidden", known.length ? "" : null);
  set($("forecast-choice"), "hidden", known.length > 1 ? null : "");
  const choice = $("forecast-model");
  each(choice, known, (namespace) => namespace.id, (namespace) => el("option", { value: namespace.id }),
    (option, namespace) => say(option, shorten(namespace.model)));
  const chosen = known.find((namespace) => namespace.id === choice.value) ?? known[0];
  if (!chosen) return;
  const { forecast, advice } = chosen;
  say($("forecast-advice"), advice);
  rows($("forecast-table"), forecast.sizes.map((line) => ({
    key: line.pool,
    cells: [
      { draw: (box) => pool(box, line) },
      { draw: (box) => bar(box, line.hit_ratio) },
      number(line.prefill_seconds_per_hour),
    ],
  })));
  say($("forecast-note"), `By ${number(forecast.requests)} requests: ${percent(forecast.first_time)} of the prompts' chunks`
    + ` were asked for the first time, which no cache finds. At most ${percent(forecast.ceiling)} can be found.`);
}

function pool(box, { pool: name, bytes }) {
  if (!box.children.length) box.append(el("span"), " ", el("small"));
  say(box.firstChild, POOLS[name] ?? name.replace("-", "−").replace("%", " %"));
  say(box.lastChild, bytes == null ? "" : size(bytes));
}

function bar(box, share) {
  if (!box.children.length) {
    const meter = svg("svg", { class: "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "track", width: 100, height: 6 }), svg("rect", { class: "fill", height: 6 }));
    box.append(el("div", { class: "bar" }, el("span"), meter));
  }
  say(box.querySelector("span"), percent(share));
  set(box.querySelector(".fill"), "width", (100 * share).toFixed(1));
}

/** Missed tokens by reason; chunks where a namespace does not know the tokens of one. */
function missed(report) {
  const spaces = report.namespaces.map((namespace) => namespace.missed_tokens);
  if (!spaces.length || spaces.some((tokens) => !Object.keys(tokens).length)) {
    return { unit: "chunks", by: report.counters.missed };
  }
  const by = Object.fromEntries(Object.keys(REASONS).map((reason) =>
    [reason, spaces.reduce((sum, tokens) => sum + (tokens[reason] ?? 0), 0)]));
  return { unit: "tokens", by: { ...by, no_daemon: report.counters.detached_tokens } };
}

/** Why prompts' tokens were missed, in the last minute and since the start. */
export function showMisses(history) {
  const { now, before } = history;
  const [late, early] = [missed(now), missed(before)];
  const reasons = Object.keys(REASONS).filter((reason) => late.by[reason]);
  const start = (reason) => late.by[reason];
  const minute = (reason) => Math.max(0, late.by[reason] - (early.unit === late.unit ? early.by[reason] : 0));
  const total = (count) => reasons.reduce((sum, reason) => sum + count(reason), 0);
  const shares = [minute, start].map((count) => ({ count, all: total(count) }));
  rows($("misses-table"), reasons.map((reason) => ({
    key: reason,
    cells: [
      { draw: (box) => head(box, reason) },
      ...shares.map(({ count, all }) => ({
        text: all ? percent(count(reason) / all) : NOTHING, title: `${number(count(reason))} ${late.unit}`,
      })),
    ],
  })));
  set($("misses-table"), "hidden", reasons.length ? null : "");
  say($("misses-total"), reasons.length ? `${number(total(start))} ${late.unit}` : "");
  const age = quantile(gained(now.counters.missed_age, before.counters.missed_age), 0.5)
    ?? quantile(now.counters.missed_age, 0.5);
  const evicted = age == null ? "" : `Half of the evicted ones had left within the last ${duration(age)} when they were asked for.`;
  say($("misses-note"), hasUnreported(now.counters) ? UNREPORTED : reasons.length ? evicted : "Nothing was missed yet.");
}

/** Whether lookups while attached missed, and no engine has reported a miss; as `kvd status` decides. */
function hasUnreported(counters) {
  const { lookup_tokens: tokens, hit_tokens: foundTokens, detached_tokens: detached } = counters;
  return counters.lookup_chunks > counters.hit_chunks && (!tokens || tokens - detached > foundTokens)
    && !Object.values(counters.missed).some(Boolean);
}

function head(box, reason) {
  const [name, text] = REASONS[reason];
  if (!box.children.length) box.append(el("span", {}, name), el("small", {}, text));
}
