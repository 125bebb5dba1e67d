"""Times of one cell in both versions, in turn: rounds of blocks, in each block every side once in random order.

Two processes of the same code differ by some per cent for as long as their memory lies where it lies. So each round
builds the cell anew, with other holes in the memory before it, in other processes: two of the base, one of the head.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.case import Case
from harness.errors import BadInput
from harness.gate.findings import TimingSettings
from harness.gate.process import Died, Hung, Process, Refused
from harness.gate.statistics import MIN_ROUNDS, is_far
from harness.gate.versions import Version
from harness.kernels.names import is_plugin
from harness.kernels.sources import INSTALLED
from harness.suite.schema import Limits
from harness.workers.process import allowed_bytes

SAMPLE_S = 2e-3  # a sample makes calls for about this long
FEWEST_CALLS, MOST_CALLS = 6, 200
LONG_S = 3e-3  # a call of this length finds its own caches: one or two are a sample, and need no warming up
BLOCKS = 8  # of a round
FEWEST_BLOCKS = 2
REFERENCE_EVERY = 4  # blocks; it is shown, not judged
PROCESSES = 3  # of each version
FAR_SLOWER = 4.0  # times the base
# The schedule is fixed: the level is shared among the looks, and the budget among the two measurements.
LOOKS = (8, 12, 18, 27, 40)  # rounds
AGAIN = 16  # rounds of the second measurement, at which nobody looks before its end
FIRST = 0.6  # of the seconds
OVERTIME = 1.0  # of a measurement's seconds, for those that cannot have the fewest rounds of any use before
LONG_OVERTIME = 9.0  # the same for those that are far from unchanged by what there is


class SameOnBothSides(BadInput):
    """There is nothing to compare; the message names the file."""


class CellFailed(Exception):
    """The cell cannot be timed. `side` is "base", "head" or "both"; `died` where a process did not survive it, `hung`
    where it had to be ended."""

    def __init__(self, side: str, reason: str, *, died: bool, hung: bool = False) -> None:
        super().__init__(reason)
        self.side, self.reason, self.died, self.hung = side, reason, died, hung


@dataclass(frozen=True, slots=True)
class Plan:
    """Fixed before anything is compared, and the same for all sides."""

    calls: int  # of a sample
    warm: int  # calls before a sample, not timed: another process had the caches
    blocks: int  # of a round


@dataclass(frozen=True, slots=True)
class Round:
    times: np.ndarray  # (blocks, 3): seconds of a call in base, twin and head
    reference: tuple[float, ...]


class VersionProcesses:
    """The processes of both versions. Those that die are replaced when they are next needed."""

    def __init__(self, base: Version, head: Version, settings: TimingSettings) -> None:
        self._versions = {"base": base, "head": head}
        self._settings = settings
        # Each works alone while the others wait, but all keep what they have built.
        self._allowed = allowed_bytes(Limits(max_memory=settings.max_memory), 2 * PROCESSES)
        self._members: dict[tuple[str, int], Process] = {}

    def muster(self) -> None:
        """Starts whoever is missing, all at once."""
        missing = [(side, at) for side in self._versions for at in range(PROCESSES) if (side, at) not in self._members]
        for key in missing:
            self._members[key] = self._start(key[0])
        for number, (side, at) in enumerate(missing):
            try:
                self._members[side, at].greet()
            except (Died, Refused) as error:
                for each in missing[number:]:  # those not greeted yet would take a cell for the greeting
                    self.lose(*each)
                raise CellFailed(side, f"its process does not start: {error}", died=True) from None

    def member(self, side: str, at: int) -> Process:
        if (side, at) not in self._members:
            self.muster()
        return self._members[side, at]

    def close(self) -> None:
        """Ends all of them; the next to be needed are fresh."""
        while self._members:
            self._members.popitem()[1].kill()

    def lose(self, side: str, at: int) -> None:
        self._members.pop((side, at)).kill()

    def _start(self, side: str) -> Process:
        version = self._versions[side]
        own = [] if version.installed is None else [str(version.root)]
        path = [*own, *(self._in_tree_of(entry, side) for entry in sys.path if entry and not self._is_a_tree(entry))]
        return Process(version, threads=self._settings.threads, allowed=self._allowed, path=path)

    def _is_a_tree(self, entry: str) -> bool:
        """What the parent can import, but a version's own tree is for that version alone."""
        return Path(entry).resolve() in {tree for each in self._versions.values() for tree in (each.root, each.harness)}

    def _in_tree_of(self, place: str | Path, side: str) -> str:
        """The same place in the version's own tree, if it lies in the head's and is not installed there."""
        path, head = Path(place).resolve(), self._versions["head"].root
        if not path.is_relative_to(head) or any(name in path.parts for name in INSTALLED):
            return str(place)
        return str(self._versions[side].root / path.relative_to(head))

    def kernel(self, name: str, side: str) -> str:
        """A user's file inside the head's tree is taken from each version's own; elsewhere both have the same."""
        place, _, function = name.rpartition(":")
        if not is_plugin(name) or not place.endswith(".py"):
            return name
        return f"{self._in_tree_of(Path(place).resolve(), side)}:{function}"

    def refuse_same(self, kernels: Iterable[str]) -> None:
        """A file that both sides run is as fast as itself, whatever has changed: never a pass."""
        for kernel in filter(is_plugin, kernels):
            used = {side: self._files_of(kernel, side) for side in self._versions}
            head, base = self._versions["head"].root, self._versions["base"].root
            wrong = [file for file in used["base"] if file.is_relative_to(head) and not file.is_relative_to(base)]
            same = [file for file in used["base"][:1] if file in used["head"]]
            if base != head and (found := [*same, *wrong]):
                raise SameOnBothSides(
                    f"kernel {kernel}: both sides would run the same file, {found[0]}, so there is nothing to compare: "
                    "it must lie in the repository, and be imported from there (no PYTHONPATH or sys.path that leads "
                    "elsewhere)"
                )

    def _files_of(self, kernel: str, side: str) -> list[Path]:
        """Those of the user's that one side's process has loaded, the kernel's own first."""
        name = self.kernel(kernel, side)
        try:
            listed = self.member(side, 0).ask("sources", self._settings.timeout_s, kernel=name)["files"]
        except (Refused, Died):  # told when its cells are built; or of a version that cannot be asked
            self.lose(side, 0)
            listed = [name.rpartition(":")[0]] if name.rpartition(":")[0].endswith(".py") else []
        return [Path(file).resolve() for file in listed]


