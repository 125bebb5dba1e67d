"""report.html: one file that opens offline. Python gives rows, specs and words; the browser filters and draws."""

from harness.report.page.build import build_page
from harness.report.page.run import Run, Sensitivity, read_run, read_sensitivity
from harness.report.page.write import PAGE, missing_packages, write_own_page, write_page

__all__ = [
    "PAGE",
    "Run",
    "Sensitivity",
    "build_page",
    "missing_packages",
    "read_run",
    "read_sensitivity",
    "write_own_page",
    "write_page",
]
