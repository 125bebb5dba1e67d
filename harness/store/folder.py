"""The folder of a run while it is being written: made or gone on with, locked, appended to."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import StoreError
from harness.record import Record
from harness.store import records as lines
from harness.store.files import Lock, claim, make_folder, new_folder, point, slug, sync_folder
from harness.store.manifest import CONFIG, ENVIRONMENT, MANIFEST, About, Manifest, differences
from harness.store.reading import CSV, PARQUET
from harness.store.records import RECORDS, Writer

LATEST = "latest"
# What a run writes besides its records; the last two are the report's.
WRITTEN = (CONFIG, ENVIRONMENT, CSV, PARQUET, "summary.md", "report.html", "benchmark.json")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Belongs to this run alone until it is closed. `finished`: what an earlier session left, in the suite's order."""

    path: Path
    lock: Lock = field(repr=False, compare=False)
    writer: Writer = field(repr=False, compare=False)
    finished: tuple[Record, ...] = ()

    @classmethod
    def create(
        cls, out: Path | None, suite_name: str, results_root: Path = Path("results"), *, about: About | None = None
    ) -> "RunFolder":
        """A run of its own. The records file is made last: where it is, everything that explains it is, too."""
        if out is None:
            latest = results_root / LATEST
            if latest.exists() and not latest.is_symlink():
                raise StoreError(f"{latest} is not a symlink; move it away, it must point to the latest run")
            path = new_folder(results_root, slug(suite_name))
        else:
            path = Path(out)
            make_folder(path)
            _refuse_foreign(path)
        lock = Lock(path)
        try:
            if (path / RECORDS).exists():
                is_merge = about is not None and about.manifest.parts
                remedy = "name another folder" if is_merge else "give another --out, move it, or add --resume"
                raise StoreError(f"{path} already holds {RECORDS} of another run; {remedy}")
            if about is not None:
                about.write(path)
            claim(path, RECORDS)
            sync_folder(path)
            if out is None:
                point(results_root / LATEST, path.name)
        except BaseException:
            lock.release()
            raise
        return cls(path, lock, Writer(path / RECORDS))

    @classmethod
    def reopen(cls, path: Path, about: About, *, even_if_changed: bool = False) -> "RunFolder":
        """Goes on with a run that was cut short, if it is still the same run."""
        path = Path(path)
        lock = Lock(path)
        try:
            before = About.read(path)
            after = _continued(path, before, about, even_if_changed=even_if_changed)
            lines.repair(path)
            finished = lines.latest(lines.read_lines(path), after.manifest.planned)
            if after != before:
                after.write(path)
            after.write_copies(path)
        except BaseException:
            lock.release()
            raise
        return cls(path, lock, Writer(path / RECORDS), tuple(finished))

    def append(self, *records: Record) -> None:
        """On disk when this returns: a line each, synced."""
        self.writer.append(records)

    def close(self) -> None:
        self.lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _refuse_foreign(path: Path) -> None:
    """A run's first file is run.json: where it is not, files of these names are somebody else's."""
    found = [name for name in WRITTEN if (path / name).exists()]
    if found and not (path / MANIFEST).exists() and not (path / RECORDS).exists():
        raise StoreError(f"{path / found[0]} is not a run's and would be overwritten; give another --out, or move it")


def _continued(path: Path, before: About, now: About, *, even_if_changed: bool) -> About:
    """What the folder is about from now on: what it was, unless it may go on as something else."""
    old, new = before.manifest, now.manifest
    if old.parts:
        raise StoreError(f"{path} was merged from {len(old.parts)} folders; resume those, and merge them again")
    # Another choice of cells is another run, whatever the circumstances.
    if other := _other_cells(old, new):
        raise StoreError(f"{path} is another run: {'; '.join(other)}; give another --out")
    changes = differences(before, now)
    if changes and not even_if_changed:
        shown = "\n  ".join(changes)
        raise StoreError(
            f"{path} cannot be gone on with as if nothing had happened; since then\n  {shown}\n"
            "start a new run, or add --even-if-changed"
        )
    if not changes:
        return before
    return About(replace(new, command=old.command, changes=(*old.changes, *changes)), now.config, now.environment)


def _other_cells(old: Manifest, new: Manifest) -> list[str]:
    found = []
    if old.suite != new.suite:
        found.append(f"suite {old.suite} -> {new.suite}")
    if old.shard != new.shard:
        found.append(f"shard {_shard_text(old.shard)} -> {_shard_text(new.shard)}")
    if old.kernels.keys() != new.kernels.keys():
        found.append(f"kernels {', '.join(old.kernels)} -> {', '.join(new.kernels)}")
    return found


def _shard_text(shard: tuple[int, int] | None) -> str:
    return "none" if shard is None else f"{shard[0]}/{shard[1]}"
