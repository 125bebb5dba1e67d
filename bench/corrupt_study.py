"""Damaged records files: is every damage refused with its line, or repaired with the loss announced?

    python bench/corrupt_study.py [--files 2000] [--seed 0]

Each file is a whole one with bits flipped, bytes cut, doubled, swapped or overwritten, or lines dropped, doubled or
swapped. It must never give a table that is silently shorter or silently different.
"""

import argparse
import logging
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from harness import environment, store
from harness.case import CASE_FIELDS, Case
from harness.record import Record
from harness.store import StoreError
from harness.store.records import repair
from harness.suite.config import load_suite

CONFIG = """\
name: corrupt
timing: {enabled: false}
grid: {variant: [mha, mqa], embed_dim: [16, 32], heads: 2, seq_len: [4, 6], mask: causal}
"""

Damage = Callable[[bytes, random.Random], bytes]


def made_up(case: Case, chance: random.Random) -> Record:
    numbers = [chance.random() for _ in range(6)]
    return Record(
        case_id=case.case_id,
        reference="none",
        kv_len=case.kv_len,
        status=chance.choice(["ok", "degraded", "error"]),
        max_abs_err=numbers[0],
        err_ratio=numbers[1],
        error=chance.choice([None, "naïve ∞\n\u2028"]),
        samples_s={"candidate": numbers},
        equivalence=[{"tensor": "output", "err_ratio": number} for number in numbers[:2]],
        **{name: getattr(case, name) for name in CASE_FIELDS},
    )


def flip_bits(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def cut_bytes(data: bytes, chance: random.Random) -> bytes:
    start, end = _range(data, chance)
    return data[:start] + data[end:]


def double_bytes(data: bytes, chance: random.Random) -> bytes:
    start, end = _range(data, chance)
    return data[:end] + data[start:end] + data[end:]


def swap_bytes(data: bytes, chance: random.Random) -> bytes:
    a, b, c, d = sorted(chance.sample(range(len(data) + 1), 4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def overwrite(data: bytes, chance: random.Random) -> bytes:
    start, end = _range(data, chance)
    filler = chance.choice([b"\0", b"\n", b" ", None])
    middle = chance.randbytes(end - start) if filler is None else filler * (end - start)
    return data[:start] + middle + data[end:]


def add_at_the_end(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice([b"\n", b"\0" * 512, b"{", chance.randbytes(40), data[:90]])


def drop_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def double_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.split(b"\n")[:-1]
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    return b"\n".join(lines) + b"\n"


def swap_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.split(b"\n")[:-1]
    chance.shuffle(lines)
    return b"\n".join(lines) + b"\n"


def cut_at_a_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.split(b"\n")[:-1]
    return b"".join(line + b"\n" for line in lines[: chance.randrange(len(lines))])


DAMAGES: tuple[Damage, ...] = (
    flip_bits, flip_bits, flip_bits, truncate, cut_bytes, double_bytes, swap_bytes, overwrite, add_at_the_end,
    drop_line, double_line, swap_lines, cut_at_a_line,
)  # fmt: skip


def _range(data: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(data))
    return start, min(len(data), start + chance.choice([1, 2, 7, 60, 900]))


class Heard(logging.Handler):
    """What was announced."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def whole_run(folder: Path, chance: random.Random) -> list[Record]:
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG)
    suite = load_suite(config)
    manifest = store.Manifest(
        suite=suite.name,
        config_sha256=store.sha256(suite.source),
        code=store.code_sha256(),
        seed=suite.seed,
        kernels={"eager": "harness"},
        shard=None,
        case_ids=tuple(case.case_id for case in suite.cases),
    )
    records = [made_up(case, chance) for case in suite.cases]
    about = store.About(manifest, suite.source, environment.collect(1))
    with store.RunFolder.create(folder, suite.name, about=about) as run:
        run.append(*records)
    return records


def outcome(folder: Path, honest: list[Record], heard: Heard) -> str:
    """How the damage was met; a word that starts with SILENT is a failure."""
    heard.text = ""
    try:
        frame = store.load(folder)
        found = store.read_records(folder)
    except StoreError as error:
        return "refused" if re.search(r"records\.jsonl:\d+: ", str(error)) else "SILENT about the line"
    kept = {record.case_id: record for record in found}
    if any(kept[record.case_id] != record for record in honest if record.case_id in kept) or len(kept) > len(honest):
        return "SILENTLY different"
    missing = [record.case_id for record in honest if record.case_id not in kept]
    if frame.attrs["missing"] != missing or (missing and "incomplete: " not in heard.text):
        return "SILENTLY shorter"
    torn = "torn last line" in heard.text
    repair(folder)
    heard.text = ""
    if store.read_records(folder) != found or "torn" in heard.text:
        return "SILENTLY spoilt by the repair"
    if missing:
        return "torn line repaired, loss announced" if torn else "loss announced"
    return "repaired without loss" if torn else "nothing lost"


def study(files: int, seed: int, folder: Path) -> Counter[tuple[str, str]]:
    chance, heard = random.Random(seed), Heard()
    honest = whole_run(folder, chance)
    path = folder / store.RECORDS
    data = path.read_bytes()
    logger = logging.getLogger("harness.store")
    logger.addHandler(heard)
    logger.propagate = False
    try:
        met: Counter[tuple[str, str]] = Counter()
        for _ in range(files):
            damage = chance.choice(DAMAGES)
            path.write_bytes(damage(data, chance))
            met[damage.__name__, outcome(folder, honest, heard)] += 1
        return met
    finally:
        logger.removeHandler(heard)
        logger.propagate = True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        met = study(options.files, options.seed, Path(temporary) / "run")
    for (damage, how), count in sorted(met.items()):
        print(f"{count:6}  {damage:15} {how}")
    totals: Counter[str] = Counter()
    for (_, how), count in met.items():
        totals[how] += count
    silent = sum(count for how, count in totals.items() if how.startswith("SILENT"))
    told = ", ".join(f"{count} {how}" for how, count in totals.most_common())
    print(f"{options.files} damaged records files: {told}; {silent} silently shorter or different")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
