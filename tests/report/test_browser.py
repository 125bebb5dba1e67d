"""report.html in a real browser: opened from file://, offline, by mouse and keyboard, in both widths and themes."""

import base64
import csv
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.report.page import build_page
from tests.support.page_runs import HOSTILE, hostile_run, large_run, small_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PICTURES = ("tradeoffs", "prefill", "decode", "cache", "errors", "speed")
SECONDS = 60  # a busy machine; nothing here is timed


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Chrome]":
    binary = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        reason = "no Chromium with its chromedriver (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    downloads = str(tmp_path_factory.mktemp("downloads"))
    options.add_experimental_option("prefs", {"download.default_directory": downloads})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_script_timeout(SECONDS)
    chrome.downloads = Path(downloads)  # type: ignore[attr-defined]
    yield chrome
    chrome.quit()


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)
    return value


def ask(browser: "Chrome", script: str, *arguments: Any) -> Any:
    return browser.execute_script(f"return ({script})", *arguments)


def open_page(browser: "Chrome", path: Path) -> None:
    browser.get(path.as_uri())
    until(lambda: ask(browser, "document.body.dataset.ready"))


def act(browser: "Chrome", script: str, *arguments: Any) -> None:
    """Does something that changes what is shown, and waits until all of it is."""
    before = ask(browser, "Number(document.body.dataset.updates)")
    browser.execute_script(script, *arguments)
    until(lambda: ask(browser, "Number(document.body.dataset.updates)") > before)


