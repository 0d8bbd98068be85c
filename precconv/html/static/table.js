// The table of tensors: a page of rows at a time, so that 100,000 tensors cost what 50 do.

const PAGE = matchMedia("(max-width: 640px)").matches ? 20 : 50;

/**
 * `model`: label, rows, names (lower case), columns (by target), filters (label to test of a row), targets and `of`,
 * the row of the map that each tensor is in.
 */
function tensorTable(model, onClear) {
  const state = { target: model.targets[0] || "", sort: null, down: true, page: 0, text: "", filter: 0, group: null };
  const order = new Int32Array(model.rows);
  let found = order;

  const head = el("tr");
  const body = el("tbody");
  const status = el("p", { role: "status" });
  const region = el("div", { class: "region tall", role: "region", tabindex: "0", "aria-label": "Tensors" },
    el("table", { id: "rows" }, el("caption", { class: "sr" }, model.label), el("thead", {}, head), body));
  const search = el("input", { type: "search", id: "search", placeholder: "part of a name", autocomplete: "off", spellcheck: "false" });
  const filter = el("select", { id: "filter" }, ...model.filters(state.target).map(([text], i) => el("option", { value: i }, text)));
  const chip = el("button", { type: "button", id: "layer", hidden: true }, "Show all layers");
  const older = el("button", { type: "button" }, "Previous");
  const newer = el("button", { type: "button" }, "Next");
  const back = el("button", { type: "button", id: "unsort", disabled: true }, "Order by risk");

  function select() {
    const test = model.filters(state.target)[state.filter][1];
    const text = state.text.toLowerCase();
    let n = 0;
    for (let i = 0; i < model.rows; i += 1) {
      if (state.group !== null && model.of[i] !== state.group) continue;
      if (text && !model.names[i].includes(text)) continue;
      if (test && !test(i)) continue;
      order[n] = i;
      n += 1;
    }
    found = order.subarray(0, n);
    const column = state.sort && model.columns(state.target).find((c) => c.id === state.sort);
    if (column) arrange(column);
    state.page = Math.min(state.page, Math.max(0, Math.ceil(n / PAGE) - 1));
  }

  /** What has no value stands last either way; equals stay in the order of risk. */
  function arrange(column) {
    const keys = new Array(model.rows);
    for (const i of found) keys[i] = column.value(i);
    const sign = state.down ? -1 : 1;
    found.sort((a, b) => {
      const x = keys[a], y = keys[b];
      if (x === y) return a - b;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return x < y ? -sign : sign;
    });
  }

  function drawHead() {
    head.replaceChildren(...model.columns(state.target).map((column) => {
      const kind = [column.numeric ? "num" : null, column.id === "name" ? "name" : null];
      if (!column.value) return el("th", { scope: "col", class: kind.filter(Boolean).join(" ") || null }, column.head);
      const button = el("button", { type: "button", "data-sort": column.id, title: column.title }, column.head);
      button.addEventListener("click", () => sortBy(column));
      const sorted = state.sort === column.id ? (state.down ? "descending" : "ascending") : "none";
      return el("th", { scope: "col", class: [...kind, "sort"].filter(Boolean).join(" "), "aria-sort": sorted }, button);
    }));
  }

  function drawRows() {
    const columns = model.columns(state.target);
    const first = state.page * PAGE;
    const shown = found.subarray(first, first + PAGE);
    body.replaceChildren(...Array.from(shown, (i) => el("tr", {}, ...columns.map((column) => {
      const cell = column.cell(i);
      if (column.id === "name") return el("th", { scope: "row", class: model.names[i].length > 48 ? "name" : "name short" }, cell);
      const flag = column.flag && column.flag(i) ? "flag" : column.moot && column.moot(i) ? "moot" : cell === "0" ? "moot" : null;
      return el("td", { class: [column.numeric ? "num" : null, flag].filter(Boolean).join(" ") || null }, cell);
    }))));
    status.textContent = found.length
      ? `${count(first + 1)} to ${count(first + shown.length)} of ${things(found.length, "tensor")}${found.length < model.rows ? ` (${count(model.rows)} in all)` : ""}`
      : "No tensor is like that.";
    older.disabled = state.page === 0;
    newer.disabled = first + PAGE >= found.length;
    back.disabled = state.sort === null;
  }

  function draw() {
    select();
    drawHead();
    drawRows();
  }

  function sortBy(column) {
    const again = state.sort === column.id;
    state.down = again ? !state.down : Boolean(column.numeric);
    state.sort = column.id;
    state.page = 0;
    draw();
    head.querySelector(`[data-sort="${column.id}"]`).focus();
  }

  function turn(by) {
    state.page += by;
    drawRows();
    region.scrollTop = 0;
    if (region.getBoundingClientRect().top < 0) status.scrollIntoView();
    if (older.disabled) newer.focus();
    else if (newer.disabled) older.focus();
  }

  function group(row, text) {
    state.group = row;
    state.page = 0;
    chip.hidden = row === null;
    chip.replaceChildren("Only ", name(text || ""), " ×");
    chip.setAttribute("aria-label", `Show all layers, not only ${safe(text || "")}`);
    draw();
  }

  search.addEventListener("input", () => { Object.assign(state, { text: search.value, page: 0 }); draw(); });
  filter.addEventListener("change", () => { Object.assign(state, { filter: Number(filter.value), page: 0 }); draw(); });
  chip.addEventListener("click", () => { group(null); onClear(); search.focus(); });
  older.addEventListener("click", () => turn(-1));
  newer.addEventListener("click", () => turn(1));
  back.addEventListener("click", () => { Object.assign(state, { sort: null, page: 0 }); draw(); search.focus(); });

  const controls = el("div", { class: "controls" },
    model.targets.length > 1 ? targets(model.targets, (target) => { state.target = target; draw(); }) : null,
    el("div", {}, el("label", { for: "search" }, "Search"), search),
    el("div", {}, el("label", { for: "filter" }, "Show"), filter), back, chip);
  draw();
  return { group, region, nodes: [controls, status, region, el("div", { class: "pager" }, older, newer)] };
}

function targets(names, onChange) {
  const choices = names.map((target, i) => {
    const input = el("input", { type: "radio", name: "target", value: target, checked: i === 0 });
    input.addEventListener("change", () => onChange(target));
    return el("label", {}, input, target);
  });
  return el("fieldset", {}, el("legend", {}, "As"), el("div", { class: "choice" }, ...choices));
}
