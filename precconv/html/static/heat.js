// The map: a row a layer, a column a binary exponent, the darker (in the dark theme, the lighter) the more values.

const LEVELS = 12;
const ROW = 24; // pixels: the least that a finger hits, WCAG 2.2 (2.5.8)
const FAINTEST = -6; // log10 of the share that gets the first level

const level = (part) => Math.min(LEVELS - 1, Math.max(0, Math.floor(LEVELS * (1 - Math.log10(part) / FAINTEST))));
const sum = (values) => values.reduce((a, b) => a + b, 0);

const isDrawn = (heat) => heat.rows.some((row) => row.counts.length);

function columnsOf(row, axis) {
  const columns = new Array(axis.columns).fill(0);
  row.counts.forEach((n, i) => { columns[Math.floor((row.first + i - axis.first) / axis.step)] += n; });
  return columns;
}

function heatMap(heat, onRow) {
  const { axis, ranges } = heat;
  const rows = heat.rows.map((row) => ({ ...row, columns: columnsOf(row, axis), total: sum(row.counts) }));
  const at = (exponent) => (100 * (exponent - axis.first)) / (axis.columns * axis.step);
  const clamp = (x) => Math.min(100, Math.max(0, x));
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const cursor = el("i", { class: "cell", hidden: true });
  const guides = el("div", { class: "guides", "aria-hidden": "true" }, cursor);
  const grid = el("div", { class: "heat", role: "group", "aria-labelledby": "map-title", "aria-describedby": "map-keys" });
  const buttons = [];
  let column = 0;

  const place = (node, left, right) => {
    node.style.left = `${clamp(left)}%`;
    node.style.width = `${clamp(right) - clamp(left)}%`;
    return node;
  };

  for (const [type, range] of Object.entries(ranges)) {
    const parts = [["subnormal", range.subnormal, range.normal], ["normal", range.normal, range.largest + 1]];
    const bars = parts.filter(([, from, to]) => clamp(at(to)) > clamp(at(from)))
      .map(([kind, from, to]) => place(el("i", { class: kind }, kind === "normal" ? `normal ${power(from)}…${power(to - 1)}` : kind), at(from), at(to)));
    const nth = grid.children.length ? "second" : "first";
    grid.append(el("div", { class: `lane ${nth}` }, type), el("div", { class: `span ${nth}`, "aria-hidden": "true" }, ...bars));
    for (const [kind, exponent] of [["subnormal", range.subnormal], ["normal", range.normal], ["largest", range.largest + 1]]) {
      if (at(exponent) <= 0 || at(exponent) >= 100) continue;
      const guide = el("i", { class: kind });
      guide.style.left = `${at(exponent)}%`;
      guides.append(guide);
    }
  }

  /** `spoken`: a pointer that moves over the map would flood a screen reader. */
  const say = (r, c, spoken) => {
    const row = rows[r];
    readout.setAttribute("aria-live", spoken ? "polite" : "off");
    const from = axis.first + c * axis.step;
    cursor.hidden = false;
    place(cursor, at(from), at(from + axis.step));
    cursor.style.top = `${r * ROW}px`;
    readout.replaceChildren(name(row.label), `: ${count(row.columns[c])} of ${things(row.total, "value")} `,
      `(${share(row.columns[c], row.total)}) from ${power(from)} to ${power(from + axis.step)}`);
  };

  rows.forEach((row, r) => {
    const strip = svg("svg", { viewBox: `0 0 ${axis.columns} 1`, preserveAspectRatio: "none", "aria-hidden": "true", "shape-rendering": "crispEdges" });
    row.columns.forEach((n, c) => {
      if (n) strip.append(svg("rect", { x: c, y: 0, width: 1, height: 1, class: `h${level(n / row.total)}` }));
    });
    strip.addEventListener("pointermove", (event) => {
      const box = strip.getBoundingClientRect();
      say(r, Math.min(axis.columns - 1, Math.max(0, Math.floor((axis.columns * (event.clientX - box.left)) / box.width))), false);
    });
    strip.addEventListener("click", () => buttons[r].click());
    const shown = safe(row.label);
    const button = el("button", { type: "button", class: "label", tabindex: r ? "-1" : "0", "aria-pressed": "false", title: shown },
      el("bdi", { dir: "ltr" }, shown.length > 34 ? `…${shown.slice(-33)}` : shown));
    button.addEventListener("click", () => onRow(r));
    button.addEventListener("focus", () => {
      for (const other of buttons) other.tabIndex = other === button ? 0 : -1;
      if (button.matches(":focus-visible")) say(r, column, true);
    });
    button.addEventListener("blur", () => { cursor.hidden = true; });
    button.addEventListener("keydown", (event) => {
      const rowTo = { ArrowUp: r - 1, ArrowDown: r + 1, Home: 0, End: rows.length - 1 }[event.key];
      const columnTo = { ArrowLeft: column - 1, ArrowRight: column + 1 }[event.key];
      if (rowTo === undefined && columnTo === undefined) return;
      event.preventDefault();
      if (columnTo !== undefined) {
        column = Math.min(axis.columns - 1, Math.max(0, columnTo));
        say(r, column, true);
      } else if (rows[rowTo]) buttons[rowTo].focus();
    });
    buttons.push(button);
    grid.append(button, strip);
  });
  guides.style.gridRow = `3 / span ${rows.length}`;
  column = Math.min(axis.columns - 1, Math.max(0, Math.floor((-6 - axis.first) / axis.step)));
  grid.append(guides, el("div"), axisOf(axis, at));
  // Columns by name, so that the guides do not move what comes after them.
  let line = 0;
  [...grid.children].filter((node) => node !== guides).forEach((node, i) => {
    if (i % 2 === 0) line += 1;
    node.style.gridRow = line;
    node.style.gridColumn = 1 + (i % 2);
  });
  const press = (chosen) => buttons.forEach((button, r) => button.setAttribute("aria-pressed", String(r === chosen)));
  return { rows, press, nodes: [legend(), grid, readout, alternative(rows, ranges)] };
}