def set_width(browser: "Chrome", width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def set_scheme(browser: "Chrome", scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture(scope="module")
def opened(browser: "Chrome", tmp_path_factory: pytest.TempPathFactory) -> "Chrome":
    """The small run's page, loaded once; what it logged and asked the network for is kept."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(build_page([small_run()]), encoding="utf-8")
    set_scheme(browser, "light")
    browser.get_log("performance")
    open_page(browser, path)
    browser.logged = browser.get_log("browser")  # type: ignore[attr-defined]
    browser.requests = [  # type: ignore[attr-defined]
        entry["message"]
        for entry in browser.get_log("performance")
        if '"Network.requestWillBeSent"' in entry["message"]
    ]
    return browser


@pytest.fixture
def page(opened: "Chrome") -> "Chrome":
    """As it was when opened."""
    set_width(opened, 1280)
    if ask(opened, "document.getElementById('shown').textContent !== '22 of 22 cells'"):
        act(opened, "document.querySelector('#filters [type=reset]').click()")
    return opened


def cells(page: "Chrome", name: str) -> list[str]:
    """A column of the table of cells, as it is shown."""
    script = """((name) => {
      const table = document.querySelector("#cells-table table");
      const heads = [...table.tHead.rows[0].cells].map((cell) => cell.querySelector("button").dataset.column);
      const at = heads.indexOf(name);
      return [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
    })(arguments[0])"""
    return list(ask(page, script, name))


def tick(page: "Chrome", axis: str, value: str) -> None:
    act(page, "document.querySelector(arguments[0]).click()", f'[data-axis={axis}] [data-value="{value}"]')


def test_opens_offline_without_a_word_in_the_console(page: "Chrome") -> None:
    assert page.logged == []  # type: ignore[attr-defined]
    asked = page.requests  # type: ignore[attr-defined]
    assert len(asked) == 1, asked  # the file itself
    assert "file:///" in asked[0]


def test_every_picture_is_drawn(page: "Chrome") -> None:
    for name in PICTURES:
        colours = ask(page, """((name) => {
          const canvas = document.querySelector(`[data-picture=${name}] canvas`);
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(new Uint32Array(data.buffer)).size;
        })(arguments[0])""", name)  # fmt: skip
        assert colours > 10, name


def test_a_filter_reaches_the_table_and_every_picture(page: "Chrome") -> None:
    open_tables(page)
    tick(page, "variant", "mha")
    assert ask(page, "document.getElementById('shown').textContent") == "14 of 22 cells"
    assert len(cells(page, "case_id")) == 14
    assert not any(cell.startswith("mha") for cell in cells(page, "case_id"))
    for name in PICTURES:
        text = ask(page, "document.querySelector(`[data-picture=${arguments[0]}] tbody`).innerText", name)
        assert "gqa" in text
        assert "mha" not in text, name


def open_tables(page: "Chrome") -> None:
    page.execute_script("document.querySelectorAll('[data-picture] details').forEach((one) => { one.open = true; })")
    until(lambda: ask(page, "document.querySelectorAll('[data-picture] tbody').length") == len(PICTURES))


def test_words_filter_and_nothing_left_is_said(page: "Chrome") -> None:
    type_words = (
        "const w = document.getElementById('words'); w.value = arguments[0]; w.dispatchEvent(new Event('input'));"
    )
    act(page, type_words, "gqa DECODE l512")
    assert cells(page, "case_id") == ["gqa-e256-l512-b1-causal-decode-float32-eager"]
    act(page, type_words, "no such mask")  # a message, not a name
    assert cells(page, "status") == ["error"]
    act(page, type_words, "nothing has this")
    assert cells(page, "case_id") == []
    shown = ask(page, "[...document.querySelectorAll('.picture .empty')].filter((one) => !one.hidden).length")
    assert shown == len(PICTURES)
    assert [entry for entry in page.get_log("browser")] == []  # noqa: C416


def test_sorting_by_keyboard_says_its_direction(page: "Chrome") -> None:
    from selenium.webdriver.common.keys import Keys

    heading = "document.querySelector('#cells-table [data-column=err_ratio]')"
    page.execute_script(f"{heading}.focus()")
    for direction, ends in (("ascending", ["0.628", "inf"]), ("descending", ["inf", "0.628"])):
        page.switch_to.active_element.send_keys(Keys.ENTER)
        assert ask(page, f"{heading}.closest('th').getAttribute('aria-sort')") == direction
        assert ask(page, f"document.activeElement === {heading}")
        column = cells(page, "err_ratio")
        assert column[-1] == "–"  # not measured: last in either direction
        assert [column[0], column[-2]] == ends


def test_the_front_is_what_nothing_beats(page: "Chrome") -> None:
    """mqa keeps least and is fastest here: it alone is on the front. Once a filter has hidden it, gqa is."""
    open_tables(page)

    def front() -> dict[str, str]:
        rows = ask(page, "document.querySelector('[data-picture=tradeoffs] tbody').innerText").splitlines()
        return {row.split("\t")[0]: row.split("\t")[1] for row in rows}

    assert front() == {"mha": "no", "gqa": "no", "mqa": "yes"}
    tick(page, "variant", "mqa")
    assert front() == {"mha": "no", "gqa": "yes"}


def test_errors_beyond_the_picture_stand_on_its_edge(page: "Chrome") -> None:
    caption = ask(page, "document.querySelector('[data-picture=errors] figcaption').textContent")
    assert caption == "1 beyond 5e+2 N, 1 of it infinite, on the upper edge. 1 cell has no error to compare."
    open_tables(page)
    rows = ask(page, "document.querySelector('[data-picture=errors] tbody').innerText").splitlines()
    assert [row for row in rows if "\tinf\t" in row and row.startswith("mqa")]  # among the points drawn


def test_squares_keep_room_for_their_numbers(page: "Chrome") -> None:
    set_width(page, 390)
    until(lambda: ask(page, "innerWidth") == 390)
    width = ask(page, "parseFloat(document.querySelector('[data-picture=speed] .chart').style.minWidth)")
    assert width == 190 + 3 * 44  # three variants
    last = "[...document.querySelectorAll('#verdict table.plain')][0].rows[1].cells[2]"
    assert ask(page, f"{last}.getBoundingClientRect().width") >= 320


def test_csv_holds_what_is_shown(page: "Chrome") -> None:
    tick(page, "status", "ok")
    every = "document.querySelector('#cells-table .toggle input').click()"
    page.execute_script(every)
    page.execute_script("document.querySelector('#cells-table .csv').click()")
    page.execute_script(every)
    file = page.downloads / "cells.csv"  # type: ignore[attr-defined]
    until(file.exists)
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
    assert [row["case_id"] for row in rows] == cells(page, "case_id")
    assert [row["err_ratio"] for row in rows if row["status"] == "mismatch"] in (["240", "inf"], ["inf", "240"])
    assert [row["error"] for row in rows if row["status"] == "error"] == ["ValueError: no such mask"]
    assert {row["bias"] for row in rows} == {"True"}  # as pandas reads it
    assert ask(page, "document.querySelector('#cells-table td.long div').title") in ("–", "ValueError: no such mask")


def test_hovering_shows_the_whole_row(page: "Chrome") -> None:
    canvas = "document.querySelector('[data-picture=tradeoffs] canvas')"
    page.execute_script(f"{canvas}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = ask(page, f"{canvas}.getBoundingClientRect().toJSON()")

    def hovered(across: float, down: float) -> str:
        place = {"type": "mouseMoved", "x": box["x"] + box["width"] * across, "y": box["y"] + box["height"] * down}
        page.execute_cdp_cmd("Input.dispatchMouseEvent", place)
        return str(ask(page, "document.getElementById('tooltip').innerText"))

    # A point lies somewhere: the mouse goes over the picture until it is on one.
    places = ((x / 60, y / 40) for y in range(40) for x in range(60))
    text = next((text for place in places if "err budget" in (text := hovered(*place))), "")
    for name in ("case id", "kv cache bytes", "latency ms", "err ratio", "params"):
        assert name in text


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_horizontal_scroll(page: "Chrome", width: int, scheme: str) -> None:
    if ask(page, "getComputedStyle(document.body).backgroundColor") != BACKGROUND[scheme]:
        act(page, "document.getElementById('theme').click()")
    assert ask(page, "getComputedStyle(document.body).backgroundColor") == BACKGROUND[scheme]
    open_tables(page)
    set_width(page, width)
    until(lambda: ask(page, "innerWidth") == width)
    until(
        lambda: (
            ask(page, "document.querySelector('[data-picture=errors] canvas').getBoundingClientRect().right") <= width
        )
    )
    assert ask(page, "document.documentElement.scrollWidth") <= width
    assert ask(page, "document.querySelector('#cells-table .scroll').scrollWidth") > 300  # it scrolls inside


BACKGROUND = {"light": "rgb(253, 253, 252)", "dark": "rgb(21, 24, 28)"}


def test_readable_without_eyes_and_without_a_mouse(page: "Chrome") -> None:
    assert ask(page, "[...document.querySelectorAll('table')].every((one) => one.caption?.textContent)")
    assert ask(page, "[...document.querySelectorAll('.scroll')].every((one) => one.tabIndex === 0 && one.ariaLabel)")
    labels = ask(page, "[...document.querySelectorAll('.chart')].map((one) => one.getAttribute('aria-label'))")
    assert all(labels)
    assert len(set(labels)) == len(PICTURES)
    silent = (
        "[...document.querySelectorAll('button')].filter((one) => one.offsetParent && !one.innerText && !one.ariaLabel)"
    )
    assert ask(page, f"{silent}.length") == 0
    unnamed = "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length && !one.ariaLabel)"
    assert ask(page, f"{unnamed}.length") == 0


def test_several_settings_can_be_chosen(page: "Chrome") -> None:
    assert ask(page, "document.getElementById('setting').value") == "E 256 · H 8 · S 512 · B 1 · float32 · causal"
    act(page, "const s = document.getElementById('setting'); s.value = 'E 256 · H 8 · S 128 · B 1 · float32 · causal';"
              "s.dispatchEvent(new Event('change'))")  # fmt: skip
    open_tables(page)
    assert "l128" in ask(page, "document.querySelector('[data-picture=tradeoffs] tbody').innerText")


def test_hostile_text_is_shown_and_never_run(browser: "Chrome", tmp_path: Path, page: "Chrome") -> None:
    home = browser.current_url
    path = tmp_path / "report.html"
    path.write_text(build_page([hostile_run()]), encoding="utf-8")
    open_page(browser, path)
    text = ask(browser, "document.querySelector('#cells-table tbody').textContent")
    for hostile in HOSTILE:
        assert hostile in text
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    until(lambda: ask(browser, "document.querySelectorAll('[data-picture] tbody').length") > 0)
    assert ask(browser, "window.hacked === undefined")
    assert (
        ask(browser, "document.querySelectorAll('img, script:not([type])').length") == 2
    )  # the page's own two scripts
    assert browser.get_log("browser") == []
    # The flag can be seen at all: without the page's policy and escaping it would have been set.
    bare = "data:text/html;base64," + base64.b64encode(HOSTILE[0].encode()).decode()
    browser.get(bare)
    assert ask(browser, "window.hacked") == 1
    open_page(browser, Path(home.removeprefix("file://")))


def test_more_cells_than_are_drawn(browser: "Chrome", tmp_path: Path, page: "Chrome") -> None:
    """bench/page_speed.py measures how fast ten thousand are."""
    home = browser.current_url
    path = tmp_path / "report.html"
    path.write_text(build_page([large_run(2000)]), encoding="utf-8")
    open_page(browser, path)
    assert ask(browser, "document.getElementById('shown').textContent") == "2,000 of 2,000 cells"
    assert len(cells(browser, "case_id")) == 100
    assert "The 1,000 worst of 2,000 cells are drawn." in ask(
        browser, "document.querySelector('[data-picture=errors] figcaption').textContent"
    )
    pager = "document.querySelector('#cells-table .pager')"
    browser.execute_script(f"{pager}.querySelector('button:last-child').focus()")
    for _ in range(19):  # by keyboard: the button is made anew and keeps the focus
        browser.execute_script("document.activeElement.click()")
    assert "page 20 of 20" in ask(browser, f"{pager}.textContent")
    assert ask(browser, "document.activeElement.textContent") == "Previous"  # there is no next one
    open_page(browser, Path(home.removeprefix("file://")))


def test_what_was_left_out_is_drawn_and_filtered(browser: "Chrome", tmp_path: Path, page: "Chrome") -> None:
    from tests.report.test_page import approximate_run

    home = browser.current_url
    path = tmp_path / "report.html"
    path.write_text(build_page([approximate_run()]), encoding="utf-8")
    open_page(browser, path)
    browser.execute_script("document.querySelectorAll('#left-out details').forEach((one) => { one.open = true; })")
    table = "document.querySelector('[data-picture=sparsity] tbody')"
    until(lambda: ask(browser, table))
    for name, drawn in (("sparsity", 5), ("gain", 3)):
        assert ask(browser, "!document.querySelector(`[data-picture=${arguments[0]}] canvas`).hidden", name)
        assert ask(browser, "document.querySelector(`[data-picture=${arguments[0]}] tbody`).rows.length", name) == drawn
        assert ask(browser, "document.querySelector(`[data-picture=${arguments[0]}] .chart`).ariaLabel", name)
    caption = "document.querySelector('[data-picture=sparsity] figcaption').textContent"
    assert ask(browser, caption) == "1 without a finite value is not drawn."
    tick(browser, "kernel", "sparse?topk=0.5")
    assert ask(browser, f"{table}.rows.length") == 1
    assert "sparse_window?window=64" in ask(browser, f"{table}.innerText")
    assert ask(browser, "document.querySelector('#left-out .scroll').tabIndex") == 0
    assert browser.get_log("browser") == []
    open_page(browser, Path(home.removeprefix("file://")))
