"""Files and folders that survive a power cut: written aside and renamed, or made by one run alone.

A folder has one writer, who holds its lock; the kernel frees that when its owner dies, however that happens.
"""

import errno
import fcntl
import os
import re
import shlex
import socket
import stat
import sys
import tempfile
import weakref
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import StoreError

LOCK = "run.lock"


def slug(name: str) -> str:
    """A suite's name as a file name: it can neither leave the folder nor hide."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, whenever the power fails."""
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600, which a CI's artifact step may not read
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file it was
        raise
    sync_folder(path.parent)


def read_regular(path: Path) -> bytes:
    """Of a folder that somebody may have sent: a named pipe would block for ever, a device may never end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise StoreError(f"{path} is not a regular file")
        return file.read()


def make_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file; --out needs a folder")
    path.mkdir(parents=True, exist_ok=True)


def claim(path: Path, records: str) -> None:
    """Makes the folder if need be, and its records file: of two runs started at once, one is refused."""
    make_folder(path)
    try:
        (path / records).open("xb").close()
    except FileExistsError:
        raise StoreError(f"{path} already holds {records} of another run; give another --out or move it") from None


def new_folder(root: Path, name: str) -> Path:
    """A folder of this second, which nobody else has."""
    stamp = f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    root.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = root / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:  # another run of this second
            attempt += 1


def point(link: Path, target: str) -> None:
    # Relative, so that the results folder can be moved; made aside and renamed, so that it always points somewhere.
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """Held from `Lock(folder)` to `release()`, or until the object or its process is gone."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / LOCK
        handle = _acquire(self.path)
        self.release = weakref.finalize(self, _release, self.path, handle, os.getpid())
        os.ftruncate(handle, 0)
        owner = f"pid {os.getpid()} on {socket.gethostname()}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        os.write(handle, f"{owner}: {shlex.join(sys.argv)}\n".encode(errors="backslashreplace"))


def _acquire(path: Path) -> int:
    while True:
        try:  # what is written here must not land in another file, to which somebody's link leads
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StoreError(f"{path} is a link, and a run's own never is; remove it") from None
            raise
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise StoreError(f"{path} is another file, too, or none; a run's own never is; remove it")
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
