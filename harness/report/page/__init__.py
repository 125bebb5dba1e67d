"""report.html: one file that opens offline. Python gives rows, specs and words; the browser filters and draws."""

from harness.report.page.build import PAGE, build_page, missing_packages, write_own_page, write_page
from harness.report.page.run import Sensitivity, StoredRun, read_run, read_sensitivity

__all__ = [
    "PAGE",
    "Sensitivity",
    "StoredRun",
    "build_page",
    "missing_packages",
    "read_run",
    "read_sensitivity",
    "write_own_page",
    "write_page",
]
