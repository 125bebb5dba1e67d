"""Nights: which cells are slowed in which one, and what every tool said of them. One JSON line a night and tool."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gate_study.decisions import Decision
from harness.errors import BadInput

NIGHTS = "nights.jsonl"
MODES = ("quiet", "noisy")
KINDS = ("same", "slowed")
SHARES = (0.02, 0.05, 0.10, 0.20)
EVERY = 2 * len(SHARES)  # of so many cells of a slowed night one gets each share, and the other half none


@dataclass(frozen=True, order=True)
class Night:
    """`same`: head is a second copy of the base. `slowed`: half of its cells do extra work."""

    kind: str
    mode: str
    number: int

    @property
    def seed(self) -> int:
        return random.Random(f"{self.kind} {self.mode} {self.number}").randrange(2**31)

    def shares(self, case_ids: Sequence[str]) -> dict[str, float]:
        """The slowdown asked of each cell, 0 for none: drawn anew each night, each share equally often."""
        if self.kind == "same":
            return dict.fromkeys(case_ids, 0.0)
        chance = random.Random(self.seed)
        drawn = chance.sample(list(case_ids), len(case_ids))
        start = chance.randrange(EVERY)  # else a number of cells that is no multiple would favour the first shares
        slots = [slot for share in SHARES for slot in (share, 0.0)]
        dealt = {case_id: slots[(start + at) % EVERY] for at, case_id in enumerate(drawn)}
        return {case_id: dealt[case_id] for case_id in case_ids}


@dataclass(frozen=True)
class CellResult:
    case_id: str
    share: float  # asked for
    decisions: tuple[Decision, ...]
    details: dict[str, Any]  # what the tool measured


@dataclass(frozen=True)
class NightResult:
    night: Night
    tool: str
    began: str
    seconds: float  # of the wall, with the start of all processes
    others: float | None  # cores' worth of time that was used by neither the tool nor the study's neighbours
    cells: tuple[CellResult, ...]


def planned(same: int, slowed: int, modes: Sequence[str]) -> list[Night]:
    """Kinds and modes are spread over the whole time, so that a slow change of the machine meets all alike."""
    nights = [Night("same", mode, n) for mode in modes for n in range(same)]
    nights += [Night("slowed", mode, n) for mode in modes for n in range(slowed)]
    most = {"same": max(same, 1), "slowed": max(slowed, 1)}
    return sorted(nights, key=lambda night: ((night.number + 0.5) / most[night.kind], night))


def append(folder: Path, result: NightResult) -> None:
    """One write, synced: a killed study loses the night that it was in and no other."""
    line = json.dumps(asdict(result)).encode() + b"\n"
    path = folder / NIGHTS
    whole = path.read_bytes() if path.exists() else b""
    torn = whole[whole.rfind(b"\n") + 1 :]
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(len(whole) - len(torn))  # half a line, left by a kill
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[NightResult]:
    return list(_lines(folder / NIGHTS))


def _lines(path: Path) -> Iterator[NightResult]:
    if not path.exists():
        return
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            cells = tuple(
                CellResult(**cell | {"decisions": tuple(Decision(**d) for d in cell["decisions"])})
                for cell in found["cells"]
            )
            yield NightResult(**found | {"night": Night(**found["night"]), "cells": cells})
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path}:{number} is no night of this study: {error!r}") from error
