// The embedded table as rows: one object a cell, its values as the record has them; null where nothing was measured.
const page = JSON.parse(document.getElementById("data").textContent);

// JSON has no infinity: it travels as a word.
const number = (value) => (typeof value === "string" ? (value === "inf" ? Infinity : -Infinity) : value);

function valuesOf({ kind, words, values, constant }) {
  const read = kind === "number" ? number : (value) => value;
  if (values === undefined) return Array(page.length).fill(read(constant));
  return words ? values.map((index) => read(words[index])) : values.map(read);
}

const columns = page.columns.map(({ name, kind }) => ({ name, kind }));
const allRows = Array.from({ length: page.length }, (_, row) => ({ row }));
for (const column of page.columns) {
  valuesOf(column).forEach((value, index) => { allRows[index][column.name] = value; });
}
const tableColumns = columns.filter(({ name }) => !page.derived.includes(name));
const searched = tableColumns.filter(({ kind }) => kind === "text");
for (const row of allRows) {
  row.run ??= "";
  row.place = `${row.phase} · ${row.mask}`;
  row.text = searched.map(({ name }) => row[name] ?? "").join("\n").toLowerCase();
}

const isEqual = (row) => row.status === "ok" || row.status === "degraded";
// What others disturbed while it was timed is no measurement: the table has it, with its mark, and no picture.
const isTimed = (row) => isEqual(row) && row.timing !== "disturbed";
const distinct = (rows, name) => [...new Set(rows.map((row) => row[name]))].filter((value) => value !== null);

function compare(a, b) {
  // What was not measured comes last in either direction; the caller turns the rest around.
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0;
}

function show(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// An element with text and attributes: text is never markup here.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
