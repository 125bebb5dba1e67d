"""The eager lines over tiles that stay in cache: less memory traffic, nothing computed that nobody sees.

A tile is some query rows of some heads with all keys that these rows see, so its softmax is the plain one and the
largest thing in memory is one tile of scores instead of all of them. Each thread takes tiles of its own, so that it
waits for others once and not at each operation. The backward pass computes the tiles again, one after another; one
that is itself differentiated (create_graph=True) or vectorised (is_grads_batched=True) goes through eager's lines, with
all scores in memory. With dropout each tile's mask is drawn from a seed that comes from torch's generator, and drawn
again in the backward pass: the distribution is eager's, the draws are not. Where the caller wants the weights they must
exist as a whole: then, for empty and meta tensors, and under torch.compile, torch.func, forward-mode derivatives and
tracing, eager's lines run.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel, Unsupported, four_dims
from harness.kernels.eager import eager
from harness.kernels.threads import spread
from harness.kernels.tiles import Tile, Tiling, choose_tiling, part, tiles
from harness.kernels.transforms import is_batched, is_transformed

LOG2_E = 1.4426950408889634

Gradients = tuple[Tensor | None, ...]  # of q, k, v, mask and sinks


def tiled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if is_transformed() or call.need_weights or q.is_meta or 0 in (q.numel(), k.numel(), v.numel()):
        return eager(q, k, v, call)
    return run_tiled(q, k, v, call, choose_tiling(q, k, call)), None


def run_tiled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, tiling: Tiling) -> Tensor:
    """`tiling` changes nothing but speed, memory and the last digit."""
    # The draws of all tiles follow from one draw of torch's generator.
    seed = int(torch.randint(2**62, ())) if call.dropout_p > 0 else None
    if call.needs_gradients(q, k, v):
        return _Tiled.apply(q, k, v, call.mask, call.sinks, call, tiling, seed)  # type: ignore[no-untyped-call]
    return _forward(q, k, v, call, tiling, seed)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        call: AttentionCall,
        tiling: Tiling,
        seed: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask, sinks)
        # Tensors are kept by torch, which watches them; a caller's counter of positions may go on before the backward.
        start = call.q_start.clone() if isinstance(call.q_start, Tensor) else call.q_start
        ctx.call = dataclasses.replace(call, mask=None, sinks=None, q_start=start)
        ctx.tiling, ctx.seed = tiling, seed
        return _forward(q, k, v, call, tiling, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        q, k, v, mask, sinks = ctx.saved_tensors
        call = dataclasses.replace(ctx.call, mask=mask, sinks=sinks)
        # torch turns gradients on here where somebody will differentiate what comes out.
        if torch.is_grad_enabled() or is_batched(grad):
            if ctx.seed is not None and is_batched(grad):
                raise Unsupported("tiled draws dropout again, which torch forbids in a batch of gradients: take eager")
            wanted = ctx.needs_input_grad[:5]
            return *_plain_backward((q, k, v, mask, sinks), wanted, call, ctx.tiling, ctx.seed, grad), None, None, None
        wants_mask, wants_sinks = ctx.needs_input_grad[3:5]
        gradients = _backward(q, k, v, call, ctx.tiling, ctx.seed, grad, wants_mask=wants_mask, wants_sinks=wants_sinks)
        return *gradients, None, None, None


def _plain_backward(
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    call: AttentionCall,
    tiling: Tiling,
    seed: int | None,
    grad: Tensor,
) -> Gradients:
    """`_backward` in operations that autograd may watch, and vectorise over a batch of `grad`."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: one tensor may be several of them, or be made from another, and each is asked for its own share.
        views = [None if t is None else t.view_as(t) for t in inputs]
        q, k, v, mask, sinks = views
        assert q is not None and k is not None and v is not None
        call = dataclasses.replace(call, mask=mask, sinks=sinks)
        out = eager(q, k, v, call)[0] if seed is None else _drop_plainly(q, k, v, call, tiling, seed)
    among = [t for t, is_wanted in zip(views, wanted, strict=True) if is_wanted and t is not None]
    found = iter(torch.autograd.grad(out, among, grad, create_graph=create_graph))
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)


