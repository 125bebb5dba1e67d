"""Kernels that hold all scores of a call (or of a slice of it) at once."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .core import HALVES, INF, Call, alive, peak, right, softmax, tiles

LOG2E = math.log2(math.e)


def dense(call: Call) -> Tensor:
    """The definition, in the wide dtype of the call."""
    q, k, v = call.inputs()
    return call.drop(softmax(call.masked(q @ k.mT * call.scale))) @ v


@right(note="scale after the product, normalised weights")
def textbook(call: Call) -> Tensor:
    """The definition: softmax(q k^T scale + mask) v."""
    return call.out(dense(call))


@right(note="torch.softmax on rows made safe where dead")
def torch_softmax(call: Call) -> Tensor:
    """The definition with torch.softmax; dead rows are zeroed after a softmax of zeros."""
    q, k, v = call.inputs()
    s = call.masked(q @ k.mT * call.scale)
    dead = (s == -INF).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return call.out(call.drop(p) @ v)


@right(note="(k q^T)^T and (v^T p^T)^T, softmax over the transposed scores")
def transposed(call: Call) -> Tensor:
    """Transposed products: scores as (k q^T)^T, output as (v^T p^T)^T."""
    q, k, v = call.inputs()
    p = call.drop(softmax(call.masked((k @ q.mT).mT * call.scale)))
    return call.out((v.mT @ p.mT).mT)


@right(note="torch.einsum for both products, grouped heads as an index")
def einsum(call: Call) -> Tensor:
    """Both products as einsum over (batch, key head, group)."""
    q, k, v = call.q.to(call.wide), call.k.to(call.wide), call.v.to(call.wide)
    b, h, rows, d = q.shape
    q = q.reshape(b, h // call.groups, call.groups, rows, d)
    s = torch.einsum("bngld,bnsd->bngls", q, k).reshape(b, h, rows, call.keys) * call.scale
    p = call.drop(softmax(call.masked(s))).reshape(b, h // call.groups, call.groups, rows, call.keys)
    return call.out(torch.einsum("bngls,bnsd->bngld", p, v).reshape(b, h, rows, v.shape[-1]))


@right(note="torch.bmm on (batch * heads)")
def bmm_flat(call: Call) -> Tensor:
    """Batched products on flattened heads."""
    q, k, v = call.inputs()
    b, h = q.shape[:2]
    s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul(call.scale).unflatten(0, (b, h))
    p = call.drop(softmax(call.masked(s)))
    return call.out(torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (b, h)))


@right(note="torch.baddbmm with all masks as its bias and the scale as its alpha")
def baddbmm_bias(call: Call) -> Tensor:
    """The mask as the bias of a fused product."""
    q, k, v = call.inputs()
    b, h = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1).mT, v.flatten(0, 1)
    merged = call.merged()
    if merged is None:
        s = torch.baddbmm(q.new_zeros(1, 1, 1), q, k, beta=0, alpha=call.scale)
    else:
        bias = merged.flatten(0, 1)
        closed = bias == -INF
        s = torch.baddbmm(bias.masked_fill(closed, 0.0), q, k, alpha=call.scale).masked_fill(closed, -INF)
    return call.out(torch.bmm(call.drop(softmax(s)), v).unflatten(0, (b, h)))


@right(note="q multiplied by the scale in the wide dtype")
def scale_in_q(call: Call) -> Tensor:
    """The scale folded in the queries."""
    q, k, v = call.inputs()
    return call.out(call.drop(softmax(call.masked((q * call.scale) @ k.mT))) @ v)


@right(note="k multiplied by the scale in the wide dtype")
def scale_in_k(call: Call) -> Tensor:
    """The scale folded in the keys."""
    q, k, v = call.inputs()
    return call.out(call.drop(softmax(call.masked(q @ (k * call.scale).mT))) @ v)


@right(note="as the math backend does; the sign of a negative scale goes to q")
def sqrt_scale_in_both(call: Call) -> Tensor:
    """The square root of the scale in queries and keys."""
    q, k, v = call.inputs()
    root = math.sqrt(abs(call.scale))
    s = (q * math.copysign(root, call.scale)) @ (k * root).mT
    return call.out(call.drop(softmax(call.masked(s))) @ v)


def base2(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """Masked scores in base 2; an added mask is shifted to row maximum 0 first, lest times log2(e) overflow it."""
    s = (q * (call.scale * LOG2E)) @ k.mT
    if call.bias is None:
        return call.masked(s)
    bias = call.merged()
    assert bias is not None
    shifted = (bias - peak(bias)) * LOG2E
    return (s + shifted).masked_fill(bias == -INF, -INF)


@right(note="log2(e) folded in the scale of q, as flash kernels do")
def exp2_folded(call: Call) -> Tensor:
    """Softmax with exp2, log2(e) folded in the scale."""
    q, k, v = call.inputs()
    s = base2(call, q, k)
    e = torch.exp2(s - peak(s))
    return call.out((call.drop(e) @ v) / alive(e.sum(-1, keepdim=True)))


@right(note="p = exp(s - lse), no division")
def lse_subtracted(call: Call) -> Tensor:
    """Weights as exp(score - log-sum-exp)."""
    q, k, v = call.inputs()
    s = call.masked(q @ k.mT * call.scale)
    m = peak(s)
    lse = m + alive(torch.exp(s - m).sum(-1, keepdim=True)).log()
    return call.out(call.drop(torch.exp(s - lse)) @ v)


@right(note="unnormalised weights times v, one division at the end")
def division_deferred(call: Call) -> Tensor:
    """The division by the row sum after the product with v."""
    q, k, v = call.inputs()
    s = call.masked(q @ k.mT * call.scale)
    e = torch.exp(s - peak(s))
    return call.out((call.drop(e) @ v) / alive(e.sum(-1, keepdim=True)))


@right(note="weights times the reciprocal of the row sum")
def reciprocal(call: Call) -> Tensor:
    """Multiplication by the reciprocal row sum."""
    q, k, v = call.inputs()
    s = call.masked(q @ k.mT * call.scale)
    e = torch.exp(s - peak(s))
    return call.out(call.drop(e * alive(e.sum(-1, keepdim=True)).reciprocal()) @ v)


@right(note="row sums and output from one product with v and a column of ones")
def ones_column(call: Call) -> Tensor:
    """The row sum as one more column of the product with v (two products under dropout)."""
    q, k, v = call.inputs()
    s = call.masked(q @ k.mT * call.scale)
    e = torch.exp(s - peak(s))
    one = torch.ones_like(v[..., :1])
    if call.dropout_p > 0:
        return call.out((call.drop(e) @ v) / alive(e @ one))
    both = e @ torch.cat((v, one), -1)
    return call.out(both[..., :-1] / alive(both[..., -1:]))


def typical(call: Call) -> Tensor | None:
    """Where rows attend without a strongly negative added mask: what a shift may be averaged over; None if all."""
    ok = call.attended()
    if call.bias is not None:
        near = call.bias.detach() > -30
        ok = near if ok is None else ok & near
    return ok


@right(note="the mean raw score of the attended keys is subtracted from every row before the maximum")
def row_mean_shift(call: Call) -> Tensor:
    """Scores minus their row mean, then softmax as usual."""
    q, k, v = call.inputs()
    s = q @ k.mT * call.scale
    ok = typical(call)
    weight = torch.ones_like(s) if ok is None else ok.to(s.dtype).expand_as(s)
    mean = (torch.where(weight > 0, s.detach(), 0.0).sum(-1, keepdim=True)) / weight.sum(-1, keepdim=True).clamp(min=1)
    return call.out(call.drop(softmax(call.masked(s - mean))) @ v)


@right(
    note="SageAttention's smoothing; the mean is over keys all live rows attend, so garbage behind a mask is no part"
)
def smooth_k(call: Call) -> Tensor:
    """Keys minus a mean key, which softmax does not see."""
    q, k, v = call.inputs()
    ok = typical(call)
    if ok is None:
        mean = k.detach().mean(-2, keepdim=True)
    else:
        common = (ok | ~ok.any(-1, keepdim=True)).all(-2)[..., None].to(k.dtype)
        common = common.expand(*k.shape[:2], call.keys, 1)
        mean = (k.detach() * common).sum(-2, keepdim=True) / common.sum(-2, keepdim=True).clamp(min=1)
    return call.out(call.drop(softmax(call.masked(q @ (k - mean).mT * call.scale))) @ v)


@right(note="q k^T and softmax in float64, p v in the wide dtype")
def scores_float64(call: Call) -> Tensor:
    """Scores and softmax in float64."""
    q, k, v = call.inputs()
    p = softmax(call.masked(q.double() @ k.double().mT * call.scale))
    return call.out(call.drop(p.to(call.wide)) @ v)


@right(note="p v with float64 accumulators")
def pv_float64(call: Call) -> Tensor:
    """The product with v in float64."""
    q, k, v = call.inputs()
    p = softmax(call.masked(q @ k.mT * call.scale))
    return call.out(call.drop(p).double() @ v.double())


@right(note="everything in float64, one rounding at the end")
def all_float64(call: Call) -> Tensor:
    """The definition in float64."""
    q, k, v = (t.double() for t in call.inputs())
    return call.out(call.drop(softmax(call.masked(q @ k.mT * call.scale))) @ v)


@right(note="half inputs: p rounded to the input dtype before p v (straight-through); others: as division_deferred")
def half_weights(call: Call) -> Tensor:
    """Unnormalised weights rounded to a half input dtype before the product with v."""
    q, k, v = call.inputs()
    s = call.masked(q @ k.mT * call.scale)
    e = torch.exp(s - peak(s))
    p = call.drop(e)
    return call.out((rounded(p, call.q.dtype) @ v) / alive(e.sum(-1, keepdim=True)))


@right(note="half inputs: normalised p rounded to the input dtype before p v (straight-through); others: textbook")
def half_normalised_weights(call: Call) -> Tensor:
    """Normalised weights rounded to a half input dtype before the product with v."""
    q, k, v = call.inputs()
    p = call.drop(softmax(call.masked(q @ k.mT * call.scale)))
    return call.out(rounded(p, call.q.dtype) @ v)


def rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor rounded to a half dtype, its gradient passed straight through; unchanged for other dtypes."""
    return p + (p.to(dtype).to(p.dtype) - p).detach() if dtype in HALVES else p


