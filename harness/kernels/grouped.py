"""A few queries over a long cache: decode steps of GQA, MQA and latent attention.

The work is reading K and V, so each is read once, where it lies: no head is repeated, no view of a longer buffer
copied, and a half-precision cache is widened a piece at a time rather than whole. Where eager's lines do just that, or
for more than FEW rows per key head (G * L: prefill, training), which it is not made for, it takes those.
"""

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager, weigh
from harness.kernels.names import FEW
from harness.kernels.tiles import SHARE, cache_bytes
from harness.kernels.transforms import is_transformed

THIN = 8  # rows: fewer are a poor left-hand side, so keys that come from memory multiply them instead
PIECE_BYTES = 1 << 22  # of a widened piece: stays in cache between being written and being read


def grouped(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    return eager(q, k, v, call) if is_transformed() else grouped_plainly(q, k, v, call)


def grouped_plainly(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """For who has asked already: nothing records or transforms this call."""
    B, H, L, D = q.shape
    _, H_kv, S, _ = k.shape
    rows = H // H_kv * L
    wide = torch.promote_types(q.dtype, torch.float32)
    if (
        rows > FEW
        or 0 in (q.numel(), k.numel())
        or (k.dtype == wide and not _is_thin(rows, k) and _folds(k) and _folds(v))
    ):
        return eager(q, k, v, call)
    queries = (q.to(wide) * call.scale).reshape(B, H_kv, rows, D)
    length = S if k.dtype == wide else piece_length(k, v)

    scores = [score(queries, piece.to(wide)) for piece in k.split(length or 1, dim=2)]  # (B, H_kv, G*L, piece)
    joined = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    weights = weigh(joined.view(B, H, L, S), call.allowed(q, k), call)

    parts = zip(weights.reshape(B, H_kv, rows, S).split(length or 1, dim=-1), v.split(length or 1, dim=2), strict=True)
    first, *others = (multiply(weight, piece.to(wide)) for weight, piece in parts)  # (B, H_kv, G*L, D_v)
    out = sum(others, first)
    return out.view(B, H, L, v.shape[-1]).to(q.dtype), weights.to(q.dtype)


def score(queries: Tensor, k: Tensor) -> Tensor:
    """queries (B, H_kv, rows, D) times k (B, H_kv, S, D): (B, H_kv, rows, S), contiguous."""
    if _is_thin(queries.shape[2], k):
        return multiply(k, queries.mT).mT.contiguous()
    return multiply(queries, k.mT)


def _is_thin(rows: int, k: Tensor) -> bool:
    """Keys of more than a share of the cache are taken to come from memory: the order of the product, and so the last
    digit, follows the machine's cache."""
    return rows < THIN and k.numel() * k.itemsize > cache_bytes() // SHARE


def _folds(t: Tensor) -> bool:
    """Whether batch and heads are one dimension in memory."""
    return t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b. Where batch and heads do not fold into one dimension, torch's product would copy: then row by row."""
    if _folds(a) and _folds(b):
        return a @ b
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)])


def piece_length(k: Tensor, v: Tensor) -> int:
    """Keys per piece, if pieces are to fit."""
    per_key = 4 * k.shape[0] * k.shape[1] * max(k.shape[3], v.shape[3], 1)
    return max(64, PIECE_BYTES // max(per_key, 1))


KERNEL = Kernel("grouped", grouped, gives_weights=True)
