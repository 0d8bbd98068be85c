// Text and elements.  What comes from a file only ever becomes text: there is no markup made of strings here.

const SVG = "http://www.w3.org/2000/svg";
const WIDEST = 240;
const whole = new Intl.NumberFormat("en-US");

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  return node;
}

/** As it may be shown: what would reorder or hide text is spelled out, and the middle of a long name left out. */
function safe(text, widest = WIDEST) {
  const clipped = text.length <= widest ? text : `${text.slice(0, widest / 2)}…${text.slice(-widest / 2)}`;
  return clipped.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}


/** A name, which may be broken after its dots. */
const name = (text) => el("bdi", {}, ...safe(text).split(/(?<=[./])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part])));
const count = (n) => (n === null || n === undefined ? "" : whole.format(n));
const things = (n, thing) => `${count(n)} ${thing}${n === 1 ? "" : "s"}`;

function number(x) {
  if (x === null || x === undefined) return "";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e-3 && size < 1e5) return String(Number(x.toPrecision(3)));
  return x.toExponential(2).replace(/\.?0*e/, "e").replace("e+", "e").replace("e-", "e−");
}

function share(part, all) {
  if (!all || !part) return "0 %";
  const percent = (100 * part) / all;
  return percent < 0.01 ? "< 0.01 %" : `${percent.toPrecision(percent >= 99.95 ? 4 : 3)} %`;
}

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.5 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${unit ? Number(n.toPrecision(3)) : n} ${units[unit]}`;
}

function power(exponent) {
  const digits = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  return `2${String(exponent).replace(/-/g, "⁻").replace(/\d/g, (d) => digits[d])}`;
}

const decibels = (x) => (x === null || x === undefined ? "" : x.toFixed(1).replace("-", "−"));

/** A table of plain cells: strings, or nodes; `numeric` are the columns that are numbers. */
function table(caption, heads, rows, numeric = [], wide = []) {
  const kind = (i) => (numeric.includes(i) ? "num" : wide.includes(i) ? "wrap" : null);
  const head = el("tr", {}, ...heads.map((text, i) => el("th", { scope: "col", class: kind(i) }, text)));
  const body = rows.map((cells) =>
    el("tr", {}, ...cells.map((cell, i) =>
      i ? el("td", { class: kind(i) }, cell) : el("th", { scope: "row", class: kind(i) }, cell))));
  return el("div", { class: "region", role: "region", tabindex: "0", "aria-label": caption },
    el("table", {}, el("caption", { class: "sr" }, caption), el("thead", {}, head), el("tbody", {}, ...body)));
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}
