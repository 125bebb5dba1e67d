"""One writer a folder. The kernel frees the lock when its owner dies, however that happens."""

import fcntl
import os
import shlex
import socket
import sys
import weakref
from datetime import UTC, datetime
from pathlib import Path

from harness.store.errors import StoreError

LOCK = "run.lock"


class Lock:
    """Held from `Lock(folder)` to `release()`, or until the object or its process is gone."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / LOCK
        handle = _acquire(self.path)
        self._release = weakref.finalize(self, _release, self.path, handle, os.getpid())
        os.ftruncate(handle, 0)
        os.write(handle, _owner().encode(errors="backslashreplace"))

    def release(self) -> None:
        self._release()


def _acquire(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(path, handle):
                return handle
        except BlockingIOError:
            owner = os.pread(handle, 2000, 0).decode(errors="replace").strip() or "a process that is just starting"
            os.close(handle)
            raise StoreError(f"{path.parent} is in use by another run: {owner}") from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner removed the file while we opened it: that was a lock on nothing


def _same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _release(path: Path, handle: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends must not remove its parent's lock
        path.unlink(missing_ok=True)
    os.close(handle)


def _owner() -> str:
    started = datetime.now(UTC)
    return (
        f"pid {os.getpid()} on {socket.gethostname()}, since {started:%Y-%m-%d %H:%M:%S} UTC: {shlex.join(sys.argv)}\n"
    )
