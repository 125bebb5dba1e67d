// Pictures: which rows each one draws, its caption and its table. Drawing itself is Vega-Lite's, from the specs of Python.
const DRAWN_AT_MOST = 1000; // points of the error picture; the worst come first, and the caption says so

const measured = (name) => (row) => row[name] > 0; // null is not
const names = (...list) => list.map((name) => ({ name, kind: columns.find((column) => column.name === name)?.kind ?? "number" }));
// Copies: Vega writes into the objects that it is given.
const pick = (fields) => (row) => {
  const copy = { row: row.row };
  for (const name of fields) copy[name] = row[name];
  return copy;
};
const isJudged = (row) => row.err_ratio !== null && row.err_budget > 0;
// Where it is drawn: an infinite error, or one beyond the picture, stands on the edge, and the caption counts it.
const [lowestDrawn, highestDrawn] = page.errorRange;
for (const row of allRows) {
  if (isJudged(row)) row.err_drawn = Math.min(Math.max(row.err_ratio, lowestDrawn), highestDrawn);
}
const worstFirst = allRows.filter(isJudged).sort((a, b) => b.err_ratio - a.err_ratio);

// The squares of the heat map: the geometric mean of the ratios behind each, in doublings, so that x2 and x0.5 cancel.
function squares(rows) {
  const found = new Map();
  for (const { place, series, latency_ratio: ratio } of rows) {
    const key = `${place}\n${series}`;
    const one = found.get(key) ?? { place, series, cells: 0, doublings: 0, smallest: Infinity, largest: 0 };
    one.cells += 1;
    one.doublings += Math.log2(ratio);
    one.smallest = Math.min(one.smallest, ratio);
    one.largest = Math.max(one.largest, ratio);
    found.set(key, one);
  }
  return [...found.values()].map((one) => ({ ...one, doublings: one.doublings / one.cells, ratio: 2 ** (one.doublings / one.cells) }));
}

const curveOf = (phase, field) => ({
  fields: ["variant", "run", "series", "seq_len", field],
  choose: (rows) => {
    const wanted = family.value; // once: a select looks through all its options
    return rows.filter((row) => row.family === wanted && row.phase === phase && isTimed(row) && row[field] > 0);
  },
  table: () => names("series", "run", "seq_len", field, "case_id"),
  none: `no equal ${phase} cell of this size and kind was measured`,
  say: () => "",
});

const pictures = {
  tradeoffs: {
    fields: ["variant", "run", "series", "setting", "kv_bytes_per_token", "latency_ms", "low_ms", "high_ms", "cut_ms",
      "params", "spot", "front"],
    // On the front is what no cell among those shown beats.
    choose: (rows) => {
      const wanted = setting.value;
      const shown = new Map(rows.filter((row) => row.setting === wanted && isDecode(row)).map((row) => [row.row, row]));
      return page.tradeoffs.filter(({ row }) => shown.has(row)).map((point) =>
        ({ ...shown.get(point.row), ...point, front: !point.beatenBy.some((other) => shown.has(other)) }));
    },
    table: () => names("series", "run", "front", "kv_bytes_per_token", "latency_ms", "low_ms", "high_ms", "params", "case_id"),
    none: "no equal decode cell among the rows shown",
    say: () => "On the dashed front, ringed, nothing is both smaller and faster. Latencies of different cells are timed apart; a whisker far above all points is cut.",
  },
  prefill: curveOf("prefill", "latency_ms"),
  decode: curveOf("decode", "latency_ms"),
  cache: curveOf("decode", "kv_cache_bytes"),
  errors: {
    fields: ["err_budget", "err_drawn", "status"],
    choose: (rows) => {
      const shown = new Set(rows);
      const worst = [];
      for (const row of worstFirst) {
        if (worst.length === DRAWN_AT_MOST) break;
        if (shown.has(row)) worst.push(row);
      }
      return worst;
    },
    table: () => names("case_id", "run", "status", "err_ratio", "max_abs_err", "err_budget", "worst_tensor", "worst_regime"),
    none: "no cell among the rows shown has an error to compare",
    say: (rows, drawn) => {
      const judged = rows.filter(isJudged).length;
      const left = judged > drawn ? `The ${show(drawn)} worst of ${show(judged)} cells are drawn. ` : "";
      const without = rows.length - judged;
      const beyond = rows.filter((row) => isJudged(row) && row.err_ratio > highestDrawn);
      const infinite = beyond.filter((row) => row.err_ratio === Infinity).length;
      const edge = beyond.length ? `${show(beyond.length)} beyond ${highestDrawn.toExponential(0)} N, ${show(infinite)} of ${beyond.length === 1 ? "it" : "them"} infinite, on the upper edge. ` : "";
      return left + edge + (without ? `${show(without)} ${without === 1 ? "cell has" : "cells have"} no error to compare.` : "");
    },
  },
  speed: {
    fields: ["place", "series", "cells", "doublings", "ratio", "smallest", "largest"],
    choose: (rows) => squares(rows.filter((row) => isTimed(row) && row.latency_ratio > 0)),
    table: () => [{ name: "place", kind: "text" }, ...names("series", "ratio", "smallest", "largest", "cells")],
    none: "no equal cell among the rows shown was timed",
    // Room for a number in each square; a narrow screen scrolls the picture in its box.
    least: () => 190 + 44 * distinct(allRows.filter((row) => isTimed(row) && row.latency_ratio > 0), "series").length,
    say: () => "Blue is faster than the reference, orange slower; the colour is full at a factor of 4.",
  },
};

