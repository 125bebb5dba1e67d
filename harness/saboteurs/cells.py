"""In which cells a bug exists: who sees whom, and which tokens take which way through the candidate."""

from functools import lru_cache

import torch
from torch import Tensor

from harness import masks
from harness.build import steps_of
from harness.case import Case
from harness.specs import VARIANTS
from harness.specs.latent import absorbs


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
    """Tokens that come at once."""
    return len(steps_of(case)[0][0])


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
