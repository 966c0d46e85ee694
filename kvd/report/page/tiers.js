// What lies below the pool: a row for each tier, where there are any.

import { $, named, rows, set } from "./dom.js";
import { gained, quantile } from "./history.js";
import { NOTHING, duration, latency, number, rate, several, size } from "./words.js";

export function showTiers(history) {
  const { now, before } = history;
  set($("tiers"), "hidden", now.tiers.length ? null : "");
  const seconds = now.time - before.time;
  rows($("tiers-table"), now.tiers.map((tier) => {
    const { counters } = tier;
    const older = before.tiers.find((one) => one.name === tier.name)?.counters;
    const perSecond = (name) => (seconds > 0 ? (counters[name] - (older?.[name] ?? 0)) / seconds : null);
    const gets = gained(counters.get_latency, older?.get_latency);
    const opened = Object.values(counters.opened).reduce((sum, one) => sum + one, 0);
    return {
      key: tier.name,
      cells: [
        named(tier.name),
        state(tier),
        `${size(tier.used_bytes)} of ${size(tier.total_bytes || null)}`,
        number(tier.chunks),
        rate(perSecond("put_bytes")),
        rate(perSecond("get_bytes")),
        number(counters.gets.ok - (older?.gets.ok ?? 0)),
        `${latency(quantile(gets, 0.5))} / ${latency(quantile(gets, 0.99))}`,
        size(tier.queued_put_bytes + tier.queued_get_bytes),
        opened ? several(opened, "time") : NOTHING,
        { text: tier.last_error || "none" },
      ],
    };
  }));
}

function state(tier) {
  const time = `for ${duration(tier.state_seconds)}`;
  if (tier.stopped) return { text: tier.stopped, tone: "bad" };
  if (tier.state !== "up") return { text: `${tier.state} ${time}`, tone: tier.state === "down" ? "bad" : "warn" };
  if (tier.breaker === "open") return { text: `set aside ${time}`, tone: "bad" };
  if (tier.breaker === "probing") return { text: `probing, set aside ${time}`, tone: "bad" };
  return tier.full ? { text: "full", tone: "warn" } : { text: `up ${time}`, tone: "good" };
}
