"""What is wrong with the input, said in one message: the command line prints it and exits with 2."""


class BadInput(ValueError):
    """Names the thing, its value and the rule it breaks."""


# ----------------------------------------------------------------------------------------------------------------------
# Exit codes of every command.


EQUAL, NOT_EQUAL, BAD_INPUT, BUG = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 130, 143  # 128 and the signal's number, as shells have it


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong with a run's folder.


class StoreError(BadInput):
    """A run folder that cannot be used or read as asked; the message names the file and what to do."""
