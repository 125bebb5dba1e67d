"""What was found to be wrong: immutable, plain text and numbers, without torch."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where one tensor is wrong."""

    tensor: str  # "out", "grad k" ...
    sentence: str
    picture: tuple[str, ...]  # lines of blocks, the darker the worse
    index: tuple[int, ...] = ()  # of the worst element
    expected: float | None = None
    got: float | None = None
    share: float | None = None  # of the elements that are wrong

    @property
    def worst(self) -> str:
        if self.expected is None or self.got is None:
            return ""
        at = ", ".join(map(str, self.index))
        return f"worst element: {self.tensor}[{at}], expected {self.expected:.6g}, got {self.got:.6g}"


@dataclass(frozen=True)
class Named:
    """A guess that gives just what the kernel gives."""

    words: str  # completes "computes what you get with ..."
    names: tuple[str, ...]  # of all guesses that give the same answer to every call that was asked
    residual: float  # the share of the error that is left
    next_residual: float  # that of the best of all others
    calls: int  # wrong ones that it explains
    everywhere: bool  # it also tells which calls are right
    parameter: float | None = None
    uncertainty: float | None = None


@dataclass(frozen=True)
class Shrunk:
    """The smallest call that still fails."""

    call: str  # in words
    numbers_of_q: int
    reason: str  # what the rule says of it
    needs: tuple[str, ...]  # without each of these it passes
    script: str = ""  # of repro_<kernel>.py, also a test for pytest; empty where none would show it
    seconds: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    kernel: str
    call: str  # that was looked at
    check: str  # of the battery, that failed
    headline: str  # one sentence
    named: tuple[Named, ...] = ()  # several: each explains some of the calls that fail
    place: Place | None = None
    shrunk: Shrunk | None = None
    notes: tuple[str, ...] = ()  # further sentences, each measured
    seconds: float = 0.0

    @property
    def file_name(self) -> str:
        """Of the script."""
        return f"repro_{''.join(c if c.isalnum() else '_' for c in self.kernel.rpartition(':')[2])}.py"

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
