"""Bad input, said in one message, and the exit codes of every command: 2 is for bad input."""

EQUAL, NOT_EQUAL, BAD_INPUT, BUG = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 130, 143  # 128 and the signal's number, as shells have it


class BadInput(ValueError):
    """Names the thing, its value and the rule it breaks; the command line prints it and exits with 2."""


class StoreError(BadInput):
    """A run folder that cannot be used or read as asked; the message names the file and what to do."""
