// Puts the parts together: reports come in, every part shows its own.

import { Charts } from "./charts.js";
import { $, say, set } from "./dom.js";
import { History } from "./history.js";
import { showForecast, showMisses } from "./memory.js";
import { showChecks, showEvents, showConditions, showIdentity, showState, showUnknown, stateOf } from "./overview.js";
import { Pool } from "./pool.js";
import { Stream } from "./stream.js";
import { showTiers } from "./tiers.js";
import { clock, duration } from "./words.js";
import { showBroker, showEngines, showJobs, showLanes } from "./work.js";

const history = new History();
const pool = new Pool();
const charts = new Charts();
const news = [];
let verdict = "";
let paused = false;
let heard = null; // when the last report came, by this machine's clock, in unix seconds
let outage = null; // {since, text, next}: why what is shown is old

const stream = new Stream({
  report: take,
  trouble: ({ text, since, time, last_report: last }) => {
    silence({ since, text: `The broker does not answer: ${text}.`, next: null });
    if (last && !history.now) takeLast(last, time - last.time);
  },
  lost: (wait) => silence({
    since: outage?.since ?? heard ?? Date.now() / 1000,
    text: "There is no contact with the daemon.",
    next: (Date.now() + wait) / 1000,
  }),
});

function silence(how) {
  if (outage?.text !== how.text) announce(how.text);
  outage = how;
  contact();
}

function take(report) {
  const before = history.now;
  const restarted = history.add(report);
  if (!before) recall();
  heard = Date.now() / 1000;
  const back = outage !== null;
  if (back) announce("Contact with the daemon is back.");
  outage = null;
  contact();
  if (restarted) {
    const version = before.version === report.version ? "" : ` It is another version now, ${report.version}: reload this page.`;
    say($("restart-text"), `The daemon was restarted at ${clock(report.started)}. Its counters start anew.${version}`);
    set($("restart"), "hidden", null);
    announce($("restart-text").textContent);
  }
  if (!paused || back) show();
}

/** Show the report from before the broker fell silent, some seconds ago: a page that has just opened has no other. */
function takeLast(report, age) {
  history.add(report);
  heard = Date.now() / 1000 - age;
  recall();
  contact();
  show();
}

/** Ask for what was before this page was opened. */
async function recall() {
  const answer = await fetch("history").catch(() => null);
  if (!answer?.ok) return;
  history.recall(await answer.json());
  if (!paused) show();
}

function show() {
  const report = history.now;
  if (!report) return;
  showIdentity(report);
  if (!outage) {
    showState(report);
    const words = showConditions(report);
    const rules = report.conditions.map((condition) => condition.name).join();
    if (rules !== verdict) announce(words);
    verdict = rules;
  }
  showChecks(report);
  pool.show(report);
  charts.show(history);
  showForecast(report);
  showMisses(history);
  showLanes(report);
  showTiers(history);
  showJobs(history);
  showBroker(history);
  showEngines(history);
  showEvents(report);
  title();
}

/** Whether what is shown is new, and since when not. */
function contact() {
  const now = Date.now() / 1000;
  document.body.classList.toggle("stale", outage !== null);
  set($("contact"), "hidden", outage ? null : "");
  if (outage) {
    showUnknown(outage.since, heard);
    const seen = heard == null ? "No report has come yet" : `What is shown is from ${clock(heard)}, ${duration(now - heard)} ago`;
    const next = outage.next == null ? "" : ` Next try in ${duration(Math.max(1, outage.next - now))}.`;
    say($("contact-text"), `${outage.text} ${seen}.${next}`);
    say($("link"), `no contact since ${clock(outage.since)}`);
  } else {
    say($("link"), paused ? "paused" : heard == null ? "Connecting…" : `live, ${clock(heard)}`);
  }
  title();
}

function title() {
  const report = history.now;
  const bad = report ? report.conditions.filter((condition) => condition.level !== "hint").length : 0;
  const state = outage ? "no contact" : report ? stateOf(report).text.toLowerCase() : "connecting";
  const where = report ? `${report.host} – ` : "";
  const text = `${bad && !outage ? `(${bad}) ` : ""}${where}kvd – ${state}`;
  if (document.title !== text) document.title = text;
}

/** Tell a screen reader, and only what matters; what comes at once is told together. */
function announce(text) {
  if (!news.length) setTimeout(() => say($("announcer"), news.splice(0).join(" ")), 0);
  news.push(text);
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  set($("pause"), "aria-pressed", String(paused));
  say($("pause"), paused ? "Resume" : "Pause");
  contact();
  if (!paused) show();
});
$("retry").addEventListener("click", () => stream.open());
$("restart-seen").addEventListener("click", () => {
  set($("restart"), "hidden", "");
  $("now").focus();
});
$("forecast-model").addEventListener("change", () => history.now && showForecast(history.now));
$("jobs-lane").addEventListener("change", () => history.now && showJobs(history));
for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => history.now && charts.show(history));
}
setInterval(() => outage && contact(), 1000);
addEventListener("pagehide", () => stream.close());
addEventListener("pageshow", (event) => event.persisted && stream.open());
stream.open();
