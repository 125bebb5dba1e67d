"""What people read. Numbers become text only in this package; nothing here imports torch."""

from harness.report.folder import rebuild

__all__ = ["rebuild"]
