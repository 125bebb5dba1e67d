"""A run's folder -> the same run again, with the kernels that it keeps, and what is the same."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import environment, store
from harness.errors import StoreError
from harness.kernels.names import content_of, is_plugin
from harness.kernels.sources import SourceFile, digest_of, entry_of
from harness.record import Record
from harness.runner import RESULTS, run
from harness.yaml_lines import parse

NUMBERS = ("max_abs_err", "mean_abs_err", "err_ratio", "params", "kv_cache_bytes", "rel_l1")  # the clock's are no part
NAMED = 8  # packages of other versions that a message names


@dataclass(frozen=True, slots=True)
class Pair:
    """One cell, then and now; None where there is none."""

    case_id: str
    before: Record | None
    after: Record | None

    @property
    def same_verdict(self) -> bool:
        return self.before is not None and self.after is not None and self.before.status == self.after.status

    @property
    def same_numbers(self) -> bool:
        if self.before is None or self.after is None:
            return False
        return all(repr(getattr(self.before, name)) == repr(getattr(self.after, name)) for name in NUMBERS)


@dataclass(frozen=True, slots=True)
class Reproduction:
    folder: Path  # of the new run
    pairs: tuple[Pair, ...]

    @property
    def passed(self) -> bool:
        return bool(self.pairs) and all(pair.same_verdict for pair in self.pairs)


def unlike(folder: Path) -> list[str]:
    """What is another than when the folder was written, and may move a number."""
    about = store.About.read(folder)
    manifest, now = about.manifest, environment.collect(about.environment.threads)
    changes = about.environment.differences(now)
    found = [f"{key}: {changes[key][0]} -> {changes[key][1]}" for key in store.COMPARED if key in changes]
    if manifest.code != store.code_sha256():
        found.append(f"harness's own code: {manifest.code[:12]} -> {store.code_sha256()[:12]}")
    here = environment.packages()
    others = [
        f"{name} {version} -> {here.get(name, 'not installed')}"
        for name, version in manifest.packages.items()
        if here.get(name) != version
    ]
    if others:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        found.append(f"packages: {', '.join(others[:NAMED])}{more}")
    return found


def reproduce(folder: Path, out: Path | None = None, *, timing: bool = True, quiet: bool = True) -> Reproduction:
    """Runs the folder's config again with the kernels that are kept in it, and compares the verdicts.

    This runs the code in the folder. `out` is the new run's folder (default: one under results/).
    """
    folder = Path(folder).resolve()
    about = store.About.read(folder)
    before = {record.case_id: record for record in store.read_records(folder)}
    names = _entries(folder, about.manifest)
    config: dict[str, Any] = _renamed(parse(about.config).plain(), names)
    # Sums change with the number of threads, and by default that is the machine's.
    config["threads"] = about.environment.threads
    if not timing:
        config["timing"] = {"enabled": False}
    target = store.new_folder(RESULTS, f"{store.slug(about.manifest.suite)}-reproduced") if out is None else Path(out)
    target = target.resolve()
    with _inside(folder / store.KERNELS):
        run(config, target, shard=about.manifest.shard, quiet=quiet)
    after = {record.case_id: record for record in store.read_records(target)}
    pairs = [Pair(case_id, old, after.get(_named(case_id, names))) for case_id, old in before.items()]
    return Reproduction(target, tuple(pairs))


def _entries(folder: Path, manifest: store.Manifest) -> dict[str, str]:
    """Each of the user's kernels as the run named it -> as it is named beside its stored files, which are whole."""
    found = {}
    for kernel, origin in manifest.kernels.items():
        if not is_plugin(kernel):
            continue
        places = manifest.sources.get(kernel, ())
        if not places:
            raise StoreError(f"{folder}: the source of kernel {kernel} is not in it, so its run cannot be repeated")
        root = (folder / store.KERNELS).resolve()
        paths = [(root / place).resolve() for place in places]
        if outside := [path for path in paths if not path.is_relative_to(root)]:
            raise StoreError(f"{folder}: a source of kernel {kernel} lies outside of it: {outside[0]}")
        files = [SourceFile(at, path, store.read_regular(path)) for at, path in zip(places, paths, strict=True)]
        if not digest_of(files).startswith(content_of(origin)):
            raise StoreError(f"{folder}: the stored source of kernel {kernel} is not what ran there")
        found[kernel] = entry_of(kernel, places)
    return found


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The config with the kernels' new names; one that stood beside the config had been made absolute."""
    if isinstance(value, dict):
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if isinstance(value, str) and is_plugin(value):
        short = value.removeprefix("./")
        return next((new for old, new in names.items() if old == value or old.endswith(f"/{short}")), value)
    return value


def _named(case_id: str, names: Mapping[str, str]) -> str:
    """A cell's id ends with its kernel."""
    for old, new in names.items():
        if case_id.endswith(f"-{old}"):
            return case_id.removesuffix(old) + new
    return case_id


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In the folder of the kernels' sources, if there is one: what they import is found there, and named as it was."""
    if not folder.is_dir():
        yield
        return
    home, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(home)
        sys.path[:] = path