def _padded(call: Call, multiple: int) -> Tensor:
    """The definition with the head dimensions zero-padded to a multiple."""
    q, k, v = call.inputs()
    extra, extra_v = -q.shape[-1] % multiple, -v.shape[-1] % multiple
    q, k, v = F.pad(q, (0, extra)), F.pad(k, (0, extra)), F.pad(v, (0, extra_v))
    out = call.drop(softmax(call.masked(q @ k.mT * call.scale))) @ v
    return call.out(out[..., : call.v.shape[-1]])


@right(note="D and D_v zero-padded to multiples of 8, cropped")
def padded_8(call: Call) -> Tensor:
    """Head dimensions padded to multiples of 8."""
    return _padded(call, 8)


@right(note="D and D_v zero-padded to multiples of 32, cropped")
def padded_32(call: Call) -> Tensor:
    """Head dimensions padded to multiples of 32."""
    return _padded(call, 32)


@right(note="D and D_v zero-padded to multiples of 64, cropped")
def padded_64(call: Call) -> Tensor:
    """Head dimensions padded to multiples of 64."""
    return _padded(call, 64)


@right(note="S padded to a multiple of 64 with zero keys that no row attends")
def padded_keys(call: Call) -> Tensor:
    """Keys and values padded to a multiple of 64 keys and masked out."""
    q, k, v = call.inputs()
    extra = -call.keys % 64
    s = call.masked((q @ F.pad(k, (0, 0, 0, extra)).mT * call.scale)[..., : call.keys])
    return call.out(call.drop(softmax(F.pad(s, (0, extra), value=-INF))) @ F.pad(v, (0, 0, 0, extra)))


