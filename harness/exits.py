"""Exit codes of every command."""

EQUAL, NOT_EQUAL, BAD_INPUT, BUG, INTERRUPTED = 0, 1, 2, 3, 130
