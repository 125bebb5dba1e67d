"""run.json: what a run is a run of, and which cells it should have. Written first of all, and in one piece.

It holds the config and the environment too, which also stand beside it as files for readers; and it says whether two
runs may share a table.
"""

import hashlib
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import harness
from harness.environment import Environment
from harness.errors import BadInput, StoreError
from harness.kernels.names import content_of
from harness.kernels.sources import SourceFile
from harness.store.files import read_regular, write_atomically

SCHEMA = 2  # of a run's folder; 1 had no number, no kernels' sources and no packages
KERNELS = "kernels"  # the folder of their sources
MANIFEST, CONFIG, ENVIRONMENT = "run.json", "config.yaml", "environment.json"
# What a worker process imports, and so all that can change a record. To edit a report or the gate makes no other run.
MEASURING = (
    *("errors", "registry", "text", "yaml_lines", "case", "record", "environment", "kernels", "candidate", "variants"),
    *("references", "swaps", "suite", "cell", "battery", "mutants", "diagnosis", "workers"),
)
# Numbers may move with these; memory, the commit and pandas move none.
COMPARED = ("python", "torch", "numpy", "platform", "cpu", "threads")

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MergedPart:
    """A folder that was merged into this one."""

    folder: str
    shard: tuple[int, int] | None
    cells: int


@dataclass(frozen=True, slots=True)
class Manifest:
    suite: str
    config_sha256: str
    code: str  # of harness's own source
    seed: int
    kernels: dict[str, str]  # name -> where it came from
    shard: tuple[int, int] | None
    case_ids: tuple[str, ...]  # of the whole suite, in its order
    command: tuple[str, ...] | None = None  # what follows `harness`; None if it was started from Python
    changes: tuple[str, ...] = ()  # in spite of which it was resumed or merged
    parts: tuple[MergedPart, ...] = ()
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # kernel -> its files, its own first
    packages: dict[str, str] = field(default_factory=dict)  # all that was installed -> version

    @property
    def planned(self) -> tuple[str, ...]:
        """The cells of this run, in the suite's order."""
        return take_shard(self.case_ids, self.shard)

    def resume_command(self, folder: Path, *, retry: bool = False) -> str | None:
        """To be pasted into a shell; None for a merged folder, whose parts are what can go on."""
        if self.parts:
            return None
        if self.command is None:
            return f"harness.run(..., out={str(folder)!r}, resume=True{', retry=True' * retry})"
        # As this shell would start harness: its environment need not be active.
        program = ["harness"] if shutil.which("harness") else [sys.executable, "-m", "harness"]
        return shlex.join([*program, *self.command, "--resume", *["--retry"] * retry, "--out", str(folder)])


def take_shard(items: Sequence[T], shard: tuple[int, int] | None) -> tuple[T, ...]:
    """Every n-th from the i-th on, so that each shard has a bit of everything."""
    if shard is None:
        return tuple(items)
    index, count = shard
    if not 1 <= index <= count:
        raise BadInput(f"shard {index}/{count}: must be 1/{count} to {count}/{count}")
    return tuple(items[index - 1 :: count])


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def code_sha256() -> str:
    """Of the source files that can change a record: the version number does not change while someone works on them."""
    root = Path(harness.__file__).parent
    files = [file for room in MEASURING for file in (root / f"{room}.py", *(root / room).rglob("*.py"))]
    digest = hashlib.sha256()
    for path in sorted(file for file in files if file.is_file()):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class About:
    """All that run.json holds."""

    manifest: Manifest
    config: str
    environment: Environment

    def write(self, folder: Path) -> None:
        """run.json alone decides; after a kill between these lines, `write_copies` makes the others follow it."""
        data = asdict(self.manifest)
        ids = data.pop("case_ids")
        data |= {"cells": len(self.manifest.planned), "case_ids_sha256": _ids_sha256(ids), "case_ids": ids}
        data |= {"config": self.config, "environment": asdict(self.environment)}
        data = {"schema": SCHEMA, **data}
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        write_atomically(Path(folder) / MANIFEST, text.encode(errors="backslashreplace"))
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
        about = read_about(folder)
        if about is None:
            raise StoreError(f"{folder} has no {MANIFEST}, so what it is a run of is not known; start a new one")
        return about