def _permuted(call: Call, order: Tensor) -> Tensor:
    """The definition with the keys in another order."""
    q, k, v = call.inputs()
    k, v = k.index_select(-2, order), v.index_select(-2, order)
    s, merged = q @ k.mT * call.scale, call.merged()
    if merged is not None:
        bias = merged.index_select(-1, order)
        s = (s + bias).masked_fill(bias == -INF, -INF)
    e = torch.exp(s - peak(s))
    return call.out((call.drop(e) @ v) / alive(e.sum(-1, keepdim=True)))


@right(note="odd keys first, then the even ones")
def keys_permuted(call: Call) -> Tensor:
    """Attention over the keys in a permuted order."""
    device = call.q.device
    order = (torch.arange(1, call.keys, 2, device=device), torch.arange(0, call.keys, 2, device=device))
    return _permuted(call, torch.cat(order))


@right(note="the last key first")
def keys_reversed(call: Call) -> Tensor:
    """Attention over the keys from the last to the first, all at once."""
    return _permuted(call, torch.arange(call.keys - 1, -1, -1, device=call.q.device))


@right(note="a Python loop over the heads, 2-D products per batch entry")
def head_loop(call: Call) -> Tensor:
    """Head by head."""
    batch, wide = (0, call.q.shape[0]), call.widened()
    return call.out(torch.cat([dense(wide.part(batch, (h, h + 1))) for h in range(call.q.shape[1])], 1))


@right(note="a Python loop over the batch, deferred division")
def batch_loop(call: Call) -> Tensor:
    """Batch entry by batch entry."""

    def one(part: Call) -> Tensor:
        q, k, v = part.inputs()
        s = part.masked(q @ k.mT * part.scale)
        e = torch.exp(s - peak(s))
        return (part.drop(e) @ v) / alive(e.sum(-1, keepdim=True))

    heads, wide = (0, call.q.shape[1]), call.widened()
    return call.out(torch.cat([one(wide.part((b, b + 1), heads)) for b in range(call.q.shape[0])], 0))


