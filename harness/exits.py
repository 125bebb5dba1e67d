"""Exit codes of every command."""

EQUAL, NOT_EQUAL, BAD_INPUT, BUG = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 130, 143  # 128 and the signal's number, as shells have it