def _drop_plainly(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, tiling: Tiling, seed: int) -> Tensor:
    """eager's lines with the very weights dropped that the tiles drop."""
    (B, H, L, _), (H_kv, S) = q.shape, k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    kept = torch.zeros(B, H, L, S, dtype=wide, device=q.device)
    with torch.no_grad():
        room = _workspace(q, k, v, tiling)
        for w in _weigh(q, k, v, call, room, tiles(q, k, call, tiling), seed=seed, for_gradients=False):
            assert w.kept is not None
            kept[w.tile.batch, w.tile.heads, w.tile.rows, w.tile.keys] = w.by_head(w.kept)
    whole = dataclasses.replace(call, dropout_p=0.0, need_weights=True)
    weights = eager(q.to(wide), k.to(wide), v.to(wide), whole)[1]
    assert weights is not None
    dropped = (weights * kept).reshape(B, H_kv, H // H_kv * L, S)
    return (dropped @ v.to(wide)).view(B, H, L, v.shape[-1]).to(q.dtype)


@dataclass(frozen=True)
class Weighed:
    """One tile up to its weights. G query heads of a group are rows of one matrix: K and V are never repeated."""

    tile: Tile
    q: Tensor  # (h, G*r, D), scaled
    k: Tensor  # (h, s, D)
    v: Tensor  # (h, s, D_v)
    weights: Tensor  # (h, G*r, s), in the workspace: the next tile overwrites them
    capped: Tensor | None  # the scores after the softcap
    sink: Tensor | None  # (h, G*r, 1): the share that the sink takes
    kept: Tensor | None  # (h, G*r, s): 0 where dropped, else 1 / (1 - p)

    @property
    def dropped_weights(self) -> Tensor:
        return self.weights if self.kept is None else self.weights * self.kept

    def by_head(self, t: Tensor) -> Tensor:
        """(h, G*r, n) as (h*G, r, n)."""
        at = self.tile
        return t.view(at.heads.stop - at.heads.start, at.rows.stop - at.rows.start, t.shape[-1])


def _weigh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    workspace: Tensor,
    todo: Iterable[Tile],
    *,
    seed: int | None,
    for_gradients: bool,
) -> Iterator[Weighed]:
    """Eager's lines, in place in the workspace. Only for code that autograd does not watch."""
    wide = torch.promote_types(q.dtype, torch.float32)
    G, D = q.shape[1] // k.shape[1], q.shape[3]
    bias = None if call.bias is None else four_dims(call.bias)
    generator = None if seed is None else torch.Generator(q.device).manual_seed(seed)

    for tile in todo:
        h, r = tile.kv_heads.stop - tile.kv_heads.start, tile.rows.stop - tile.rows.start
        s = tile.keys.stop - tile.keys.start
        # Half-precision scores would break equality: fp32 from here to the output, a tile at a time.
        tile_q = (q[tile.batch, tile.heads, tile.rows].to(wide) * call.scale).reshape(h, G * r, D)
        tile_k = k[tile.batch, tile.kv_heads, tile.keys].to(wide)
        tile_v = v[tile.batch, tile.kv_heads, tile.keys].to(wide)

        scores = workspace[: h * G * r * s].view(h, G * r, s)
        torch.bmm(tile_q, tile_k.mT, out=scores)
        by_head = scores.view(h * G, r, s)
        capped = None
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
            capped = scores.clone()
        if bias is not None:
            by_head.add_(part(bias, tile.batch, tile.heads, tile.rows, tile.keys))
        for zone in tile.zones:  # not by a minimum: hidden scores that overflowed to NaN must go, too
            by_head[..., zone.keys].masked_fill_(zone.hidden, float("-inf"))

        sink = None
        if call.sinks is None:
            torch.softmax(scores, dim=-1, out=scores)  # in place is safe: each row is read before it is written
        else:
            column = call.sinks[tile.heads].to(wide).view(-1, 1, 1).expand(h * G, r, 1)
            shares = torch.softmax(torch.cat([by_head, column], dim=-1), dim=-1)
            by_head.copy_(shares[..., :-1])
            sink = shares[..., -1:].reshape(h, G * r, 1)
        # Rows that see nothing are 0/0 above; and a NaN query must not reach the gradients of values hidden from it.
        for zone in tile.zones if for_gradients or tile.has_dead_rows else ():
            by_head[..., zone.keys].masked_fill_(zone.hidden, 0.0)
        kept = None
        if generator is not None:
            kept = torch.empty_like(scores).bernoulli_(1 - call.dropout_p, generator=generator)
            kept.div_(max(1 - call.dropout_p, torch.finfo(wide).tiny))  # with p = 1 nothing is kept to be enlarged
        yield Weighed(tile, tile_q, tile_k, tile_v, scores, capped, sink, kept)


