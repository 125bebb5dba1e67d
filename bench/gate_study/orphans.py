"""A process of the study ends with it: one that went on alone would disturb the nights of the study that is resumed."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
INIT = 1


def die_with_parent() -> None:
    """From now on, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == INIT:  # it was gone before
            os._exit(1)
