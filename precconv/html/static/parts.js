// What the page says of a scan and of a conversion.

const FEW = PAGE < 50 ? 12 : 24; // rows, on a phone and elsewhere
const RISKY = 0.01; // share of a tensor's nonzero values that may become 0 before a conversion warns

function verdict(lines) {
  const items = lines.map((line) => {
    const [key, rest] = [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)];
    const bad = (key.startsWith("not safe") && !rest.startsWith("nothing was found")) || key === "not written";
    const text = key === "run" && !rest.startsWith("nothing") ? el("code", {}, safe(rest, 4000)) : safe(rest, 4000);
    return el("li", {}, el("b", {}, key), el("span", { class: bad ? "bad" : null, dir: "auto" }, text));
  });
  return el("ul", { class: "verdict", "aria-label": "Verdict" }, ...items);
}

function totals(rows) {
  const shown = rows.filter(([, value]) => value !== "");
  return el("dl", { class: "totals" }, ...shown.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))));
}

function notes(result) {
  const lines = [...result.warnings.map((text) => `warning: ${text}`), ...result.notes];
  return lines.length ? el("ul", { class: "notes" }, ...lines.map((text) => el("li", { dir: "auto" }, safe(text, 4000)))) : null;
}

const holdsNonfinite = (read, i) => read.nan(i) > 0 || read.inf(i) > 0;
/** What is said of a sample is not said of all: other values may overflow, or change. */
const inSample = (result) => (result.verdict.sampled ? " in the sample" : "");
const share0 = (n, all) => (n ? `${count(n)} (${share(n, all)})` : "0");

function scanTotals(result) {
  const t = result.totals;
  return totals([
    ["tensors", count(t.tensors)], ["size", bytes(t.bytes)], ["values read", count(t.n)],
    ["smallest |x|", number(t.min_abs)], ["largest |x|", number(t.max_abs)],
    ["zeros", share0(t.zero, t.n)], ["subnormal", share0(t.subnormal, t.n)], ["NaN", count(t.nan)], ["Inf", count(t.inf)],
  ]);
}

function judgements(result) {
  const rows = result.verdict.judgements.map((j) => [
    j.to, j.safe ? `safe${inSample(result)}` : el("span", { class: "flag" }, "not safe"), count(j.tensors), count(j.overflowing.length),
    count(j.underflowing.length), count(j.overflow), count(j.underflow), number(j.max_abs_error),
    number(j.relative_rms_error), decibels(j.snr_db), j.exact ? `yes${inSample(result)}` : "no",
  ]);
  const heads = ["to", "verdict", "tensors cast", "overflow", "over 1 % to 0", "values over", "values to 0", "max |error|",
    "relative RMS", "SNR, dB", "exact"];
  return table("What each target would do", heads, rows, [2, 3, 4, 5, 6, 7, 8, 9]);
}