@torch.no_grad()
def _forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, tiling: Tiling, seed: int | None) -> Tensor:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    if call.bias is None and call.softcap is None and call.sinks is None and seed is None:
        threads = torch.get_num_threads() if q.device.type == "cpu" else 1
        rooms = [_workspace(q, k, v, tiling) for _ in range(threads)]
        pieces = _pieces(q, k, v, out, tiles(q, k, call, tiling))
        spread(functools.partial(_fill, call.scale), rooms, pieces)
        # Sums that are divided last overflow a little sooner: then once more by eager's lines. A sum of what is finite
        # may overflow too, and merely takes the longer way; a maximum would take ten times as long to find.
        if math.isfinite(float(out.sum(dtype=rooms[0].dtype))):
            return out
    todo = tiles(q, k, call, tiling)
    for w in _weigh(q, k, v, call, _workspace(q, k, v, tiling), todo, seed=seed, for_gradients=False):
        rows = out[w.tile.batch, w.tile.heads, w.tile.rows]
        rows.copy_(torch.bmm(w.dropped_weights, w.v).view(rows.shape))
    return out


class _Piece(NamedTuple):
    """One tile's views."""

    q: Tensor  # (h, G*r, D)
    k: Tensor  # (h, D, s)
    v: Tensor  # (h, s, D_v)
    out: Tensor  # (h, r, D_v), with G > 1 (h*G, r, D_v)
    tile: Tile


def _pieces(q: Tensor, k: Tensor, v: Tensor, out: Tensor, todo: Iterable[Tile]) -> Iterator[_Piece]:
    """Threads wait for each other here and at Python's lock, so views are made seldom and cheaply."""
    L, (S, D), G = q.shape[2], k.shape[2:], q.shape[1] // k.shape[1]
    of_heads: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for tile in todo:
        key = tile.batch, tile.kv_heads.start
        if key not in of_heads:
            own_q, own_out = (t[tile.batch, tile.heads] for t in (q, out))
            own_k, own_v = (t[tile.batch, tile.kv_heads] for t in (k, v))
            of_heads[key] = own_q, own_k.mT, own_v, own_out
        own_q, own_k, own_v, own_out = of_heads[key]
        rows, keys = tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start
        if rows != L:
            own_q, own_out = (t.narrow(1, tile.rows.start, rows) for t in (own_q, own_out))
        if keys != S:
            own_k, own_v = own_k.narrow(2, tile.keys.start, keys), own_v.narrow(1, tile.keys.start, keys)
        yield _Piece(own_q if G == 1 else own_q.reshape(-1, G * rows, D), own_k, own_v, own_out, tile)


def _fill(scale: float, workspace: Tensor, pieces: Iterator[_Piece]) -> None:
    """Eager's lines in powers of two: exp2 takes half the time of exp."""
    shape, scores, mixed = None, workspace, workspace
    for piece in pieces:
        q, k, v = (t if t.dtype == workspace.dtype else t.to(workspace.dtype) for t in piece[:3])
        h, rows, s, D_v = *q.shape[:2], k.shape[2], v.shape[2]
        if shape != (h, rows, s, D_v):
            shape = (h, rows, s, D_v)
            scores = workspace[: h * rows * s].view(h, rows, s)
            mixed = workspace[h * rows * s :][: h * rows * D_v].view(h, rows, D_v)
        torch.baddbmm(scores, q, k, beta=0, alpha=scale, out=scores)
        for zone in piece.tile.zones:
            shown = scores.view(*piece.out.shape[:2], s)[..., zone.keys]
            torch.minimum(shown, zone.ceiling, out=shown)
        total = _to_powers_of_two(scores, has_dead_rows=piece.tile.has_dead_rows)
        torch.bmm(scores, v, out=mixed)
        if mixed.shape == piece.out.shape:
            torch.div(mixed, total, out=piece.out)  # smaller than the weights
        else:
            by_head = mixed.view(piece.out.shape)
            torch.div(by_head, total.view(*by_head.shape[:2], 1), out=piece.out)


