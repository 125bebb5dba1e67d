"""report.html: one file that opens offline. Python gives rows, specs and words; the browser filters and draws."""

from harness.report.page.build import (
    build_page,
    missing_packages,
    refuse_without_packages,
    write_own_page,
    write_page,
)
from harness.report.page.run import StoredRun, read_run

__all__ = [
    "StoredRun",
    "build_page",
    "missing_packages",
    "read_run",
    "refuse_without_packages",
    "write_own_page",
    "write_page",
]
