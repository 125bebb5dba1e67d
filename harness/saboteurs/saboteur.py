"""What a saboteur is: one small wrong function, the real bug it stands for, and the cells in which that bug exists."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from harness.build import Pair
from harness.case import Case
from harness.kernels.call import AttentionCall, Kernel
from harness.registry import Registry

Run = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]
Applies = Callable[[Case], bool]
Invisible = Callable[[Case], str | None]


def everywhere(case: Case) -> bool:
    return True


def nowhere(case: Case) -> None:
    return None


@dataclass(frozen=True)
class Saboteur:
    """`kernel` makes a fresh wrong kernel (some remember things), or `spoil` changes the candidate of a right pair.

    `applies` says where the bug changes anything at all, in exact arithmetic, and is tested: elsewhere the wrong and
    the right candidate must give the same bits. `invisible` says, by arithmetic, why rounding must hide it in a cell
    in which it applies; None where it must be seen.
    """

    name: str
    stands_for: str
    applies: Applies
    kernel: Callable[[], Kernel] | None = None
    spoil: Callable[[Pair], None] | None = None
    invisible: Invisible = nowhere


SABOTEURS: Registry[Saboteur] = Registry("saboteur")


def in_kernel(
    *, applies: Applies = everywhere, shielded: bool = True, invisible: Invisible = nowhere
) -> Callable[[Run], Run]:
    """A wrong kernel. Behind the shield, as our own kernels are, unless it is the shield's work that is missing."""

    def register(run: Run) -> Run:
        name = run.__name__

        def kernel() -> Kernel:
            return Kernel(name, run, gives_weights=True, shielded=shielded, origin="saboteur")

        SABOTEURS.add(name, Saboteur(name, _bug(run), applies, kernel=kernel, invisible=invisible))
        return run

    return register


def with_memory(
    *, applies: Applies = everywhere, invisible: Invisible = nowhere
) -> Callable[[Callable[[], Run]], Callable[[], Run]]:
    """A factory of wrong kernels that remember earlier calls: each judged cell gets its own."""

    def register(make: Callable[[], Run]) -> Callable[[], Run]:
        name = make.__name__

        def kernel() -> Kernel:
            return Kernel(name, make(), gives_weights=True, origin="saboteur")

        SABOTEURS.add(name, Saboteur(name, _bug(make), applies, kernel=kernel, invisible=invisible))
        return make

    return register


def in_module(
    *, applies: Applies, invisible: Invisible = nowhere
) -> Callable[[Callable[[Pair], None]], Callable[[Pair], None]]:
    """A wrong module or cache around a right kernel."""

    def register(spoil: Callable[[Pair], None]) -> Callable[[Pair], None]:
        name = spoil.__name__
        SABOTEURS.add(name, Saboteur(name, _bug(spoil), applies, spoil=spoil, invisible=invisible))
        return spoil

    return register


def load_all() -> Registry[Saboteur]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"harness.saboteurs.{module.name}")
    return SABOTEURS


def _bug(function: Callable[..., object]) -> str:
    assert function.__doc__, f"{function.__name__} does not say which bug it stands for"
    return " ".join(function.__doc__.split())
