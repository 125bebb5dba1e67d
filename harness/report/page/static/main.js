// Ties it together: one change of a filter gives one set of rows, and everything shows those.
const cells = new DataTable(document.getElementById("cells-table"),
  { caption: "All cells under the filters above", file: "cells.csv", keyColumns: page.keyColumns });
const theme = document.getElementById("theme");
const darkWanted = matchMedia("(prefers-color-scheme: dark)");
let turn = 0;
let drawing = Promise.resolve(); // one update after another: two that embed the same picture would leave one behind

function update() { return refresh(() => {}); }

function refresh(prepare) {
  const mine = ++turn;
  const started = performance.now();
  const rows = filtered();
  cells.update(rows, tableColumns);
  offerSettings(rows);
  drawing = drawing.catch(() => {}).then(async () => {
    prepare();
    for (const picture of Object.values(pictures)) {
      if (mine !== turn) return; // a newer change has taken over
      await updatePicture(picture, rows);
    }
    document.body.dataset.updateMs = (performance.now() - started).toFixed(1);
    document.body.dataset.updates = mine;
  });
  return drawing;
}

async function redraw() {
  await refresh(forgetViews);
  document.getElementById("variant-keys").replaceChildren(...distinct(allRows, "variant").map((variant, index) => {
    const dot = element("i", { "aria-hidden": "true" });
    dot.style.background = colour(`c${index % 10}`);
    return element("span", {}, dot, variant);
  }));
}

const isDark = () => (document.documentElement.style.colorScheme || (darkWanted.matches ? "dark" : "light")) === "dark";
function nameTheme() {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-pressed", String(isDark()));
  theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
}
theme.addEventListener("click", () => {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  nameTheme();
  redraw();
});
darkWanted.addEventListener("change", () => { nameTheme(); redraw(); });

for (const select of [setting, family]) select.addEventListener("change", update);
for (const details of document.querySelectorAll("[data-picture] details")) {
  details.addEventListener("toggle", () => updateTable(pictures[details.closest("[data-picture]").dataset.picture]));
}
nameTheme();
buildFilters(update);
redraw().then(() => { document.body.dataset.ready = "true"; });