function axisOf(axis, at) {
  const shown = el("div", { class: "axis", "aria-hidden": "true" });
  const every = [4, 8, 16, 32, 64, 128, 256, 512].find((n) => (axis.columns * axis.step) / n <= 14);
  const last = axis.first + axis.columns * axis.step;
  let odd = false;
  for (let e = Math.ceil((axis.first + 1) / every) * every; e < last; e += every, odd = !odd) {
    const tick = el("span", { class: odd ? "odd" : null }, power(e));
    tick.style.left = `${at(e)}%`;
    shown.append(tick);
  }
  return shown;
}

function legend() {
  const ramp = svg("svg", { viewBox: `0 0 ${LEVELS} 1`, preserveAspectRatio: "none", "aria-hidden": "true", "shape-rendering": "crispEdges" });
  for (let i = 0; i < LEVELS; i += 1) ramp.append(svg("rect", { x: i, y: 0, width: 1, height: 1, class: `h${i}` }));
  return el("div", { class: "legend" },
    el("span", { class: "ramp" }, "1 in a million", ramp, "all of a row"),
    el("span", {}, "lines: where a type's normal range begins and ends; dashed: its smallest subnormal"),
    el("span", { id: "map-keys" }, "Arrow keys move; Enter, a click or a tap shows a row's tensors below."));
}

/** What the map shows, in words and numbers. */
function alternative(rows, ranges) {
  const { subnormal, normal, largest } = ranges.fp16;
  const between = (row, from, to) => sum(row.counts.filter((_, i) => row.first + i >= from && row.first + i < to));
  const median = (row) => {
    let left = row.total / 2;
    return row.first + row.counts.findIndex((n) => (left -= n) <= 0);
  };
  const cells = rows.map((row) => {
    if (!row.read) return [name(row.label), count(row.tensors), "not looked at", ...new Array(7).fill("")];
    const range = row.total ? [power(row.first), power(median(row)), power(row.first + row.counts.length - 1)] : ["", "", ""];
    const parts = [[-Infinity, subnormal], [subnormal, normal], [normal, largest + 1], [largest + 1, Infinity]];
    return [name(row.label), count(row.tensors), count(row.total), ...range,
      ...parts.map(([from, to]) => share(between(row, from, to), row.total))];
  });
  const heads = ["layer", "tensors", "nonzero values", "smallest", "median", "largest",
    "below fp16", "fp16 subnormal", "fp16 normal", "above fp16"];
  return el("details", {}, el("summary", {}, "The map as a table"),
    table("Sizes of values by layer", heads, cells, [1, 2, 3, 4, 5, 6, 7, 8, 9]));
}
