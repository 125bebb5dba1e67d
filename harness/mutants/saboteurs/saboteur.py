"""What a saboteur is: one small wrong function, the real bug it stands for, and the cells in which that bug exists.

`attend` is a right attention in small steps. A saboteur replaces one; what it leaves alone is right, to the bit.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import Case
from harness.cell.build import Pair
from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.registry import Registry
from harness.variants.specs import VARIANTS, Core

T = TypeVar("T")
Wrong = TypeVar("Wrong", bound=Callable[..., object])
Result = tuple[Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]
Spoil = Callable[[Pair], None]
Applies = Callable[[Case], bool]


def spread(kv: Tensor, heads: int) -> Tensor:
    """(B, H_kv, S, D) -> (B, H, S, D): neighbouring query heads share a key/value head."""
    return kv if kv.shape[1] == heads else kv.repeat_interleave(heads // kv.shape[1], dim=1)


def score(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """(B, H, L, S), before anything is hidden."""
    scores = (q * call.scale) @ k.mT
    return scores if call.bias is None else scores + call.bias.to(scores.dtype)


def normalise(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)


def drop(weights: Tensor, p: float) -> Tensor:
    return F.dropout(weights, p) if p > 0 else weights


def mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v  # (B, H, L, D_v)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    *,
    spread: Callable[[Tensor, int], Tensor] = spread,
    score: Callable[[Tensor, Tensor, AttentionCall], Tensor] = score,
    normalise: Callable[[Tensor], Tensor] = normalise,
    drop: Callable[[Tensor, float], Tensor] = drop,
    mix: Callable[[Tensor, Tensor], Tensor] = mix,
) -> Result:
    if call.softcap is not None or call.sinks is not None:
        raise Unsupported("saboteurs have no softcap and no sinks: no cell of a grid asks for them")
    dtype, heads = q.dtype, q.shape[1]
    q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
    k, v = spread(k, heads), spread(v, heads)
    scores = score(q, k, call)
    allowed = call.allowed(q, k)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    weights = normalise(scores)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)  # a row that may attend nothing is 0/0 above
    weights = drop(weights, call.dropout_p)
    return mix(weights, v).to(dtype), weights.to(dtype)


def everywhere(case: Case) -> bool:
    return True


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
    spoil: Spoil | None = None
    invisible: Callable[[Case], str | None] = lambda case: None
    core: Core = "softmax"  # what the variants that it can be in are made around


SABOTEURS: Registry[Saboteur] = Registry("saboteur")


def in_kernel(*, applies: Applies = everywhere, shielded: bool = True) -> Callable[[Run], Run]:
    """A wrong kernel. Behind the shield, as our own kernels are, unless it is the shield's work that is missing."""

    def register(run: Run) -> Run:
        wrong = Kernel(run.__name__, run, gives_weights=True, shielded=shielded, origin="saboteur")
        return _register(run, applies, kernel=lambda: wrong)

    return register


def in_step(step: str, *, applies: Applies = everywhere) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A wrong step of `attend`: score, normalise, drop or mix."""

    def register(wrong: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @in_kernel(applies=applies)
        @wraps(wrong)
        def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
            steps: dict[str, Any] = {step: wrong}
            return attend(q, k, v, call, **steps)

        return wrong

    return register


def with_memory(*, applies: Applies = everywhere) -> Callable[[Callable[[], Run]], Callable[[], Run]]:
    """A factory of wrong kernels that remember earlier calls: each judged cell gets its own."""

    def register(make: Callable[[], Run]) -> Callable[[], Run]:
        name = make.__name__
        return _register(make, applies, kernel=lambda: Kernel(name, make(), gives_weights=True, origin="saboteur"))

    return register


def in_module(*, applies: Applies) -> Callable[[Spoil], Spoil]:
    """A wrong module or cache around a right kernel."""
    return lambda spoil: _register(spoil, applies, spoil=spoil)


def in_class(
    put: Callable[[Pair, type[T]], None], name: str, *, applies: Applies, core: Core = "softmax"
) -> Callable[[type[T]], type[T]]:
    """A wrong class, whose docstring says which bug it stands for; `put` sets it in the place of the right one."""
    return lambda wrong: _register(wrong, applies, name=name, core=core, spoil=lambda pair: put(pair, wrong))


def load_all() -> Registry[Saboteur]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"harness.mutants.saboteurs.{module.name}")
    return SABOTEURS


def _register(wrong: Wrong, applies: Applies, *, name: str | None = None, core: Core = "softmax", **how: Any) -> Wrong:
    assert wrong.__doc__, f"{wrong.__name__} does not say which bug it stands for"
    name = name or wrong.__name__

    def is_there(case: Case) -> bool:
        return VARIANTS[case.variant].core == core and applies(case)

    SABOTEURS.add(name, Saboteur(name, " ".join(wrong.__doc__.split()), is_there, core=core, **how))
    return wrong
