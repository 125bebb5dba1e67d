// A table that sorts, pages and exports; the table of all cells and the table of each picture are such tables.
const PAGE = 100;

class DataTable {
  constructor(host, { caption, file, search = false, keyColumns = null }) {
    Object.assign(this, { host, caption, file, keyColumns, rows: [], columns: [], sorted: null, down: false, at: 0 });
    this.all = keyColumns === null;
    this.words = "";
    this.count = element("p", { class: "count", role: "status" });
    const exporter = element("button", { type: "button", class: "csv", onclick: () => this.download() }, "Download CSV");
    const tools = element("div", { class: "tools" }, this.count);
    if (search) {
      const input = element("input", { type: "search", placeholder: "filter these rows", "aria-label": `Filter: ${caption}` });
      input.addEventListener("input", () => { this.words = input.value.toLowerCase(); this.at = 0; this.render(); });
      tools.append(input);
    }
    if (keyColumns) {
      const box = element("input", { type: "checkbox", onchange: () => { this.all = box.checked; this.render(); } });
      tools.append(element("label", { class: "toggle" }, box, "all columns"));
    }
    tools.append(exporter);
    this.head = element("thead");
    this.body = element("tbody");
    this.pager = element("div", { class: "pager" });
    const table = element("table", {}, element("caption", {}, caption), this.head, this.body);
    const box = element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": caption }, table);
    host.replaceChildren(tools, box, this.pager);
  }

  update(rows, columns) {
    this.rows = rows;
    this.columns = columns;
    this.at = 0;
    this.render();
  }

  shownColumns() {
    if (this.all) return this.columns;
    const byName = new Map(this.columns.map((column) => [column.name, column]));
    return this.keyColumns.filter((name) => byName.has(name)).map((name) => byName.get(name));
  }

  shownRows() {
    const words = this.words.split(/\s+/).filter(Boolean);
    const text = (row) => this.columns.map(({ name }) => show(row[name])).join("\n").toLowerCase();
    const rows = words.length ? this.rows.filter((row) => words.every((word) => text(row).includes(word))) : this.rows;
    if (this.sorted === null) return rows;
    const name = this.sorted;
    const known = rows.filter((row) => row[name] !== null && row[name] !== undefined);
    const unknown = rows.filter((row) => row[name] === null || row[name] === undefined);
    known.sort((a, b) => (this.down ? compare(b[name], a[name]) : compare(a[name], b[name])));
    return [...known, ...unknown];
  }

  sortBy(name) {
    [this.sorted, this.down] = [name, this.sorted === name ? !this.down : false];
    this.at = 0;
    this.render();
    this.head.querySelector(`[data-column="${CSS.escape(name)}"]`).focus();
  }

  render() {
    const columns = this.shownColumns();
    const rows = this.shownRows();
    const last = Math.max(0, Math.ceil(rows.length / PAGE) - 1);
    this.at = Math.min(this.at, last);
    const direction = (name) => (this.sorted !== name ? "none" : this.down ? "descending" : "ascending");
    this.head.replaceChildren(element("tr", {}, ...columns.map(({ name, kind }) =>
      element("th", { scope: "col", "aria-sort": direction(name), class: kind === "number" ? "number" : "" },
        element("button", { type: "button", "data-column": name, onclick: () => this.sortBy(name) }, title(name))))));
    this.body.replaceChildren(...rows.slice(this.at * PAGE, (this.at + 1) * PAGE).map((row) => {
      const line = document.createElement("tr");
      for (const { name, kind } of columns) {
        const cell = line.insertCell();
        const text = show(row[name]);
        if (name === "error") cell.append(element("div", { title: text }, text)); // two lines of it; all when pointed at
        else cell.textContent = text;
        if (kind === "number") cell.className = "number";
        else if (name === "status") cell.className = `status status-${row[name]}`;
        else if (name === "error") cell.className = "long";
      }
      return line;
    }));
    this.count.textContent = `${show(rows.length)} ${rows.length === 1 ? "row" : "rows"}`;
    const step = (by) => () => { this.at += by; this.render(); this.focusPager(by); };
    const button = (word, by, off) => element("button", { type: "button", onclick: step(by), disabled: off }, word);
    this.pager.hidden = last === 0;
    this.pager.replaceChildren(button("Previous", -1, this.at === 0), `page ${this.at + 1} of ${last + 1}`,
      button("Next", 1, this.at === last));
  }

  // The buttons are made anew: the one just used keeps the focus, or at either end the other one.
  focusPager(by) {
    const [previous, next] = this.pager.querySelectorAll("button");
    const [used, other] = by > 0 ? [next, previous] : [previous, next];
    (used.disabled ? other : used).focus();
  }

  csv() {
    const columns = this.shownColumns().map(({ name }) => name);
    const lines = this.shownRows().map((row) => columns.map((name) => csvCell(row[name])).join(","));
    return [columns.map(csvCell).join(","), ...lines].join("\r\n") + "\r\n";
  }

  download() {
    const link = element("a", { href: URL.createObjectURL(new Blob([this.csv()], { type: "text/csv" })), download: this.file });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}

// A spreadsheet runs a cell that begins with one of these: an apostrophe keeps a kernel's message a message.
const FORMULA = /^[=+\-@\t\r]/;

function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "True" : "False"; // as in results.csv
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : value > 0 ? "inf" : "-inf";
  const text = FORMULA.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const title = (name) => name.replaceAll("_", " ");
