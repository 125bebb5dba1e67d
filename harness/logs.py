"""Logging in the form `[LEVEL][MODULE][FUNC] message`, to standard error."""

import logging

FORMAT = "[%(levelname)s][%(module)s][%(funcName)s] %(message)s"


def configure(*, quiet: bool = False, verbose: bool = False) -> None:
    """Warnings by default, errors only when quiet, everything when verbose; safe to call again."""
    logger = logging.getLogger("harness")
    logger.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)