def _to_powers_of_two(scores: Tensor, *, has_dead_rows: bool) -> Tensor:
    """In place, not normalised; gives the sums of the rows."""
    if scores.shape[-1] == 0:
        return scores.new_ones(*scores.shape[:-1], 1)
    peak = scores.amax(-1, keepdim=True)
    if has_dead_rows:
        peak.masked_fill_(peak == float("-inf"), 0.0)
    # One fused multiplication and addition: scores times log2(e), rounded by themselves, would lose what `peak` takes.
    torch.add(peak.mul_(-LOG2_E), scores, alpha=LOG2_E, out=scores).exp2_()
    total = scores.sum(-1, keepdim=True)
    return total.masked_fill_(total == 0.0, 1.0) if has_dead_rows else total  # a row that sees nothing stays 0


def _workspace(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Tensor:
    """Room for the scores of one tile and for its output. One for all tiles: fresh pages cost more than arithmetic."""
    H_kv, S = k.shape[1:3]
    rows = min(tiling.heads, H_kv) * (q.shape[1] // H_kv) * min(tiling.rows, q.shape[2])
    return q.new_empty(rows * (S + v.shape[3]), dtype=torch.promote_types(q.dtype, torch.float32))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    tiling: Tiling,
    seed: int | None,
    grad: Tensor,
    *,
    wants_mask: bool,
    wants_sinks: bool,
) -> Gradients:
    """The gradients of q, k, v, mask and sinks from the output's, to which each tile adds its share."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.zeros_like(q)
    # Several tiles add to these: in half precision each addition would round.
    dk, dv = _zeros(k, wide), _zeros(v, wide)
    dmask = _zeros(call.mask, wide) if wants_mask and call.mask is not None else None
    dsinks = _zeros(call.sinks, wide) if wants_sinks and call.sinks is not None else None
    dbias = None if dmask is None else four_dims(dmask)

    todo = tiles(q, k, call, tiling)
    for w in _weigh(q, k, v, call, _workspace(q, k, v, tiling), todo, seed=seed, for_gradients=True):
        at = w.tile
        dout = grad[at.batch, at.heads, at.rows].to(wide).reshape(*w.q.shape[:2], -1)  # (h, G*r, D_v)
        dv[at.batch, at.kv_heads, at.keys] += w.dropped_weights.mT @ dout
        dscores = _softmax_backward(w, dout, dsinks)  # (h, G*r, s)
        if dbias is not None:
            target = part(dbias, at.batch, at.heads, at.rows, at.keys)
            target += w.by_head(dscores).sum_to_size(target.shape)
        if w.capped is not None:
            assert call.softcap is not None
            dscores *= 1 - (w.capped / call.softcap).square()
        rows = dq[at.batch, at.heads, at.rows]
        rows.copy_((dscores @ w.k).mul_(call.scale).view(rows.shape))
        dk[at.batch, at.kv_heads, at.keys] += dscores.mT @ w.q
    sums = zip((dk, dv, dmask, dsinks), (k, v, call.mask, call.sinks), strict=True)
    return dq, *(None if t is None or like is None else t.to(like.dtype) for t, like in sums)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _softmax_backward(w: Weighed, dout: Tensor, dsinks: Tensor | None) -> Tensor:
    """The gradient of the scores that went into a tile's softmax, from its output's; adds the sinks' to `dsinks`."""
    dweights = dout @ w.v.mT  # (h, G*r, s)
    if w.kept is not None:
        dweights *= w.kept
    # dS = P * (dP - sum(P * dP)); a sink has no value, so its dP is 0 and the sum runs over keys alone.
    dscores = torch._softmax_backward_data(dweights, w.weights, -1, w.weights.dtype)
    if dsinks is not None and w.sink is not None:
        inner = torch.linalg.vecdot(w.weights, dweights).unsqueeze(-1)  # (h, G*r, 1)
        dsinks[w.tile.heads] -= w.by_head(w.sink * inner).squeeze(-1).sum(-1)
    for zone in w.tile.zones:
        w.by_head(dscores)[..., zone.keys].masked_fill_(zone.hidden, 0.0)
    return dscores


KERNEL = Kernel("tiled", tiled, gives_weights=True)
