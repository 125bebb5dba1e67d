"""What a run is of: its config, manifest and environment; and whether two of them may share a table."""

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from harness.environment import Environment
from harness.job import content_of
from harness.store.errors import StoreError
from harness.store.files import write_atomically
from harness.store.manifest import MANIFEST, Manifest, read_whole, write_manifest

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
# Numbers may move with these; memory, the commit and pandas move none.
COMPARED = ("python", "torch", "numpy", "platform", "cpu", "threads")


@dataclass(frozen=True, slots=True)
class About:
    manifest: Manifest
    config: str
    environment: Environment

    def write(self, folder: Path) -> None:
        """run.json alone decides; after a kill between these lines, `write_copies` makes the others follow it."""
        write_manifest(folder, self.manifest, self.config, self.environment)
        self.write_copies(folder)

    def write_copies(self, folder: Path) -> None:
        """For readers: the config and the environment as files of their own."""
        for name, text in ((CONFIG, self.config), (ENVIRONMENT, self.environment.to_json())):
            path = Path(folder) / name
            if not path.exists() or path.read_bytes() != text.encode():
                write_atomically(path, text.encode())

    @classmethod
    def read(cls, folder: Path) -> "About":
        if not Path(folder).is_dir():
            raise StoreError(f"{folder} is not a folder, so not a run's")
        found = read_whole(folder)
        if found is None:
            raise StoreError(f"{folder} has no {MANIFEST}, so what it is a run of is not known; start a new one")
        return cls(*found)


def differences(before: About, after: About) -> list[str]:
    """All that may move a number, each with both values; cells are compared by the caller."""
    old, new = before.manifest, after.manifest
    found = []
    if before.config != after.config:
        found.append(f"config: {_first_change(before.config, after.config)}")
    for name in ("suite", "seed", "code"):
        if (a := getattr(old, name)) != (b := getattr(new, name)):
            found.append(f"{name}: {_short(a)} -> {_short(b)}")
    for kernel in sorted(old.kernels.keys() & new.kernels.keys()):
        a, b = old.kernels[kernel], new.kernels[kernel]
        if content_of(a) != content_of(b):
            found.append(f"kernel {kernel}: {a} -> {b}")
    changed = before.environment.differences(after.environment)
    found += [f"{key}: {changed[key][0]} -> {changed[key][1]}" for key in COMPARED if key in changed]
    return found


def _first_change(before: str, after: str) -> str:
    """Of two texts that differ: the first line that does."""
    pairs = zip_longest(before.splitlines(keepends=True), after.splitlines(keepends=True))
    number, (a, b) = next((at, pair) for at, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    return f"line {number}: {_quoted(a)} -> {_quoted(b)}"


def _quoted(line: str | None) -> str:
    return "nothing" if line is None else repr(line.removesuffix("\n"))


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def write_config(folder: Path, text: str) -> None:
    write_atomically(Path(folder) / CONFIG, text.encode())


def write_environment(folder: Path, environment: Environment) -> None:
    write_atomically(Path(folder) / ENVIRONMENT, environment.to_json().encode())


def read_environment(folder: Path) -> Environment:
    path = Path(folder) / ENVIRONMENT
    try:
        return Environment.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist") from None
    except ValueError as error:
        raise StoreError(f"{path}: {error}") from error