// Only where the page has their places: runs whose kernels are all exact have nothing to show.
const ofLeftOut = (field, none) => ({
  fields: ["kernel", "inputs", "seq_len", "sparsity", "rel_l1", "cosine", "dense_ratio", "dense_ratio_lo", "dense_ratio_hi"],
  choose: (rows) => {
    const shown = new Set(rows.map(({ row }) => row));
    return page.leftOut.filter((entry) => shown.has(entry.row) && entry[field] !== null);
  },
  table: () => [{ name: "kernel", kind: "text" }, { name: "inputs", kind: "text" },
    ...names("run", "seq_len", "sparsity", "rel_l1", "cosine", "dense_ratio", "dense_ratio_lo", "dense_ratio_hi", "case_id")],
  none,
  say: (rows, drawn) => {
    const shown = new Set(rows.map(({ row }) => row));
    const left = page.leftOut.filter((entry) => shown.has(entry.row)).length - drawn;
    return left ? `${show(left)} without a finite value ${left === 1 ? "is" : "are"} not drawn.` : "";
  },
});
if (page.leftOut.length) {
  pictures.sparsity = ofLeftOut("rel_l1", "no approximate cell among the rows shown");
  pictures.gain = ofLeftOut("dense_ratio", "no approximate cell among the rows shown was timed");
}

const isDecode = (row) => row.phase === "decode" && isTimed(row) && measured("latency_ms")(row)
  && measured("kv_bytes_per_token")(row);
const hasCurve = (row) => (row.phase === "decode" || row.phase === "prefill") && isTimed(row) && measured("latency_ms")(row);
const setting = document.getElementById("setting");
const family = document.getElementById("family");

// The settings that the rows shown have, the one with the most to compare first chosen; a choice still there stays.
function offer(select, rows, key, worth) {
  const groups = Map.groupBy ? Map.groupBy(rows, (row) => row[key]) : groupBy(rows, key);
  const options = [...groups.keys()];
  if (options.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const before = select.value;
    select.replaceChildren(...options.map((value) => element("option", { value }, value)));
    const best = options.reduce((a, b) => (a === null || worth(groups.get(b)) > worth(groups.get(a)) ? b : a), null);
    if (best !== null) select.value = options.includes(before) ? before : best;
  }
  select.disabled = options.length < 2;
}

function groupBy(rows, key) {
  const groups = new Map();
  for (const row of rows) groups.set(row[key], [...(groups.get(row[key]) ?? []), row]);
  return groups;
}

function offerSettings(rows) {
  offer(setting, rows.filter(isDecode), "setting", (group) => distinct(group, "series").length * 1e9 + group[0].seq_len);
  offer(family, rows.filter(hasCurve), "family", (group) => distinct(group, "seq_len").length * 1e9 + group.length);
}

