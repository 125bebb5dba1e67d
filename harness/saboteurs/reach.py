"""What reaches the kernel in a cell: the shapes and the call of every step, and what each query may see.

`applies` is answered from these, so that it follows the calls that a kernel really gets: a decode step's causal flag is
dropped before it arrives, absorbed MLA has one key/value head, and so on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from harness import masks
from harness.build import steps_of
from harness.case import Case
from harness.kernels.call import AttentionCall
from harness.kernels.front import make_call
from harness.saboteurs.saboteur import Applies
from harness.specs import VARIANTS
from harness.specs.latent import absorbs


@dataclass(frozen=True, eq=False)
class Reached:
    """One call of a cell. q, k and v have the right shapes and no content."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: AttentionCall
    visible: Tensor  # bool, broadcastable to (B, H, L, S), its last two dimensions whole

    @property
    def groups(self) -> tuple[int, int]:
        """Query heads and key/value heads."""
        return self.q.shape[1], self.k.shape[1]


@lru_cache(maxsize=64)
def calls_of(case: Case) -> tuple[Reached, ...]:
    return tuple(_reached(case, queries, keys) for queries, keys in steps_of(case))


def any_call(test: Callable[[Reached], bool]) -> Applies:
    return lambda case: any(test(reached) for reached in calls_of(case))


def some_query(test: Callable[[Tensor], Tensor]) -> Applies:
    """`test` maps what each query sees, (..., L, S), to whether the bug touches that query, (..., L)."""
    return any_call(lambda reached: bool(test(reached.visible).any()))


def both(*conditions: Applies) -> Applies:
    return lambda case: all(condition(case) for condition in conditions)


def in_training(case: Case) -> bool:
    return case.phase == "train"


def compares_weights(case: Case) -> bool:
    reference = VARIANTS[case.variant].reference(case)
    return reference == "torch_mha" and case.phase == "prefill" and not masks.MASKS[case.mask].has_dead_rows


# A softmax over one key is 1 whatever its score.
attends_several = some_query(lambda visible: visible.sum(-1) > 1)
several_queries = any_call(lambda reached: reached.q.shape[2] > 1)
several_heads = any_call(lambda reached: reached.groups[0] > 1)
several_kv_heads = any_call(lambda reached: reached.groups[1] > 1)


def several_rows(case: Case) -> bool:
    return case.batch > 1


def _reached(case: Case, queries: range, keys: range) -> Reached:
    L, S = len(queries), len(keys)
    kv_heads, D, D_v, scale = case.kv_heads, case.head_dim, case.head_dim, None
    if case.kv_lora_rank is not None:
        assert case.rope_head_dim is not None and case.v_head_dim is not None
        N, R, V, r = case.head_dim, case.rope_head_dim, case.v_head_dim, case.kv_lora_rank
        kv_heads, D, D_v = (1, r + R, r) if absorbs(case, L, S) else (case.heads, N + R, V)
        scale = (N + R) ** -0.5
    assert kv_heads is not None
    nothing = torch.zeros((), dtype=getattr(torch, case.dtype))
    q = nothing.expand(case.batch, case.heads, L, D)
    k, v = (nothing.expand(case.batch, kv_heads, S, width) for width in (D, D_v))
    rule = masks.MASKS[case.mask]
    at = masks.positions(case.batch, case.heads, queries, keys, case.seq_len)
    window = None if rule.window is None else rule.window(case.seq_len)
    mask = masks.remainder(rule, at, q.dtype)
    call = make_call(q, k, v, mask=mask, causal=rule.causal, window=window, scale=scale)
    return Reached(q, k, v, call, seen(call, q, k))


def seen(call: AttentionCall, q: Tensor, k: Tensor) -> Tensor:
    """`call.allowed`, with both of its last dimensions whole."""
    whole = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = call.allowed(q, k)
    return whole if allowed is None else allowed & whole
