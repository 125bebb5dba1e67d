"""Which files a user's kernel is made of: its own, and those of the user's that it imports or names. No torch.

Found by reading, not by running: the imports anywhere in a file, and the sources that it names for a compiler
(`"attention.cpp"`). Installed packages are no part of it: their versions are kept instead.
"""

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
from harness.kernels.names import is_plugin

# What a kernel names for a compiler.
COMPILED = (".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".cuh", ".cl", ".metal", ".mm")
MOST_FILES = 500


@dataclass(frozen=True, slots=True)
class SourceFile:
    """`place` is where it must stand for the kernel to find it, from the folder that holds all of them."""

    place: str
    path: Path
    data: bytes


def sources_of(kernel: str) -> tuple[SourceFile, ...]:
    """Of `file.py:function` or `package.module:function`; the kernel's own file first. Empty where there is none."""
    name = kernel.rpartition(":")[0]
    if not is_plugin(kernel):
        return ()
    if name.endswith(".py"):
        path = Path(name)
        inside = not path.is_absolute() and ".." not in path.parts
        return tuple(_closure(path, path.as_posix() if inside else path.name))
    found = list(_module_files(name, [Path(entry or ".") for entry in sys.path]))
    if not found or not is_local(found[-1][1]):
        return ()
    (*packages, (place, path)) = found
    return (*_closure(path, place), *(SourceFile(at, file, file.read_bytes()) for at, file in packages))


def entry_of(kernel: str, sources: Sequence[str]) -> str:
    """The kernel's name as it is found from the folder in which its sources are stored."""
    place, _, function = kernel.rpartition(":")
    return f"{sources[0]}:{function}" if place.endswith(".py") else kernel


def digest_of(sources: Sequence[SourceFile]) -> str:
    """Of one file its own hash; of several, of all: an edited helper is another kernel."""
    if len(sources) == 1:
        return hashlib.sha256(sources[0].data).hexdigest()
    parts = sorted((Path(each.place).name, hashlib.sha256(each.data).hexdigest()) for each in sources)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _closure(path: Path, place: str) -> Iterator[SourceFile]:
    """The file, and what it needs, each once."""
    seen: set[Path] = set()
    waiting = [(place, path)]
    while waiting and len(seen) < MOST_FILES:
        at, file = waiting.pop(0)
        if (real := file.resolve()) in seen:
            continue
        seen.add(real)
        try:
            data = file.read_bytes()
        except OSError:
            continue
        yield SourceFile(at, file, data)
        domains = file.with_suffix(".domain.yaml")
        if file.suffix == ".py" and domains.is_file():
            waiting.append((Path(at).with_suffix(".domain.yaml").as_posix(), domains))
        if file.suffix == ".py":
            waiting += _needed(data, file, at)


def _needed(data: bytes, file: Path, place: str) -> Iterator[tuple[str, Path]]:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):  # told when it is imported
        return
    beside = Path(place).parent
    roots = [Path(entry or ".") for entry in sys.path]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(COMPILED):
            named = file.parent / node.value
            if named.is_file() and not Path(node.value).is_absolute():
                yield (beside / node.value).as_posix(), named
        for module, level in _imported(node):
            if level:  # `from . import x`, of a package: beside the file, or above it
                above = file.parent.joinpath(*[".."] * (level - 1))
                under = beside.joinpath(*[".."] * (level - 1))
                yield from ((f"{under}/{at}", found) for at, found in _module_files(module, [above]))
                continue
            own = list(_module_files(module, [file.parent]))
            if own:
                yield from (((beside / at).as_posix(), found) for at, found in own)
            else:
                yield from (pair for pair in _module_files(module, roots) if is_local(pair[1]))


def _imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names, and how many dots stand before each. What follows `import` may be a module, too."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, 0) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = f"{node.module}." if node.module else ""
        if node.module:
            yield node.module, node.level
        yield from ((f"{start}{alias.name}", node.level) for alias in node.names if alias.name != "*")


def _module_files(name: str, roots: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """The files of a module and the packages around it, outermost first: place from its root, and path."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] == "harness":
        return
    for root in roots:
        found: list[tuple[str, Path]] = []
        for depth in range(1, len(parts) + 1):
            stem = root.joinpath(*parts[:depth])
            file = next((f for f in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if f.is_file()), None)
            if file is not None:
                found.append((file.relative_to(root).as_posix(), file))
            elif not stem.is_dir():
                break
        if found:
            yield from found
            return


INSTALLED = ("site-packages", "dist-packages")


def is_local(path: Path) -> bool:
    """The user's own: neither installed nor Python's nor this package's."""
    real = path.resolve()
    return not any(name in real.parts for name in INSTALLED) and not any(map(real.is_relative_to, _foreign_folders()))


@functools.cache
def _foreign_folders() -> tuple[Path, ...]:
    known = sysconfig.get_paths()
    return tuple(Path(name).resolve() for name in (known["stdlib"], known["platstdlib"], Path(harness.__file__).parent))