// Colours come from the style sheet, so that light and dark are said once.
const probe = document.body.appendChild(element("span", { hidden: true }));
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
function look() {
  const [ink, soft, line] = ["ink", "soft", "line"].map(colour);
  return {
    background: null, font: FONT,
    view: { stroke: null },
    axis: { labelColor: soft, titleColor: soft, gridColor: line, domain: false, ticks: false, labelFontSize: 11,
      titleFontSize: 12, titleFontWeight: 500, labelPadding: 6, titlePadding: 10 },
    axisX: { grid: false, domain: true, domainColor: line },
    legend: { labelColor: ink, labelFontSize: 12, symbolFillColor: soft, symbolStrokeColor: soft },
    text: { color: ink }, line: { color: soft }, rect: { stroke: colour("paper") },
    range: { category: Array.from({ length: 10 }, (_, index) => colour(`c${index}`)),
      diverging: [colour("faster"), colour("even"), colour("slower")] },
  };
}

// A view is made when there is something to draw: Vega warns about scales over nothing.
async function draw(picture, rows) {
  const host = picture.figure.querySelector(".chart");
  const chart = page.charts[picture.figure.dataset.picture];
  if (picture.least) host.style.minWidth = `${picture.least()}px`;
  const spec = { ...chart, description: host.dataset.description, datasets: { ...chart.datasets, rows } };
  // `ast`: expressions are interpreted, never compiled, so that the page may forbid eval.
  const made = await vegaEmbed(host, spec, {
    ast: true, actions: false, defaultStyle: false, renderer: "canvas", tooltip, config: look(),
  });
  picture.view = made.view;
  picture.source = sourceOf(made.vgSpec, `${page.drawn}_marks`);
}

function forgetViews() {
  for (const figure of document.querySelectorAll("[data-picture]")) {
    const picture = pictures[figure.dataset.picture];
    picture.figure = figure;
    picture.view?.finalize();
    picture.view = null;
  }
}

// The name of the data that a mark draws, after all transforms.
function sourceOf(scope, mark) {
  for (const one of scope.marks ?? []) {
    if (one.name === mark) return one.from.data;
    const inside = sourceOf(one, mark);
    if (inside) return inside;
  }
  return null;
}

async function updatePicture(picture, rows) {
  const chosen = picture.choose(rows);
  const { figure } = picture;
  figure.querySelector(".chart").hidden = !chosen.length;
  const empty = figure.querySelector(".empty");
  empty.hidden = chosen.length > 0;
  empty.textContent = `Nothing to draw: ${picture.none}.`;
  figure.querySelector("figcaption").textContent = chosen.length ? picture.say(rows, chosen.length) : "";
  if (chosen.length) {
    const data = chosen.map(pick(picture.fields));
    if (picture.view) await picture.view.data("rows", data).runAsync();
    else await draw(picture, data);
  }
  updateTable(picture);
}

// The picture's own data, each point with the rest of its row. Filled when it is opened: most never are.
function updateTable(picture) {
  const details = picture.figure.querySelector("details");
  details.hidden = picture.figure.querySelector(".chart").hidden;
  if (!details.open || details.hidden || !picture.view) return;
  const shown = picture.view.data(picture.source).map((datum) => (datum.row === undefined ? datum : { ...allRows[datum.row], ...datum }));
  const wanted = picture.table().filter(({ name }) => name !== "run" || columns.some((column) => column.name === "run"));
  const caption = picture.figure.querySelector(".chart").dataset.description;
  picture.dataTable ??= new DataTable(details.querySelector(".its-table"),
    { caption, file: `${picture.figure.dataset.picture}.csv`, search: true });
  picture.dataTable.update(shown, wanted);
}

const bubble = document.getElementById("tooltip");
function tooltip(_handler, event, _item, value) {
  bubble.hidden = value === null || value === undefined || value === "";
  if (bubble.hidden) return;
  const row = value.row === undefined ? value : { ...allRows[value.row], ...value };
  const wanted = value.row === undefined ? pictures.speed.table() : value.inputs === undefined ? tableColumns : pictures.sparsity.table();
  const known = wanted.filter(({ name }) => row[name] !== null && row[name] !== undefined);
  bubble.replaceChildren(element("dl", {}, ...known.flatMap(({ name }) =>
    [element("dt", {}, title(name)), element("dd", {}, show(row[name]))])));
  const [width, height] = [bubble.offsetWidth, bubble.offsetHeight];
  const right = event.clientX + 16 + width < innerWidth;
  bubble.style.left = `${Math.max(8, right ? event.clientX + 16 : event.clientX - width - 16)}px`;
  bubble.style.top = `${Math.max(8, Math.min(event.clientY - height / 2, innerHeight - height - 8))}px`;
}
