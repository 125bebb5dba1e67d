"""Kernels that walk over the keys in tiles, and those that merge the results of parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .core import INF, Call, alive, peak, right, tiles
from .dense import LOG2E, rounded


def online(call: Call, spans: list[tuple[int, int]], half: bool = False) -> Tensor:
    """Softmax in one pass over the key spans, with a running maximum and rescaled sums."""
    q, k, v = call.inputs()
    m = q.new_full((*q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for a, b in spans:
        s = call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b))
        top = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        e, alpha = torch.exp(s - safe), torch.exp(m - safe)
        total = total * alpha + e.sum(-1, keepdim=True)
        p = rounded(call.drop(e), call.q.dtype) if half else call.drop(e)
        acc = acc * alpha + p @ v[..., a:b, :]
        m = top
    return call.out(acc / alive(total))


@right(note="online softmax over tiles of 16 keys")
def online_16(call: Call) -> Tensor:
    """Online softmax, 16 keys a tile."""
    return online(call, tiles(call.reach, 16))


@right(note="online softmax over tiles of 64 keys")
def online_64(call: Call) -> Tensor:
    """Online softmax, 64 keys a tile."""
    return online(call, tiles(call.reach, 64))


@right(note="online softmax over tiles of 100 keys")
def online_100(call: Call) -> Tensor:
    """Online softmax, 100 keys a tile."""
    return online(call, tiles(call.reach, 100))


@right(note="online softmax over tiles of 128 keys")
def online_128(call: Call) -> Tensor:
    """Online softmax, 128 keys a tile."""
    return online(call, tiles(call.reach, 128))


@right(note="online softmax over tiles of 257 keys")
def online_257(call: Call) -> Tensor:
    """Online softmax, 257 keys a tile."""
    return online(call, tiles(call.reach, 257))


@right(note="online softmax over tiles of 64 keys from the last to the first")
def online_backwards(call: Call) -> Tensor:
    """Online softmax from the last tile to the first."""
    return online(call, tiles(call.reach, 64)[::-1])


@right(note="online softmax over tiles growing 1, 2, 4, ... keys")
def online_growing(call: Call) -> Tensor:
    """Online softmax over tiles of doubling size."""
    spans, start, size = [], 0, 1
    while start < call.reach:
        spans.append((start, min(start + size, call.reach)))
        start, size = start + size, 2 * size
    return online(call, spans)


@right(note="half inputs: p rounded to the input dtype in every tile of 64 keys (straight-through); others: online_64")
def online_half(call: Call) -> Tensor:
    """Flash-style online softmax with half weights."""
    return online(call, tiles(call.reach, 64), half=True)


@right(note="tiles of 32 rows and 64 keys, causal tiles in the future skipped")
def online_2d(call: Call) -> Tensor:
    """Online softmax over tiles of rows and keys."""
    q, k, v = call.inputs()
    out = []
    for rows in tiles(call.rows, max(32, -(-call.rows // 16))):
        block = q[..., rows[0] : rows[1], :]
        m = block.new_full((*block.shape[:-1], 1), -INF)
        total, acc = torch.zeros_like(m), block.new_zeros(*block.shape[:-1], v.shape[-1])
        end = min(rows[1], call.keys) if call.causal else call.keys
        for a, b in tiles(end, 64):
            s = call.masked(block @ k[..., a:b, :].mT * call.scale, rows, (a, b))
            top = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            safe = torch.where(top == -INF, 0.0, top)
            e, alpha = torch.exp(s - safe), torch.exp(m - safe)
            total = total * alpha + e.sum(-1, keepdim=True)
            acc = acc * alpha + call.drop(e) @ v[..., a:b, :]
            m = top
        out.append(acc * alive(total).reciprocal())
    return call.out(torch.cat(out, -2))


@right(note="exp2 of (score - maximum) * log2(e) in tiles of 128 keys")
def online_exp2(call: Call) -> Tensor:
    """Online softmax with exp2."""
    q, k, v = call.inputs()
    m = q.new_full((*q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for a, b in tiles(call.reach, 128):
        s = call.masked((q * call.scale) @ k[..., a:b, :].mT, cols=(a, b))
        top = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        e, alpha = torch.exp2((s - safe) * LOG2E), torch.exp2((m - safe) * LOG2E)
        total = total * alpha + e.sum(-1, keepdim=True)
        acc = acc * alpha + call.drop(e) @ v[..., a:b, :]
        m = top
    return call.out(acc / alive(total))


@right(note="the reference maximum moves only where it grew by more than 8 log(2), as in FlashAttention-4")
def lazy_rescale(call: Call) -> Tensor:
    """Online softmax that rescales only when the maximum grows by much."""
    q, k, v = call.inputs()
    m = q.new_full((*q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for a, b in tiles(call.reach, 64):
        s = call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b))
        top = s.detach().amax(-1, keepdim=True)
        new = torch.where(top - m > 8 / LOG2E, top, m)
        safe = torch.where(new == -INF, 0.0, new)
        e, alpha = torch.exp(s - safe), torch.exp(m - safe)
        total = total * alpha + e.sum(-1, keepdim=True)
        acc = acc * alpha + call.drop(e) @ v[..., a:b, :]
        m = new
    return call.out(acc / alive(total))


@right(note="each tile normalised at once: the output stays an average through all tiles of 64 keys")
def online_normalised(call: Call) -> Tensor:
    """Online softmax whose running output is always normalised."""
    q, k, v = call.inputs()
    m = q.new_full((*q.shape[:-1], 1), -INF)
    total, out = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for a, b in tiles(call.reach, 64):
        s = call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b))
        top = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        safe = torch.where(top == -INF, 0.0, top)
        e, old = torch.exp(s - safe), total * torch.exp(m - safe)
        total = old + e.sum(-1, keepdim=True)
        out = out * (old / alive(total)) + (call.drop(e) @ v[..., a:b, :]) / alive(total)
        m = top
    return call.out(out)


def maximum(call: Call, q: Tensor, k: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """The row maxima of the masked scores over key spans, 0 for dead rows."""
    with torch.no_grad():
        parts = [call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b)).amax(-1, keepdim=True) for a, b in spans]
        m = torch.cat(parts, -1).amax(-1, keepdim=True)
        return torch.where(m == -INF, 0.0, m)


@right(note="a pass for the maxima, a pass for sums and output, tiles of 64 keys")
def two_pass(call: Call) -> Tensor:
    """Two passes over the tiles: maxima first."""
    q, k, v = call.inputs()
    spans = tiles(call.reach, 64)
    m = maximum(call, q, k, spans)
    total, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for a, b in spans:
        e = torch.exp(call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b)) - m)
        total = total + e.sum(-1, keepdim=True)
        acc = acc + call.drop(e) @ v[..., a:b, :]
    return call.out(acc / alive(total))


@right(note="passes for maxima, sums and the output of normalised weights, tiles of 96 keys")
def three_pass(call: Call) -> Tensor:
    """Three passes over the tiles: maxima, sums, output."""
    q, k, v = call.inputs()
    spans = tiles(call.reach, 96)
    m = maximum(call, q, k, spans)
    weights = [torch.exp(call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b)) - m) for a, b in spans]
    total = torch.zeros_like(m)
    for e in weights:
        total = total + e.sum(-1, keepdim=True)
    acc, total = q.new_zeros(*q.shape[:-1], v.shape[-1]), alive(total)
    for (a, b), e in zip(spans, weights, strict=True):
        acc = acc + call.drop(e / total) @ v[..., a:b, :]
    return call.out(acc)


@right(note="sums over tiles of 32 keys with Kahan compensation")
def kahan(call: Call) -> Tensor:
    """Compensated sums of the products with v."""
    q, k, v = call.inputs()
    spans = tiles(call.reach, 32)
    m = maximum(call, q, k, spans)
    acc = q.new_zeros(*q.shape[:-1], v.shape[-1] + 1)
    lost = torch.zeros_like(acc)
    for a, b in spans:
        e = torch.exp(call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b)) - m)
        term = torch.cat((call.drop(e) @ v[..., a:b, :], e.sum(-1, keepdim=True)), -1) - lost
        new = acc + term
        lost = ((new - acc) - term).detach()
        acc = new
    return call.out(acc[..., :-1] / alive(acc[..., -1:]))


@right(note="sums over tiles of 16 keys added as a binary tree")
def pairwise(call: Call) -> Tensor:
    """Pairwise sums of the products with v."""
    q, k, v = call.inputs()
    spans = tiles(call.reach, 16)
    m = maximum(call, q, k, spans)
    parts = []
    for a, b in spans:
        e = torch.exp(call.masked(q @ k[..., a:b, :].mT * call.scale, cols=(a, b)) - m)
        parts.append(torch.cat((call.drop(e) @ v[..., a:b, :], e.sum(-1, keepdim=True)), -1))
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)] + odd
    return call.out(parts[0][..., :-1] / alive(parts[0][..., -1:]))


Part = tuple[Tensor, Tensor, Tensor]


def partial(call: Call, inputs: Part, span: tuple[int, int]) -> Part:
    """The output, log-sum-exp (0 where dead) and deadness of every row over one span of keys."""
    q, k, v = inputs[0], inputs[1][..., span[0] : span[1], :], inputs[2][..., span[0] : span[1], :]
    s = call.masked(q @ k.mT * call.scale, cols=span)
    dead = (s == -INF).all(-1, keepdim=True)
    m = peak(s)
    e = torch.exp(s - m)
    total = alive(e.sum(-1, keepdim=True))
    return (call.drop(e) @ v) / total, torch.where(dead, 0.0, m + total.log()), dead


def split(call: Call, count: int) -> Tensor:
    """Flash-decoding: parts of the keys on their own, merged by their log-sum-exps."""
    inputs = call.inputs()
    parts = [partial(call, inputs, span) for span in tiles(call.keys, -(-call.keys // count))]
    lse = torch.stack([torch.where(dead, -INF, lse) for _, lse, dead in parts])
    top = lse.detach().amax(0)
    weight = torch.exp(lse - torch.where(top == -INF, 0.0, top))
    out = torch.stack([out for out, _, _ in parts])
    return call.out((weight * out).sum(0) / alive(weight.sum(0)))


@right(note="2 parts of the keys merged by log-sum-exp")
def split_2(call: Call) -> Tensor:
    """Split keys, 2 parts."""
    return split(call, 2)


@right(note="3 parts of the keys merged by log-sum-exp")
def split_3(call: Call) -> Tensor:
    """Split keys, 3 parts."""
    return split(call, 3)


@right(note="7 parts of the keys merged by log-sum-exp")
def split_7(call: Call) -> Tensor:
    """Split keys, 7 parts."""
    return split(call, 7)


def sigmoid_merge(one: Part, two: Part) -> Part:
    """Two parts merged with the weight sigmoid(lse1 - lse2); a dead part gives way to the other."""
    (out1, lse1, dead1), (out2, lse2, dead2) = one, two
    # exp(logsigmoid) rather than sigmoid, whose derivative y (1 - y) is lost where y rounds to 1
    mixed = F.logsigmoid(lse1 - lse2).exp() * out1 + F.logsigmoid(lse2 - lse1).exp() * out2
    out = torch.where(dead1, out2, torch.where(dead2, out1, mixed))
    top = torch.maximum(lse1, lse2).detach()
    both = top + (torch.exp(lse1 - top) + torch.exp(lse2 - top)).log()
    return out, torch.where(dead1, lse2, torch.where(dead2, lse1, both)), dead1 & dead2


@right(note="tiles of 64 keys merged one after the other by sigmoid(lse1 - lse2)")
def sigmoid_chain(call: Call) -> Tensor:
    """Two-way merges in sigmoid form, as a chain."""
    inputs, spans = call.inputs(), tiles(call.reach, 64)
    merged = partial(call, inputs, spans[0])
    for span in spans[1:]:
        merged = sigmoid_merge(merged, partial(call, inputs, span))
    return call.out(merged[0])


@right(note="halves of the keys, recursively down to 48, merged by sigmoid(lse1 - lse2)")
def sigmoid_tree(call: Call) -> Tensor:
    """Two-way merges in sigmoid form, as a tree."""
    inputs = call.inputs()

    def run(a: int, b: int) -> Part:
        if b - a <= 48:
            return partial(call, inputs, (a, b))
        return sigmoid_merge(run(a, (a + b) // 2), run((a + b) // 2, b))

    return call.out(run(0, call.reach)[0])


@right(note="even and odd keys on their own, merged by log-sum-exp")
def strided_split(call: Call) -> Tensor:
    """Split keys, interleaved parts."""
    q, k, v = call.inputs()
    s = call.masked(q @ k.mT * call.scale)
    parts = []
    for start in range(min(2, call.keys)):
        t = s[..., start::2]
        m = t.detach().amax(-1, keepdim=True)
        e = torch.exp(t - torch.where(m == -INF, 0.0, m))
        parts.append((m, e.sum(-1, keepdim=True), call.drop(e) @ v[..., start::2, :]))
    top = torch.stack([m for m, _, _ in parts]).amax(0)
    safe = torch.where(top == -INF, 0.0, top)
    total, acc = torch.zeros_like(top), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for m, part_total, part_acc in parts:
        total = total + part_total * torch.exp(m - safe)
        acc = acc + part_acc * torch.exp(m - safe)
    return call.out(acc / alive(total))