class Sampler:
    """One cell; `round` may be called again and again."""

    def __init__(
        self,
        processes: VersionProcesses,
        case: Case,
        settings: TimingSettings,
        *,
        chance: random.Random,
        blocks: int | None = None,
    ) -> None:
        """`blocks` of a round; None: as the budget allows."""
        self._processes, self._case, self._settings, self._chance = processes, case, settings, chance
        self._blocks = blocks
        self._plan: Plan | None = None
        self._took = 0  # rounds

    def rounds(
        self, seconds: float, *, looks: Sequence[int], enough: Callable[[np.ndarray], bool], fewest: int
    ) -> list[Round]:
        """Rounds until a look finds that it is enough, the schedule ends, or the time is up. Where it is up before the
        `fewest` rounds that can be judged, it is prolonged if what there is is far from unchanged."""
        rounds: list[Round] = []
        deadline = time.perf_counter() + seconds
        for look in looks:
            while len(rounds) < look:
                rounds.append(self.round())
                left = deadline - time.perf_counter()
                if left <= 0 and len(rounds) >= MIN_ROUNDS:
                    return rounds
                is_over = len(rounds) >= fewest or left <= -LONG_OVERTIME * seconds
                if left <= -OVERTIME * seconds and (is_over or not is_far(stack(rounds), self._settings)):
                    return rounds
            if enough(stack(rounds)):
                break
        return rounds

    def round(self) -> Round:
        # Two of the base by lot, so that the null shows what processes differ by; those of the head in turn.
        first, second = self._chance.sample(range(PROCESSES), 2)
        twins = [("base", first), ("base", second), ("head", self._took % PROCESSES)]
        # The first time the base is asked first: what it refuses is no fault of the head's. After that in random order,
        # and the reference in any of the processes: the head, built last and busy with the reference in between, found
        # its caches warmer than the base did, and stood 0.7 % too fast (mean of 29 cells, same code on both sides).
        for key in self._chance.sample(twins, len(twins)) if self._took else twins:
            self.build(key)
        self._took += 1
        self._plan = plan = self._plan or self._make_plan(twins)
        times = np.full((plan.blocks, len(twins)), math.nan)
        reference = []
        for block in range(plan.blocks):
            order: list[int | None] = list(range(len(twins)))
            if block % REFERENCE_EVERY == 0:
                order.append(None)
            self._chance.shuffle(order)
            for at in order:
                if at is None:
                    reference.append(self._sample(self._chance.choice(twins), "reference", plan))
                else:
                    times[block, at] = self._sample(twins[at], "candidate", plan)
        return Round(times, tuple(reference))

    def build(self, key: tuple[str, int]) -> None:
        """The cell in one process, which calls it once."""
        fields = {**asdict(self._case), "kernel": self._processes.kernel(self._case.kernel, key[0])}
        shift = self._chance.randrange(1 << 32)
        self._ask(key, "build", cell={"fields": fields, "seed": self._settings.suite_seed, "shift": shift})

    def _sample(self, key: tuple[str, int], side: str, plan: Plan) -> float:
        """Seconds of a call: by the process' own clock, which leaves the way there and back out; where it runs a user's
        kernel by the clock here, which no kernel can stop."""
        started = time.perf_counter()
        answer = self._ask(key, "time", sample={"side": side, "calls": plan.calls, "warm": plan.warm})
        if is_plugin(self._case.kernel):
            return (time.perf_counter() - started) / (plan.calls + plan.warm)
        return float(answer["seconds"])

    def _make_plan(self, twins: Sequence[tuple[str, int]]) -> Plan:
        *bases, head = twins
        trial = Plan(calls=3, warm=1, blocks=0)
        once = float(np.median([self._sample(key, "candidate", trial) for key in bases]))
        # Planned for the base, a head that is many times slower would not get the fewest rounds in its time. Asked
        # twice: a first call in cold caches takes three times as long by itself, and may be interrupted, too.
        for calls in (1, 2):
            slow = self._sample(head, "candidate", Plan(calls=calls, warm=0, blocks=0))
            if not slow > FAR_SLOWER * once:
                break
        else:
            once = slow
        if once >= LONG_S:
            calls, warm = (2 if once < 3 * LONG_S else 1), 0
        else:
            calls, warm = min(MOST_CALLS, max(FEWEST_CALLS, math.ceil(SAMPLE_S / max(once, 1e-9)))), 1
        block_s = once * (calls + warm) * (3 + 1 / REFERENCE_EVERY)
        affordable = FIRST * self._settings.seconds / LOOKS[0] / block_s
        return Plan(calls, warm, self._blocks or max(FEWEST_BLOCKS, min(BLOCKS, int(affordable))))

    def _ask(self, key: tuple[str, int], do: str, **what: Any) -> dict[str, Any]:
        side, at = key
        try:
            return self._processes.member(side, at).ask(do, self._settings.timeout_s, **what)
        except Died as death:
            self._processes.lose(side, at)
            raise CellFailed(side, str(death), died=True, hung=isinstance(death, Hung)) from None
        except Refused as refusal:
            if side == "head":  # a regression, if a fresh process refuses too
                self._processes.lose(side, at)
            raise CellFailed(side, str(refusal), died=False) from None


def stack(rounds: Sequence[Round]) -> np.ndarray:
    return np.stack([each.times for each in rounds])
