"""Files and folders that survive a power cut: written aside and renamed, or made by one run alone."""

import os
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from harness.store.errors import StoreError


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
