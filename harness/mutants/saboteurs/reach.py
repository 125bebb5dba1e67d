"""In which cells a bug exists: the shapes and the call of every step, who sees whom, and by which way through MLA.

`applies` is answered from these, so that it follows the calls that a kernel really gets: a decode step's causal flag is
dropped before it arrives, absorbed MLA has one key/value head, and so on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from harness.case import Case
from harness.cell.build import steps_of
from harness.kernels.call import AttentionCall
from harness.kernels.front import make_call
from harness.mutants.saboteurs.saboteur import Applies
from harness.variants import masks
from harness.variants.specs import VARIANTS
from harness.variants.specs.latent import absorbs


def is_latent(case: Case) -> bool:
    return case.kv_lora_rank is not None


def is_block(case: Case) -> bool:
    return case.variant.startswith("block_")


def keeps_values(case: Case) -> bool:
    """Whether the candidate's cache has a stream of values, not one of latents."""
    return not is_latent(case) or _mode(case) == "naive"


def decoded(case: Case) -> Tensor:
    """(S,): tokens that come one at a time, behind a filled cache."""
    return torch.arange(case.seq_len) >= (context(case) if case.phase == "decode" else case.seq_len)


def context(case: Case) -> int:
    """Tokens that come at once, or that are given to the last of single steps."""
    steps = steps_of(case)
    first, last = steps[0][0], steps[-1][0]
    return first.stop if first.start == 0 else last.start


def absorbed(case: Case) -> Tensor:
    """(S,): queries of MLA that attend in latent space."""
    rows = torch.zeros(case.seq_len, dtype=torch.bool)
    if not is_latent(case) or _mode(case) == "naive":
        return rows
    for queries, keys in steps_of(case):
        rows[queries.start : queries.stop] = absorbs(case, len(queries), len(keys))
    return rows


def expanded(case: Case) -> Tensor:
    """(S,): queries of MLA that attend decompressed keys and values."""
    return ~absorbed(case) if is_latent(case) else torch.zeros(case.seq_len, dtype=torch.bool)


def chooses(case: Case, rows: Tensor | None = None) -> bool:
    """Whether one of these queries (all, unless given) sees two keys: over one key every softmax is 1."""
    return bool(((visible(case).sum(-1) >= 2) & (True if rows is None else rows)).any())


def visible(case: Case) -> Tensor:
    """(B, H, S, S), True = attends: what the mask allows of the keys that are there at the query's step."""
    there = torch.zeros(case.seq_len, case.seq_len, dtype=torch.bool)
    for queries, keys in steps_of(case):
        there[queries.start : queries.stop, : keys.stop] = True
    return _allowed(case.mask, case.batch, case.heads, case.seq_len) & there


@lru_cache(maxsize=8)
def _allowed(mask: str, batch: int, heads: int, seq_len: int) -> Tensor:
    at = masks.positions(batch, heads, range(seq_len), range(seq_len), seq_len)
    dense = masks.dense(masks.MASKS[mask], at, torch.float64)
    shape = (batch, heads, seq_len, seq_len)
    if dense is None:
        return torch.ones(1, dtype=torch.bool).expand(shape)
    return (dense if dense.dtype == torch.bool else dense != float("-inf")).expand(shape)


def _mode(case: Case) -> str:
    return str(VARIANTS[case.variant].swap_options["mode"])


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