def read_about(folder: Path) -> About | None:
    """None where there is no run.json: then nobody knows whether a cell is missing."""
    path = Path(folder) / MANIFEST
    try:
        data = json.loads(read_regular(path).decode())
        manifest = _decode(data)
        if data["cells"] != len(manifest.planned) or data["case_ids_sha256"] != _ids_sha256(manifest.case_ids):
            raise ValueError("its case_ids do not have the length or the checksum that it gives")
        if sha256(data["config"]) != manifest.config_sha256:
            raise ValueError("its config does not have the checksum that it gives")
        return About(manifest, data["config"], Environment.from_json(json.dumps(data["environment"])))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path}: broken: {type(error).__name__}: {error}") from None


def _ids_sha256(ids: Sequence[str]) -> str:
    return sha256("\n".join(ids))


def _decode(data: dict[str, Any]) -> Manifest:
    """Of this version, an older or a newer one: what is not there yet has its default, what is unknown is left out."""
    for name in ("suite", "config_sha256", "code"):
        if not isinstance(data[name], str):
            raise TypeError(f"{name} must be text")
    if type(data["seed"]) is not int:
        raise TypeError("seed must be a number")
    if type(schema := data.get("schema", 1)) is not int:
        raise TypeError("schema must be a number")
    if schema > SCHEMA:
        log.info("written by a newer harness (schema %d, this one knows %d): what is new is not shown", schema, SCHEMA)
    command = data.get("command")
    return Manifest(
        suite=data["suite"],
        config_sha256=data["config_sha256"],
        code=data["code"],
        seed=data["seed"],
        kernels=_by_name("kernels", data["kernels"]),
        shard=_shard(data["shard"]),
        case_ids=_texts(data["case_ids"]),
        command=None if command is None else _texts(command),
        changes=_texts(data.get("changes", [])),
        parts=tuple(MergedPart(p["folder"], _shard(p["shard"]), p["cells"]) for p in data.get("parts", [])),
        sources={kernel: _texts(files) for kernel, files in data.get("sources", {}).items()},
        packages=_by_name("packages", data.get("packages", {})),
    )


def _by_name(key: str, values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or {*map(type, values.values())} - {str}:
        raise TypeError(f"{key} must be texts by name, not {values!r:.60}")
    return values


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or {*map(type, values)} - {str}:
        raise TypeError(f"must be a list of texts, not {values!r:.60}")
    return tuple(values)


def _shard(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    index, count = value
    if type(index) is not int or type(count) is not int or not 1 <= index <= count:
        raise ValueError(f"shard {value!r:.60}")
    return index, count


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


def write_sources(folder: Path, files: Iterable[SourceFile]) -> None:
    """What a user's kernels are made of, as it was: places within the folder alone."""
    root = Path(folder) / KERNELS
    for each in files:
        path = root / each.place
        if not path.resolve().is_relative_to(root.resolve()):
            raise StoreError(f"{each.path}: would be stored outside of {root}, as {each.place}")
        if not path.exists() or read_regular(path) != each.data:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, each.data)


def stored_sources(folder: Path, about: About) -> Iterator[SourceFile]:
    """What `write_sources` left there."""
    for place in dict.fromkeys(chain.from_iterable(about.manifest.sources.values())):
        path = Path(folder) / KERNELS / place
        yield SourceFile(place, path, read_regular(path))


def write_config(folder: Path, text: str) -> None:
    write_atomically(Path(folder) / CONFIG, text.encode())


def write_environment(folder: Path, environment: Environment) -> None:
    write_atomically(Path(folder) / ENVIRONMENT, environment.to_json().encode())


def read_environment(folder: Path) -> Environment:
    path = Path(folder) / ENVIRONMENT
    try:
        return Environment.from_json(read_regular(path).decode())
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist") from None
    except ValueError as error:
        raise StoreError(f"{path}: {error}") from error
