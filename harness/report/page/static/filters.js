// One set of filters for all pictures and the table of cells: boxes by axis, and words that must occur.
const form = document.getElementById("filters");
const chosen = new Map(); // axis -> the values left unticked
const words = element("input", { type: "search", id: "words", placeholder: "any words, e.g. mla causal", autocomplete: "off" });
const shownCount = element("output", { id: "shown", for: "words" });

function buildFilters(changed) {
  const menus = page.axes.filter((axis) => columns.some(({ name }) => name === axis)).flatMap((axis) => {
    const values = distinct(allRows, axis).sort(compare);
    return values.length > 1 ? [menu(axis, values, changed)] : [];
  });
  const reset = element("button", { type: "reset" }, "Reset");
  form.append(element("label", { class: "words", for: "words" }, "Find", words), ...menus, reset, shownCount);
  form.hidden = false;
  words.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    chosen.clear();
    setTimeout(() => { form.querySelectorAll("details").forEach(label); changed(); }); // after the boxes are ticked again
  });
  // A menu closes on Escape, and when another place is used.
  form.addEventListener("keydown", (event) => {
    const open = event.key === "Escape" && event.target.closest("details[open]");
    if (open) { open.open = false; open.querySelector("summary").focus(); }
  });
  document.addEventListener("click", (event) => {
    for (const open of form.querySelectorAll("details[open]")) if (!open.contains(event.target)) open.open = false;
  });
}

function menu(axis, values, changed) {
  const list = element("fieldset", {}, element("legend", {}, `Show ${title(axis)}`));
  const details = element("details", { class: "axis", "data-axis": axis }, element("summary"), list);
  for (const value of values) {
    const box = element("input", { type: "checkbox", checked: true, "data-value": String(value) });
    box.addEventListener("change", () => {
      const off = chosen.get(axis) ?? new Set();
      if (box.checked) off.delete(value); else off.add(value);
      if (off.size) chosen.set(axis, off); else chosen.delete(axis);
      label(details);
      changed();
    });
    // This value alone.
    const only = element("button", { type: "button", class: "only", "aria-label": `Only ${title(axis)} ${show(value)}` }, "only");
    only.addEventListener("click", () => {
      chosen.set(axis, new Set(values.filter((other) => other !== value)));
      list.querySelectorAll("input").forEach((other) => { other.checked = other === box; });
      label(details);
      changed();
    });
    list.append(element("div", {}, element("label", {}, box, String(value)), only));
  }
  details.values = values;
  label(details);
  return details;
}

function label(details) {
  const off = chosen.get(details.dataset.axis)?.size ?? 0;
  const on = details.values.length - off;
  const state = off ? `${on} of ${details.values.length}` : "all";
  details.querySelector("summary").replaceChildren(title(details.dataset.axis), " ", element("span", {}, state));
  details.classList.toggle("active", off > 0);
}

function filtered() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  const limits = [...chosen];
  const rows = allRows.filter((row) => limits.every(([axis, off]) => !off.has(row[axis]))
    && wanted.every((word) => row.text.includes(word)));
  shownCount.textContent = `${show(rows.length)} of ${show(allRows.length)} cells`;
  return rows;
}