@right(note="row by row up to 64 rows, more in 64 blocks; causal rows see only their own keys")
def row_loop(call: Call) -> Tensor:
    """A Python loop over the rows, each over no more keys than it may attend."""
    q, k, v = call.inputs()
    out = []
    for span in tiles(call.rows, -(-call.rows // 64)):
        end = min(span[1], call.keys) if call.causal else call.keys
        s = q[..., span[0] : span[1], :] @ k[..., :end, :].mT * call.scale
        p = softmax(call.masked(s, span, (0, end)))
        out.append(call.drop(p) @ v[..., :end, :])
    return call.out(torch.cat(out, -2))


@right(note="the heads of a group stacked as rows over one key head")
def grouped_rows(call: Call) -> Tensor:
    """Grouped heads as more rows, keys never repeated."""
    q, k, v = call.q.to(call.wide), call.k.to(call.wide), call.v.to(call.wide)
    b, h, rows, d = q.shape
    n = call.k.shape[1]
    s = (q.reshape(b, n, call.groups * rows, d) @ k.mT).reshape(b, h, rows, call.keys) * call.scale
    p = call.drop(softmax(call.masked(s)))
    return call.out((p.reshape(b, n, call.groups * rows, call.keys) @ v).reshape(b, h, rows, v.shape[-1]))


@right(note="key heads repeated by a stride-0 expand in a 5-D product")
def expanded_heads(call: Call) -> Tensor:
    """Key heads repeated by expand."""
    q, k, v = call.q.to(call.wide), call.k.to(call.wide), call.v.to(call.wide)
    b, h, rows, d = q.shape
    n, g = call.k.shape[1], call.groups
    k = k[:, :, None].expand(b, n, g, *k.shape[-2:])
    v = v[:, :, None].expand(b, n, g, *v.shape[-2:])
    s = (q.reshape(b, n, g, rows, d) @ k.mT).reshape(b, h, rows, call.keys) * call.scale
    p = call.drop(softmax(call.masked(s))).reshape(b, n, g, rows, call.keys)
    return call.out((p @ v).reshape(b, h, rows, v.shape[-1]))


@right(note="scores as sums of elementwise products, blocks of rows, no matrix product")
def elementwise_products(call: Call) -> Tensor:
    """Both products by elementwise multiplication and sum, in blocks of rows."""
    q, k, v = call.inputs()
    heads = q.shape[0] * q.shape[1]
    block = max(1, 2_000_000 // (heads * call.keys * max(k.shape[-1], v.shape[-1])))
    out = []
    for span in tiles(call.rows, max(block, -(-call.rows // 64))):
        s = (q[..., span[0] : span[1], None, :] * k[..., None, :, :]).sum(-1) * call.scale
        p = call.drop(softmax(call.masked(s, span)))
        out.append((p[..., None] * v[..., None, :, :]).sum(-2))
    return call.out(torch.cat(out, -2))


@right(note="scores summed over slices of 16 of the head dimension")
def split_d(call: Call) -> Tensor:
    """Scores accumulated over slices of the head dimension."""
    q, k, v = call.inputs()
    spans = tiles(q.shape[-1], 16)
    s = q[..., : spans[0][1]] @ k[..., : spans[0][1]].mT
    for a, b in spans[1:]:
        s = s + q[..., a:b] @ k[..., a:b].mT
    return call.out(call.drop(softmax(call.masked(s * call.scale))) @ v)


@right(note="F.linear per head for the scores, transposed layouts made contiguous first")
def contiguous_layouts(call: Call) -> Tensor:
    """Keys copied to (D, S) and values to (D_v, S) layout before the products."""
    q, k, v = call.inputs()
    s = q.contiguous() @ k.mT.contiguous() * call.scale
    p = call.drop(softmax(call.masked(s)))
    return call.out(p @ v.mT.contiguous().mT)


@right(compile=False, note="textbook under torch.utils.checkpoint: the backward recomputes everything")
def checkpointed(call: Call) -> Tensor:
    """The definition, recomputed in the backward."""
    kept = call.kept()

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        part = replace(call, q=q, k=k, v=v, bias=bias)
        q, k, v = part.inputs()
        p = softmax(part.masked(q @ k.mT * part.scale))
        return part.out((p if kept is None else p * kept) @ v)

    inputs = (call.q, call.k, call.v, call.bias)
    if not torch.is_grad_enabled():
        return run(*inputs)
    out = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(out, Tensor)
    return out
