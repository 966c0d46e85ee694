// Making and changing elements, lists and names among them. Data only ever becomes text or attributes, never markup.

import { halves } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const FEW = 8; // rows of a list that are shown without a click

export const $ = (id) => document.getElementById(id);

// The space between a figure and its unit.
const BEFORE_UNIT = /(?<=\d) (?=(?:[KMGTP]iB|[kMGT]?B\/s|B|s|ms|µs|min|h|d|%)(?![\p{L}\d]))/gu;

/**
 * Change a text only where it differs, so that nothing is drawn or selected anew for nothing.
 * No line ends between a figure and its unit.
 */
export function say(element, text) {
  const joined = text.replace(BEFORE_UNIT, "\u00a0");
  if (element.textContent !== joined) element.textContent = joined;
}

export function set(element, name, value) {
  if (value == null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** An HTML element with attributes and children; texts become text nodes. */
export function el(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/**
 * Give `parent` one child per item, in order, and reuse those that it has.
 * `make(item)` builds one, `update(child, item)` fills it; `key(item)` says which is which.
 */
export function each(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = String(key(item));
    let child = old.get(name);
    if (child) old.delete(name);
    else {
      child = make(item);
      child.dataset.key = name;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const child of old.values()) child.remove();
}

/**
 * Show the first few of `items` by `draw(items)`, and all of them once a button behind `list` is
 * pressed. Those with trouble come first.
 */
export function fold(list, items, troubled, draw) {
  let button = list.nextElementSibling;
  if (!button?.classList.contains("fold")) {
    button = el("button", { class: "fold", type: "button", "aria-expanded": "false", "aria-controls": list.id });
    list.after(button);
  }
  const open = button.getAttribute("aria-expanded") === "true";
  set(button, "hidden", items.length > FEW ? null : "");
  say(button, open ? "Show fewer" : `Show all ${items.length}`);
  button.onclick = () => {
    set(button, "aria-expanded", String(!open));
    fold(list, items, troubled, draw);
  };
  const ordered = items.length > FEW ? [...items].sort((a, b) => troubled(b) - troubled(a)) : items;
  draw(open ? ordered : ordered.slice(0, FEW));
}

/** Show a name in as much room as there is; its middle is left out first. The whole is on hover. */
export function showName(box, name) {
  set(box, "title", name);
  if (box.hasChildNodes()) return; // a row keeps its name
  const [head, tail] = halves(name);
  box.append(tail ? el("span", { class: "name" }, el("span", {}, head), el("span", {}, tail)) : head);
}

/** A cell of a table with a name. */
export function named(name) {
  return { draw: (box) => showName(box, name) };
}

const BAD = new Set(["bad", "warn"]);

/**
 * Fill a table's body. Each row is {key, cells}; a cell is a text, or {text, tone, title, draw}
 * where `draw(cell)` adds what text cannot say. The first cell heads its row. Of a list of things
 * (a table that stacks) only a few are shown at first.
 */
export function rows(table, data) {
  if (!table.classList.contains("stacks")) fill(table, data);
  else fold(table, data, (row) => row.cells.some((cell) => BAD.has(cell.tone)), (shown) => fill(table, shown));
}

function fill(table, data) {
  const heads = [...table.tHead.rows].at(-1).cells;
  each(
    table.tBodies[0],
    data,
    (row) => row.key,
    (row) => el("tr", {}, ...row.cells.map((_, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }))),
    (line, row) => row.cells.forEach((cell, i) => {
      const box = line.cells[i];
      if (table.classList.contains("stacks")) set(box, "data-label", heads[i].textContent);
      const { text, tone, title, draw } = typeof cell === "object" ? cell : { text: cell };
      set(box, "data-tone", tone);
      if (title) set(box, "title", title);
      if (draw) draw(box);
      else say(box, text);
    }),
  );
}