function spark(exponents, axis) {
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${axis.columns * axis.step} 22`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (!exponents || !exponents.counts.length) return drawing;
  const { subnormal, largest } = axis.fp16;
  drawing.append(svg("rect", { class: "in", x: subnormal - axis.first, y: 0, width: largest + 1 - subnormal, height: 22 }));
  const top = Math.log2(Math.max(...exponents.counts) + 1);
  const bars = exponents.counts.map((n, i) => {
    const height = n ? Math.max(1, (21 * Math.log2(n + 1)) / top) : 0;
    return height ? `M${exponents.first + i - axis.first} 22v${-height.toFixed(1)}h1v${height.toFixed(1)}z` : "";
  });
  drawing.append(svg("path", { class: "bars", d: bars.join("") }));
  return drawing;
}

const value = (id, head, read, numeric, cell, more) =>
  ({ id, head, value: read, numeric, cell: cell || ((i) => String(read(i) ?? "")), ...more });
const dims = (shape) => `[${(shape || []).join(", ")}]`;

/** A column of drawings of the tensors' exponents, all over one axis. */
function histogram(data) {
  const found = data.tensors.exponents || {};
  const [first, counts] = [reader(found.first), reader(found.counts)];
  const axis = { ...data.heat.axis, fp16: data.heat.ranges.fp16 };
  return { id: "histogram", head: "values by size", cell: (i) => spark(counts(i) && { first: first(i), counts: counts(i) }, axis) };
}

/** What the table needs of a scan's tensors. */
function scanModel(data) {
  const t = data.tensors;
  const read = Object.fromEntries(["name", "file", "dtype", "shape", "bytes", "n", "nan", "inf", "zero", "subnormal",
    "min_abs", "max_abs", "sampled"].map((key) => [key, reader(t[key])]));
  const casts = Object.keys(t.casts || {});
  const asked = data.result.targets.filter((to) => casts.includes(to));
  const names = [...asked, ...casts.filter((to) => !asked.includes(to))];
  const by = Object.fromEntries(names.map((to) => [to, ofTarget(t, to, read, data.result)]));
  const several = new Set(data.result.files || []).size > 1 || !Array.isArray(t.file) && t.file && t.file.table.length > 1;
  const columns = (to) => [
    value("name", "tensor", read.name, false, (i) => name(read.name(i))),
    histogram(data),
    ...(by[to] ? by[to].columns(read.dtype) : [value("dtype", "dtype", read.dtype)]),
    value("min", "least |x|", read.min_abs, true, (i) => number(read.min_abs(i))),
    value("max", "largest |x|", read.max_abs, true, (i) => number(read.max_abs(i))),
    ...[["zero", "zeros"], ["subnormal", "subnormal"], ["nan", "NaN"], ["inf", "Inf"], ["n", "values"]].map(([key, head]) =>
      value(key, head, read[key], true, (i) => count(read[key](i)), { flag: (i) => (key === "nan" || key === "inf") && read[key](i) > 0 })),
    value("shape", "shape", read.bytes, false, (i) => dims(read.shape(i)), { title: "sorts by bytes" }),
    ...(by[to] ? [value("why", "why", by[to].why, false, (i) => name(by[to].why(i) || ""))] : []),
    ...(several ? [value("file", "file", read.file, false, (i) => name(read.file(i)))] : []),
  ];
  const filters = (to) => by[to] ? [["all tensors", null], ...by[to].filters(), ["with NaN or Inf", (i) => holdsNonfinite(read, i)]] : [["all tensors", null]];
  const list = Array.from({ length: length(t.name) }, (_, i) => read.name(i).toLowerCase());
  return { rows: list.length, names: list, columns, filters, targets: names, of: data.heat.of,
    label: "Tensors, and what a cast would make of them" };
}

/** One target's columns: what a cast to it would do, quiet where the plan does not cast the tensor to it. */
function ofTarget(t, to, read, result) {
  const cast = t.casts[to], plan = (t.plan || {})[to] || {};
  const [becomes, why, overflow, underflow, part, worst, rms, snr, exact] = [plan.to, plan.why, cast.overflow, cast.underflow,
    cast.underflow_share, cast.max_abs_error, cast.relative_rms_error, cast.snr_db, cast.exact].map(reader);
  const { dtype } = read;
  const isCast = (i) => becomes(i) === to && dtype(i) !== to;
  const risky = (i) => holdsNonfinite(read, i) || (isCast(i) && (overflow(i) > 0 || part(i) > RISKY));
  const moot = (i) => !isCast(i);
  const becoming = (i) => {
    if (!becomes(i)) return `${dtype(i)}, ${t.plan && t.plan[to] ? "dropped" : "not asked"}`;
    return becomes(i) === dtype(i) ? `${dtype(i)}, kept` : `${dtype(i)} → ${becomes(i)}`;
  };
  const columns = () => [
    value("to", "becomes", becoming, false),
    value("overflow", "overflow", overflow, true, (i) => count(overflow(i)), { moot, flag: (i) => isCast(i) && overflow(i) > 0 }),
    value("underflow", "to 0", part, true, (i) => (underflow(i) ? `${count(underflow(i))} (${share(part(i), 1)})` : count(underflow(i))),
      { moot, flag: (i) => isCast(i) && part(i) > RISKY, title: "sorts by share of the nonzero values" }),
    value("error", "max |error|", worst, true, (i) => number(worst(i)), { moot }),
    value("rms", "relative RMS", rms, true, (i) => number(rms(i)), { moot }),
    value("snr", "SNR, dB", snr, true, (i) => decibels(snr(i)), { moot }),
    value("exact", "exact", (i) => (exact(i) === null ? null : !exact(i) ? "no" : read.sampled(i) ? "yes in the sample" : "yes"), false, null, { moot }),
  ];
  const filters = () => [
    ["at risk", risky], ["that overflow", (i) => isCast(i) && overflow(i) > 0], ["with values that become 0", (i) => isCast(i) && underflow(i) > 0],
    ["that lose something", (i) => isCast(i) && exact(i) === false], [`held exactly${inSample(result)}`, (i) => exact(i) === true], ["not cast", moot],
  ];
  return { columns, filters, why };
}

// A conversion

const became = (result) => (result.ok ? "became 0" : "would become 0");

function conversionTotals(result) {
  const t = result.totals;
  return totals([
    ["tensors", count(sum(result.groups.map((g) => g.tensors)))], ["source", bytes(result.source_bytes)],
    [result.ok ? "output" : "output would be", bytes(result.output_bytes)],
    ["values", count(t.n)], ["overflow", count(t.overflow)], [became(result), share0(t.underflow, t.n)], ["subnormal", share0(t.subnormal, t.n)],
    ["zeros", share0(t.zero, t.n)], ["NaN", count(t.nan)], ["Inf", count(t.inf)],
  ]);
}

function conversionParts(result) {
  const group = (g) => [name(g.why), g.from === g.to ? g.to : `${g.from} → ${g.to}`, count(g.tensors), count(g.elements), bytes(g.bytes)];
  const finding = (f) => [name(f.tensor), f.level === "error" ? el("span", { class: "flag" }, f.level) : f.level, f.check, name(f.text)];
  const file = (f) => [name(f.path), f.action, f.nbytes === null ? "" : bytes(f.nbytes), name(f.why)];
  const dropped = (d) => [name(d.name), d.from, dims(d.shape), name(d.why)];
  const some = (id, title, rows, ...more) => (rows.length ? section(id, title, capped(title, rows, ...more)) : null);
  return [
    some("findings", "Findings", result.findings, ["tensor", "level", "check", "what was found"], finding, [], [3]),
    some("groups", "Plan", result.groups, ["why", "dtype", "tensors", "values", "size"], group, [2, 3, 4]),
    some("dropped", "Dropped", result.dropped, ["tensor", "dtype", "shape", "why"], dropped, [], [3]),
    some("files", "Files", result.files, ["file", "what became of it", "size", "why"], file, [2], [3]),
  ];
}

/** A table of some rows, and of more when they are asked for: what stands below it is not pushed out of sight. */
function capped(title, rows, heads, cells, numeric, wide) {
  const [few, most] = [FEW, 1000];
  const made = (n) => table(title, heads, rows.slice(0, n).map(cells), numeric, wide);
  const rest = () => (rows.length > most ? el("p", { class: "facts" }, `and ${count(rows.length - most)} more, in the JSON report`) : "");
  if (rows.length <= few + 2) return made(rows.length);
  const box = el("div", {}, made(few));
  const button = el("button", { type: "button", class: "more" }, `Show ${count(Math.min(rows.length, most))} rows`);
  button.addEventListener("click", () => {
    const all = made(most);
    box.replaceChildren(all, rest());
    all.focus();
  });
  box.append(button);
  return box;
}

function conversionModel(data) {
  const t = data.tensors;
  const read = Object.fromEntries(["name", "from", "to", "why", "shape", "nan", "inf", "zero", "overflow", "underflow",
    "subnormal", "max_abs", "max_abs_error", "relative_rms_error"].map((key) => [key, reader(t[key])]));
  const cast = (i) => read.from(i) !== read.to(i);
  const snr = (i) => {
    const error = read.relative_rms_error(i);
    return cast(i) && error > 0 ? -20 * Math.log10(error) : null;
  };
  const numbers = [["overflow", "overflow"], ["underflow", became(data.result)], ["subnormal", "subnormal"], ["zero", "zeros"], ["nan", "NaN"], ["inf", "Inf"]];
  const size = (i) => read.shape(i).reduce((a, b) => a * b, 1);
  const nonzero = (i) => size(i) - read.zero(i) - read.nan(i) - read.inf(i);
  const flagged = (key, i) => (key === "underflow" ? read[key](i) > RISKY * nonzero(i)
    : ["overflow", "nan", "inf"].includes(key) && read[key](i) > 0);
  const columns = () => [
    value("name", "tensor", read.name, false, (i) => name(read.name(i))),
    ...(isDrawn(data.heat) ? [histogram(data)] : []),
    value("to", "dtype", (i) => (cast(i) ? `${read.from(i)} → ${read.to(i)}` : `${read.to(i)}, kept`)),
    ...numbers.map(([key, head]) => value(key, head, read[key], true, (i) => count(read[key](i)), { flag: (i) => flagged(key, i) })),
    value("max", "largest |x|", read.max_abs, true, (i) => number(read.max_abs(i))),
    value("error", "max |error|", read.max_abs_error, true, (i) => number(read.max_abs_error(i))),
    value("rms", "relative RMS", read.relative_rms_error, true, (i) => number(read.relative_rms_error(i))),
    value("snr", "SNR, dB", snr, true, (i) => decibels(snr(i))),
    value("n", "values", size, true, (i) => count(size(i))),
    value("shape", "shape", size, false, (i) => dims(read.shape(i)), { title: "sorts by values" }),
    value("why", "why", read.why, false, (i) => name(read.why(i))),
  ];
  const named = new Set(data.result.findings.map((f) => f.tensor));
  const filters = () => [["all tensors", null], ["with findings", (i) => named.has(read.name(i))], [data.result.ok ? "with a new dtype" : "that would have a new dtype", cast], ["that overflow", (i) => read.overflow(i) > 0],
    [`with values that ${became(data.result)}`, (i) => read.underflow(i) > 0], ["with NaN or Inf", (i) => holdsNonfinite(read, i)]];
  const list = Array.from({ length: length(t.name) }, (_, i) => read.name(i).toLowerCase());
  return { rows: list.length, names: list, columns, filters, targets: [], of: data.heat.of,
    label: `Tensors, and what ${data.result.ok ? "became" : "would become"} of them` };
}
