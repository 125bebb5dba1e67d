"""A decode step over a paged cache: one query a row, keys and values in pages that a block table names.

Pages lie in random order. Some belong to nobody and are NaN: whoever reads one took a wrong number. The tail of a row's
last page, and the page that unused entries of the table name, hold what an earlier owner left: large finite numbers,
which a kernel may load as long as it gives them no weight. A row's length is the number of keys that it sees, whichever
they are: their order is nothing to attention. A row that sees none has length 0 and must give 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from harness.kernels.layouts.layout import Layout, Prepared, SdpaCall
from harness.kernels.layouts.sight import visible

PAGE = 16  # keys
STALE = 3  # pages of nobody
LEFT_BEHIND = 100.0  # the size of an earlier owner's numbers: they would win every softmax, and overflow in none


class Dealt(NamedTuple):
    table: Tensor  # (B, most pages of a row): which pages, in order
    nobodys: Tensor  # (STALE,): pages that are named nowhere
    pages: int  # in all


def prepare(call: SdpaCall) -> Prepared:
    (B, _, L, _), S = call.q.shape, call.k.shape[2]
    if L != 1:
        raise LAYOUT.refuse(f"{L} queries: one step of decoding has one")
    if call.dropout_p > 0:
        raise LAYOUT.refuse("dropout")
    seen = visible(call, LAYOUT)
    kept = torch.ones(B, S, dtype=torch.bool) if seen is None else seen[:, 0, 0].expand(B, S)
    lengths = kept.sum(1)
    # A generator of its own: torch's random numbers are the kernel's and the caller's.
    generator = torch.Generator().manual_seed(S)
    table, nobodys, total = _deal(lengths, generator)
    rows, keys = kept.nonzero(as_tuple=True)
    nth = (kept.cumsum(1) - 1)[rows, keys]  # of the keys of its row
    places = (table[rows, nth // PAGE], nth % PAGE)
    pages = []
    for t in (call.k, call.v):
        shape = (total, PAGE, t.shape[1], t.shape[3])
        left = (LEFT_BEHIND * torch.randn(shape, generator=generator)).to(t.dtype)
        left[nobodys] = float("nan")
        pages.append(left.index_put(places, t.transpose(1, 2)[rows, keys]))  # (pages, PAGE, H_kv, D)
    q = call.q.squeeze(2)  # (B, H, D)
    arguments = (q, *pages, table.to(torch.int32), lengths.to(torch.int32))
    return Prepared(arguments, {"softmax_scale": call.scale}, shape=(*q.shape[:2], call.v.shape[3]))


def restore(result: Tensor, memo: None) -> Tensor:
    return result.unsqueeze(2)  # (B, H, 1, D_v)


def _deal(lengths: Tensor, generator: torch.Generator) -> Dealt:
    """Pages at random: first one that unused entries name, then those of nobody, then each row's own."""
    own = (lengths + PAGE - 1) // PAGE  # (B,)
    numbers = torch.randperm(1 + STALE + int(own.sum()), generator=generator)
    nth = torch.arange(max(int(own.max()), 1))  # (most pages of a row,)
    first = 1 + STALE + own.cumsum(0) - own  # (B,)
    entries = torch.where(nth < own[:, None], first[:, None] + nth, 0)
    return Dealt(numbers[entries], numbers[1 : 1 + STALE], numbers.numel())


LAYOUT = Layout(
    "paged",
    prepare,
    restore,
    "f(q, k_pages, v_pages, block_table, seq_lens, softmax_scale=None)"
    " with q (B, H, D), k_pages (pages, page size, H_kv, D)",
    limits={"decode_only": True, "dropout": False, "masks": ["none", "bool", "causal"]},
)
