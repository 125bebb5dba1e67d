"""How long a report of 10,000 cells takes to build, and to answer a filter in a real browser.

python bench/page_speed.py [CELLS]
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from harness.report.page import build_page
from tests.support.page_runs import large_run

BUILD_SECONDS, FILTER_MS, MEGABYTES = 10.0, 200.0, 3.0
PATIENCE_S = 60


def main(cells: int) -> int:
    run = large_run(cells)
    started, busy = time.perf_counter(), time.process_time()
    html = build_page([run])
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    size = len(html.encode()) / 1e6
    print(f"{len(run.frame):,} cells: built in {seconds:.1f} s ({busy:.1f} s of CPU), {size:.2f} MB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(html, encoding="utf-8")
        times = filter_times(path)
    middle = statistics.median(times)
    print(f"a filter answers in {middle:.0f} ms (median of {len(times)}, {min(times):.0f} to {max(times):.0f})")
    return int(not (seconds <= BUILD_SECONDS and middle <= FILTER_MS and size <= MEGABYTES))


def filter_times(path: Path) -> list[float]:
    """From the change of a box until table and all pictures show it, by the browser's own clock."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.get(path.as_uri())
        wait(browser, "return document.body.dataset.ready")
        times = []
        boxes = browser.execute_script("return document.querySelectorAll('.axis input').length")
        for box in range(min(boxes, 8)):
            for _ in range(2):  # off, and on again
                before = browser.execute_script("return document.body.dataset.updates")
                browser.execute_script("document.querySelectorAll('.axis input')[arguments[0]].click()", box)
                wait(browser, f"return document.body.dataset.updates !== '{before}'")
                times.append(float(browser.execute_script("return document.body.dataset.updateMs")))
        return times
    finally:
        browser.quit()


def wait(browser: object, script: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not browser.execute_script(script):  # type: ignore[attr-defined]
        if time.monotonic() > end:
            raise TimeoutError(f"the page did not get there in {PATIENCE_S} s: {script}")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
