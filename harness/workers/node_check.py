"""Is a node of a cluster like the machine that asks: same code, same versions, same plugin files?"""

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.errors import BadInput
from harness.kernels.names import is_plugin
from harness.store import code_sha256


@dataclass(frozen=True)
class Home:
    """The asking machine: where it looks for a user's code, and what a node must have as well before it may work."""

    folder: str
    path: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]  # a plugin's path as it was named, and its content


def describe_home(kernels: Iterable[str]) -> Home:
    places = dict.fromkeys(kernel.rpartition(":")[0] for kernel in kernels if is_plugin(kernel))
    files = tuple((place, content(place)) for place in places if place.endswith(".py"))
    return Home(os.getcwd(), tuple(sys.path), versions(), files)


def versions() -> tuple[tuple[str, str], ...]:
    packages = tuple((name, metadata.version(name)) for name in ("torch", "numpy"))
    return (("python", platform.python_version()), *packages, ("harness's source", f"sha256:{code_sha256()[:16]}"))


def content(place: str) -> str:
    try:
        return f"sha256:{hashlib.sha256(Path(place).read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


@functools.cache  # once per process: a node's files are not read again for every case
def settle(home: Home) -> None:
    """Import from where the asking machine does, then compare with it; BadInput names all that differs."""
    if os.path.isdir(home.folder):
        os.chdir(home.folder)  # if it is not there, only a plugin with a relative path misses it, and is named below
    sys.path[:] = [*home.path, *(entry for entry in sys.path if entry not in home.path)]
    asked = home.versions + home.files
    found = versions() + tuple((place, content(place)) for place, _ in home.files)
    unlike = [
        f"{name} is {there} there and {here} here"
        for (name, here), (_, there) in zip(asked, found, strict=True)
        if here != there
    ]
    if unlike:
        raise BadInput(f"unlike this machine: {'; '.join(unlike)} (looked for in {os.getcwd()})")
