// The pool as a picture: cells of equal size, coloured by namespace, filled by state.

import { $, each, el, rows, say, set, showName, svg } from "./dom.js";
import { number, percent, size } from "./words.js";

const CELLS = 400;
const COLOURS = 6;
const STATES = { ready: "ready", writing: "being written", draining: "draining" };

/** Bytes by state, all namespaces together; free is what no chunk takes. */
export function use(report) {
  const bytes = {};
  for (const state of Object.keys(STATES)) {
    bytes[state] = report.namespaces.reduce((sum, namespace) => sum + namespace[`${state}_bytes`], 0);
  }
  const taken = Object.values(bytes).reduce((sum, one) => sum + one, 0);
  return { ...bytes, free: report.pool.cpu_bytes - taken };
}

/**
 * What each cell shows, as [{space, state, cells}]: in proportion to bytes, at least one cell
 * for what is there at all, `cells` cells together. Pure.
 */
export function parts(report, cells = CELLS) {
  const total = report.pool.cpu_bytes;
  if (!total) return [];
  const found = [];
  report.namespaces.forEach((namespace, index) => {
    for (const state of Object.keys(STATES)) {
      const bytes = namespace[`${state}_bytes`];
      if (bytes > 0) found.push({ space: index, state, cells: Math.max(1, Math.floor((bytes / total) * cells)) });
    }
  });
  let left = cells - found.reduce((sum, part) => sum + part.cells, 0);
  while (left < 0) {
    found.reduce((a, b) => (b.cells > a.cells ? b : a)).cells -= 1;
    left += 1;
  }
  found.push({ space: null, state: "free", cells: left });
  return found;
}

export class Pool {
  #columns = 0;
  #report = null;

  constructor() {
    new ResizeObserver(() => this.#report && this.#draw()).observe($("pool"));
  }

  show(report) {
    this.#report = report;
    const total = report.pool.cpu_bytes;
    const { ready, free } = use(report);
    say($("pool-ready"), total ? `${percent(ready / total)} ready` : "–");
    say($("pool-of"), total
      ? `${percent(free / total)} free of ${size(total)}`
      : "sized when the first engine comes");
    this.#draw();
    this.#key(report);
    this.#table(report);
  }

  #draw() {
    const picture = $("pool-picture");
    const columns = $("pool").clientWidth > 560 ? 40 : 25;
    if (columns !== this.#columns) {
      this.#columns = columns;
      set(picture, "viewBox", `0 0 ${columns * 10} ${(CELLS / columns) * 10}`);
      picture.replaceChildren(...Array.from({ length: CELLS }, (_, i) => svg("rect", {
        x: (i % columns) * 10 + 1, y: Math.floor(i / columns) * 10 + 1, width: 8, height: 8, rx: 1.5,
      })));
    }
    const cells = parts(this.#report).flatMap((part) =>
      Array(part.cells).fill(part.space == null ? "free" : `ns${part.space % COLOURS} ${part.state}`));
    [...picture.children].forEach((cell, i) => set(cell, "class", cells[i] ?? "free"));
    set(picture, "aria-label", summary(this.#report));
  }

  #key(report) {
    const states = { ...STATES, free: "free" };
    each($("pool-key"), Object.keys(states), (state) => state, () => el("li"), (item, state) => {
      if (!item.children.length) {
        const cell = svg("rect", { x: 1, y: 1, width: 8, height: 8, rx: 1.5, class: state === "free" ? "free" : `any ${state}` });
        item.append(svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, cell), states[state]);
      }
    });
    set($("pool-key"), "hidden", report.namespaces.length ? null : "");
  }

  #table(report) {
    const data = report.namespaces.map((namespace, index) => {
      const { ready, pinned } = namespace.chunks;
      return {
        key: namespace.id,
        cells: [
          { draw: (box) => name(box, namespace, index) },
          size(namespace.held_bytes), size(namespace.ready_bytes),
          size(namespace.writing_bytes), size(namespace.draining_bytes),
          `${number(ready)}${pinned ? `, ${number(pinned)} pinned` : ""}`,
        ],
      };
    });
    rows($("pool-table"), data);
    set($("pool-table"), "hidden", data.length ? null : "");
  }
}

function name(box, namespace, index) {
  if (!box.children.length) {
    const cell = svg("rect", { x: 1, y: 1, width: 8, height: 8, rx: 1.5 });
    const swatch = svg("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" }, cell);
    box.append(el("div", { class: "model" }, swatch, el("span")));
  }
  set(box.querySelector("rect"), "class", `ns${index % COLOURS} ready`);
  showName(box.querySelector("span"), namespace.model);
  set(box, "title", `${namespace.model}, namespace ${namespace.id}`);
}

/** The picture in a sentence, for those who do not see it. */
function summary(report) {
  const total = report.pool.cpu_bytes;
  if (!total) return "The pool has no size yet.";
  const { free } = use(report);
  const spaces = report.namespaces.map(({ model, ready_bytes: ready }) => `${percent(ready / total)} ready of ${model}`);
  return `Pool of ${size(total)}: ${[...spaces, `${percent(free / total)} free`].join(", ")}.`;
}
