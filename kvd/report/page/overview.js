// The top of the page and the events: state, what is wrong now, readiness, what happened.

import { $, each, el, fold, say, set, svg } from "./dom.js";
import { clock, device, duration, several } from "./words.js";

const TONES = { error: "bad", warning: "warn", hint: "info", info: "quiet" };
const LEVELS = { error: "Problem", warning: "Warning", hint: "Hint" };

export function stateOf(report) {
  if (report.draining) return { text: "Draining", tone: "warn" };
  return report.ready ? { text: "Ready", tone: "good" } : { text: "Not ready", tone: "bad" };
}

export function showState(report) {
  const { text, tone } = stateOf(report);
  say($("state"), text);
  set($("state"), "data-tone", tone);
  say($("uptime"), `up ${duration(report.time - report.started)}`);
}

/** Which daemon a report is of. */
export function showIdentity(report) {
  say($("where"), `on ${report.host}, ${report.runtime_dir}`);
  say($("identity"), `${report.version}, process ${report.pid}, boot ${report.boot_id.slice(0, 8)}`);
}

/**
 * What is shown while no report comes: how the daemon is, is unknown. In unix seconds: `since` when,
 * and `heard`, when the last report was made; null without one.
 */
export function showUnknown(since, heard) {
  say($("state"), "Unknown");
  set($("state"), "data-tone", "quiet");
  say($("uptime"), "");
  const time = `${clock(since)}, for ${duration(Date.now() / 1000 - since)}`;
  const older = heard == null ? "" : ` What is below is of ${clock(heard)}.`;
  say($("verdict"), `The daemon's state is unknown since ${time}.${older}`);
  set($("verdict"), "data-tone", "quiet");
}

/** Shows what is wrong, and returns the verdict in words. */
export function showConditions(report) {
  const found = report.conditions;
  const bad = found.filter((condition) => condition.level !== "hint");
  const served = report.engines.some((engine) => engine.attached);
  const good = served ? "All is well." : "Nothing is wrong, but no engine is attached.";
  const text = bad.length ? `${several(bad.length, "thing needs", "things need")} a look.` : `${good} ${doing(report)}`;
  say($("verdict"), text);
  set($("verdict"), "data-tone", bad.length ? TONES[bad[0].level] : served ? "good" : "info");
  const ofName = (condition) => found.filter((one) => one.name === condition.name).indexOf(condition);
  each($("problems"), found, (condition) => `${condition.name} ${ofName(condition)}`, make, (item, condition) => {
    set(item, "data-tone", TONES[condition.level]);
    say(item.querySelector(".level"), LEVELS[condition.level]);
    say(item.querySelector(".what"), condition.text);
    say(item.querySelector(".remedy"), condition.remedy);
  });
  return bad.length ? `${text} ${bad.map((condition) => condition.text).join(" ")}` : good;
}

function make() {
  const [level, what, remedy] = ["level", "what", "remedy"].map((name) => el("span", { class: name }));
  return el("li", {}, el("p", {}, level, what), el("p", {}, remedy));
}

function doing(report) {
  const attached = report.engines.filter((engine) => engine.attached).length;
  const up = report.lanes.filter((lane) => lane.state === "up").length;
  const lanes = `${several(up, "lane is", "lanes are")} up.`;
  return attached ? `${several(attached, "engine is", "engines are")} attached, ${lanes}` : lanes;
}

export function showChecks(report) {
  fold($("checks"), report.checks, (check) => !check.ok, (shown) => each($("checks"), shown, (check) => check.name,
    () => el("li", {}, el("b"), el("span", { class: "words" }), el("span", { class: "progress" })),
    (item, check) => {
      const [name, text, progress] = item.children;
      set(item, "data-tone", check.ok ? "good" : "warn");
      say(name, check.name.replace(/cuda:.*/, device)); // of a lane
      say(text, `${check.ok ? "" : "not yet: "}${check.text}`);
      fill(progress, check);
    }));
}

/** How far a check has come, while it has a way to go. */
function fill(place, check) {
  const shown = !check.ok && check.percent != null;
  set(place, "hidden", shown ? null : "");
  if (!shown) return;
  if (!place.children.length) {
    place.append(svg("svg", { class: "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "track", width: 100, height: 6 }), svg("rect", { class: "fill", height: 6 })));
  }
  set(place.querySelector(".fill"), "width", check.percent.toFixed(1));
}

export function showEvents(report) {
  const all = [...report.events].sort((a, b) => b.number - a.number);
  set($("no-events"), "hidden", all.length ? "" : null);
  fold($("events-list"), all, () => 0, (shown) => each($("events-list"), shown, (event) => event.number,
    () => el("li", {}, el("time"), el("span")),
    (item, event) => {
      const [time, text] = item.children;
      set(item, "data-tone", TONES[event.level]);
      set(time, "datetime", new Date(event.time * 1000).toISOString());
      say(time, clock(event.time));
      say(text, `${LEVELS[event.level] ? `${LEVELS[event.level]}: ` : ""}${event.text}`);
    }));
}
