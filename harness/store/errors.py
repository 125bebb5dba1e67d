"""What is wrong with a run's folder."""

from harness.errors import BadInput


class StoreError(BadInput):
    """A run folder that cannot be used or read as asked; the message names the file and what to do."""
