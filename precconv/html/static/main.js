// The page: what is shown in which order.

function theme() {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const show = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; show(); });
  dark.addEventListener("change", show);
  show();
  button.hidden = false;
}

function heading(result, what) {
  const path = safe(result.source);
  const base = path.replace(/[\\/]+$/, "").split(/[\\/]/).pop() || path;
  document.title = `${base}: ${what}`;
  document.getElementById("title").replaceChildren(el("bdi", {}, base));
  document.getElementById("facts").replaceChildren(el("bdi", {}, path), `, ${what} in ${result.seconds} s`);
  document.getElementById("about").prepend(`${result.tool}. `);
}

function showScan(data, main) {
  const result = data.result;
  const { sampled } = result.verdict;
  heading(result, sampled ? "sampled" : "scanned");
  const { map, rows } = mapAndTable(data.heat, scanModel(data));
  const counted = "Only what a conversion casts is counted: norms and what else its plan keeps lose nothing.";
  const part = sampled ? " Only a sample was read: the other values may not be as safe." : "";
  main.append(verdict(data.lines), notes(result) || "", section("totals", sampled ? "Totals of the sample" : "Totals", scanTotals(result)),
    section("targets", "What a conversion would do", el("p", { class: "lead" }, counted + part), judgements(result)),
    section("map", `Sizes of values by layer${inSample(result)}`, ...map),
    section("tensors", `Tensors, those at risk${inSample(result)} first`, ...rows));
}

function showConversion(data, main) {
  const result = data.result;
  heading(result, result.ok ? "converted" : "not converted");
  const { map, rows } = mapAndTable(data.heat, conversionModel(data));
  main.append(verdict(data.lines), notes(result) || "", section("totals", "Totals", conversionTotals(result)),
    ...conversionParts(result).filter(Boolean),
    section("map", "Sizes of the source's values by layer", ...map),
    section("tensors", "Tensors, those with findings first", ...rows));
}

/** The map and the table, which shows the tensors of the row that is chosen in the map. */
function mapAndTable(heat, model) {
  const said = (lines) => (lines.length ? el("p", { class: "lead" }, lines.join(" ")) : "");
  const unread = said(heat.unread);
  if (!isDrawn(heat)) {
    const nothing = el("p", { class: "lead" }, "There is nothing to draw: no value was read but zeros, NaN and Inf.");
    return { map: [unread || nothing], rows: tensorTable(model, () => {}).nodes };
  }
  let chosen = null;
  const map = heatMap(heat, (row) => {
    chosen = row === chosen ? null : row;
    map.press(chosen);
    rows.group(chosen, heat.rows[row].label);
    if (chosen === null) return;
    document.getElementById("tensors").scrollIntoView();
    rows.region.focus({ preventScroll: true });
  });
  const rows = tensorTable(model, () => {
    chosen = null;
    map.press(null);
  });
  const lead = el("p", { class: "lead" }, "Each row is a layer, each column a power of two. The bars on top are the ranges of fp16 and bf16.");
  return { map: [lead, unread, said(heat.edges), ...map.nodes], rows: rows.nodes };
}

async function start() {
  theme();
  const main = document.getElementById("main");
  if (!("DecompressionStream" in window)) {
    const problem = document.getElementById("problem");
    problem.textContent = "This browser cannot unpack the page's numbers: use one of 2023 or later.";
    problem.hidden = false;
    return;
  }
  const data = await unpack();
  (data.kind === "scan" ? showScan : showConversion)(data, main);
  main.setAttribute("aria-busy", "false");
  performance.mark("ready");
}

start();
