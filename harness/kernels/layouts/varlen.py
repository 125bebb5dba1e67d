"""flash_attn_varlen_func's: the tokens of all sequences in one row, and where each sequence begins.

Each batch row becomes a sequence of its own length. What can be said, with the same sight for all heads:
  - every query of a row sees the same keys (right or left padding, or none): all L queries over the keys that they see
  - causal, bottom-right, over all keys
  - causal and right padding, both from key 0 on: the first n queries of a row over its n keys. The queries after them
    are padding, which no caller of such a kernel passes. SDPA has an answer for them (they see all n keys), so the
    layout fills it in by the plain formula: it is no merit of the kernel's, and no fault.
A row without any key is a sequence of length 0 and must give 0. Everything else is refused.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from harness.kernels import shield
from harness.kernels.call import AttentionCall
from harness.kernels.eager import KERNEL as EAGER
from harness.kernels.layouts.layout import Layout, Prepared, SdpaCall
from harness.kernels.layouts.sight import causal, visible


class Packing(NamedTuple):
    """Which queries and keys of each batch row go to the kernel: bool, (B, L) and (B, S)."""

    queries: Tensor
    keys: Tensor
    is_causal: bool


class Memo(NamedTuple):
    queries: Tensor  # (B, L): where the kernel's rows belong
    rest: Tensor | None  # (B, H, L, D_v): what the others get; None if there are none


def prepare(call: SdpaCall) -> Prepared:
    seen = visible(call, LAYOUT)
    packing = _pack(call, seen)
    q, k, v = (
        t.transpose(1, 2)[kept]  # (tokens, H, D)
        for t, kept in zip((call.q, call.k, call.v), (packing.queries, packing.keys, packing.keys), strict=True)
    )
    starts = [_starts(kept) for kept in (packing.queries, packing.keys)]
    longest = [int(kept.sum(1).max()) if kept.numel() else 0 for kept in (packing.queries, packing.keys)]
    options = {"dropout_p": call.dropout_p, "softmax_scale": call.scale, "causal": packing.is_causal}
    rest = None if bool(packing.queries.all()) else _by_formula(call, seen)
    return Prepared(
        (q, k, v, *starts, *longest), options, shape=(*q.shape[:2], v.shape[2]), memo=Memo(packing.queries, rest)
    )


def restore(result: Tensor, memo: Memo) -> Tensor:
    (B, L), (_, H, D_v) = memo.queries.shape, result.shape
    out = result.new_zeros(B, L, H, D_v).index_put(memo.queries.nonzero(as_tuple=True), result).transpose(1, 2)
    return out if memo.rest is None else torch.where(memo.queries[:, None, :, None], out, memo.rest.to(out.dtype))


def _pack(call: SdpaCall, seen: Tensor | None) -> Packing:
    (B, _, L, _), S = call.q.shape, call.k.shape[2]
    every_query, every_key = torch.ones(B, L, dtype=torch.bool), torch.ones(B, S, dtype=torch.bool)
    if seen is None or L == 0:
        return Packing(every_query, every_key, is_causal=False)
    seen = seen[:, 0].expand(B, L, S)
    if bool((seen == seen[:, :1]).all()):
        return Packing(every_query, seen[:, 0], is_causal=False)
    if bool((seen == causal(L, S, S - L)).all()):
        return Packing(every_query, every_key, is_causal=True)
    n = seen[:, -1].sum(-1, keepdim=True)  # (B, 1): the last query sees the most keys
    keys = torch.arange(S) < n  # (B, S)
    if bool((seen == (causal(L, S, 0) & keys[:, None])).all()):
        return Packing(torch.arange(L) < n, keys, is_causal=True)
    raise LAYOUT.refuse("what this call hides: sequences have a length each, and causal is aligned bottom-right")


def _starts(kept: Tensor) -> Tensor:
    """(B + 1,): where each sequence begins among the packed tokens, and where the last one ends."""
    return torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _by_formula(call: SdpaCall, seen: Tensor | None) -> Tensor:
    scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
    asked = AttentionCall(scale, mask=seen, dropout_p=call.dropout_p)
    return shield.run(EAGER, call.q, call.k, call.v, asked)[0]


LAYOUT = Layout(
    "varlen",
    prepare,
    restore,
    "f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,"
    " causal=False) with q (tokens, H, D), as flash_attn_varlen_func",
    limits={"masks": ["none", "bool", "causal"]},
)
