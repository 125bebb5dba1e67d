"""Shards of one suite, or any parts of it, put together in a new folder: as if one run had measured them all."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from harness.errors import StoreError
from harness.store.folder import RunFolder
from harness.store.manifest import About, MergedPart, differences, stored_sources, write_sources
from harness.store.reading import some
from harness.store.records import Line, latest, read_lines


def merge(out: Path, folders: Sequence[Path], *, partial: bool = False, even_if_changed: bool = False) -> None:
    """The records of all in the new folder `out`; refused where the parts are unlike, overlap or, unless `partial`,
    lack a cell."""
    if not folders:
        raise StoreError("nothing to merge: name the folders of its parts")
    parts = [(Path(folder), About.read(folder)) for folder in folders]
    (first, base), *others = parts
    changes = [f"{first} -> {folder}: {change}" for folder, about in others for change in differences(base, about)]
    if changes and not even_if_changed:
        shown = "\n  ".join(changes)
        raise StoreError(f"these are not parts of one run:\n  {shown}\nmerge like ones, or add --even-if-changed")
    lines = [_lines(folder, about) for folder, about in parts]
    _refuse_overlap(lines)
    manifest = replace(
        base.manifest,
        kernels={name: origin for _, about in parts for name, origin in about.manifest.kernels.items()},
        sources={name: places for _, about in parts for name, places in about.manifest.sources.items()},
        shard=None,
        case_ids=tuple(dict.fromkeys(case_id for _, about in parts for case_id in about.manifest.case_ids)),
        command=None,
        changes=tuple(dict.fromkeys([*(c for _, about in parts for c in about.manifest.changes), *changes])),
        parts=tuple(
            MergedPart(str(folder), about.manifest.shard, len({line.record.case_id for line in found}))
            for (folder, about), found in zip(parts, lines, strict=True)
        ),
    )
    found = {line.record.case_id for part in lines for line in part}
    missing = tuple(case_id for case_id in manifest.case_ids if case_id not in found)
    if missing and not partial:
        whole = f"{len(manifest.case_ids) - len(missing)} of {len(manifest.case_ids)} cells"
        raise StoreError(
            f"together they have {whole}; missing: {some(missing)}{_absent(parts)}\n"
            "finish those parts and name them all, or add --partial"
        )
    about = About(manifest, base.config, base.environment)
    with RunFolder.create(Path(out), manifest.suite, about=about) as folder:
        write_sources(folder.path, chain.from_iterable(stored_sources(*part) for part in parts))
        folder.append(*(line.record for part in lines for line in part))


def _lines(folder: Path, about: About) -> list[Line]:
    lines = read_lines(folder)
    latest(lines, about.manifest.planned)  # refuses what the folder itself would refuse
    return lines


def _refuse_overlap(parts: Sequence[Sequence[Line]]) -> None:
    seen: dict[str, Line] = {}
    for lines in parts:
        here = {line.record.case_id: line for line in lines}
        for case_id, line in here.items():
            if case_id in seen:
                raise StoreError(f"{line.place}: {case_id} is also in {seen[case_id].place}; merge each cell once")
        seen |= here


def _absent(parts: Sequence[tuple[Path, About]]) -> str:
    """Which shards nobody named, where that can be told."""
    shards = [about.manifest.shard for _, about in parts]
    counts = {shard[1] for shard in shards if shard is not None}
    if len(counts) != 1 or None in shards:
        return ""
    (count,) = counts
    absent = [f"{at}/{count}" for at in range(1, count + 1) if (at, count) not in shards]
    return f"\nno folder holds shard {', '.join(absent)}" if absent else ""
