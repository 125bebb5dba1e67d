"""What a run is of: its config, manifest and environment; and whether two of them may share a table."""

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from harness.environment import Environment
from harness.store.errors import StoreError
from harness.store.files import write_atomically
from harness.store.manifest import MANIFEST, Manifest, read_manifest, sha256, write_manifest

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
# Numbers may move with these; memory, the commit and pandas move none.
COMPARED = ("python", "torch", "numpy", "platform", "cpu", "threads")


@dataclass(frozen=True, slots=True)
class About:
    manifest: Manifest
    config: str
    environment: Environment

    def write(self, folder: Path) -> None:
        write_config(folder, self.config)
        write_environment(folder, self.environment)
        write_manifest(folder, self.manifest)

    @classmethod
    def read(cls, folder: Path) -> "About":
        manifest = read_manifest(folder)
        if manifest is None:
            raise StoreError(f"{folder} has no {MANIFEST}, so what it is a run of is not known; start a new one")
        path = Path(folder) / CONFIG
        try:
            config = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot be read: {error}") from None
        if sha256(config) != manifest.config_sha256:
            raise StoreError(f"{path} is not the config of this run: its sha256 differs from {MANIFEST}'s")
        return cls(manifest, config, read_environment(folder))


def differences(before: About, after: About) -> list[str]:
    """All that may move a number, each with both values; cells are compared by the caller."""
    old, new = before.manifest, after.manifest
    found = []
    if before.config != after.config:
        found.append(f"config: {_first_change(before.config, after.config)}")
    for name in ("suite", "seed", "code"):
        if (a := getattr(old, name)) != (b := getattr(new, name)):
            found.append(f"{name}: {_short(a)} -> {_short(b)}")
    for kernel in old.kernels.keys() & new.kernels.keys():
        a, b = old.kernels[kernel], new.kernels[kernel]
        if _content(a) != _content(b):
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


def _content(origin: str) -> str:
    """A kernel's file may lie elsewhere on another machine; its hash says whether it is the same."""
    _, marked, digest = origin.partition("sha256:")
    return digest if marked else origin


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
