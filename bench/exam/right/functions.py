"""Kernels with a hand-written backward; a double backward recomputes the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .core import HALVES, INF, Call, alive, peak, right, softmax, tiles

Grads = tuple[Tensor | None, ...]


def _half(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor rounded to a half dtype, unchanged for others."""
    return t.to(dtype).to(t.dtype) if dtype in HALVES else t


def _recomputed(ctx: Any, grad: Tensor) -> Grads:
    """The gradients of the definition, differentiable once more.

    The inputs are taken as new views, since two of them may be the same tensor.
    """
    q, k, v, bias, keep, kept = ctx.saved_tensors[:6]
    with torch.enable_grad():
        q, k, v = (t.view_as(t) for t in (q, k, v))
        bias = None if bias is None else bias.view_as(bias)
        views = [q, k, v, bias]
        call = Call(q, k, v, bias, keep, ctx.causal, ctx.scale, 0.0)
        wide_q, wide_k, wide_v = call.inputs()
        p = softmax(call.masked(wide_q @ wide_k.mT * call.scale))
        out = call.out((p if kept is None else p * kept) @ wide_v)
        wanted = [t for t, need in zip(views, ctx.needs_input_grad, strict=False) if need and t is not None]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(
        next(found) if need and t is not None else None for t, need in zip(views, ctx.needs_input_grad, strict=False)
    )


def _grouped(grad: Tensor, call: Call) -> Tensor:
    """A gradient per query head summed over the heads of each group."""
    return grad.unflatten(1, (call.k.shape[1], call.groups)).sum(2) if call.groups > 1 else grad


class _Attention(torch.autograd.Function):
    """The frame of a kernel with its own backward: subclasses compute with wide tensors."""

    @staticmethod
    def compute(call: Call, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output in the dtype of the call, and what the backward needs besides."""
        raise NotImplementedError

    @staticmethod
    def derive(call: Call, kept: Tensor | None, out: Tensor, saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values (per query head) and of the scores."""
        raise NotImplementedError

    @classmethod
    def run(cls, call: Call) -> Tensor:
        """The kernel for a call."""
        return cls.apply(call.q, call.k, call.v, call.bias, call.keep, call.kept(), call.causal, call.scale, cls)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """The output."""
        q, k, v, bias, keep, kept, ctx.causal, ctx.scale, ctx.kind = args
        call = Call(q, k, v, bias, keep, ctx.causal, ctx.scale, 0.0)
        out, saved = ctx.kind.compute(call, kept)
        ctx.save_for_backward(q, k, v, bias, keep, kept, out, saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        """The gradients of q, k, v and the float mask."""
        nothing = (None,) * 5
        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*_recomputed(ctx, grad), *nothing)
            q, k, v, bias, keep, kept, out, saved = ctx.saved_tensors
            call = Call(q, k, v, bias, keep, ctx.causal, ctx.scale, 0.0)
            dq, dk, dv, ds = ctx.kind.derive(call, kept, out, saved, grad)
            dk, dv = _grouped(dk, call), _grouped(dv, call)
            db = ds.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and ctx.needs_input_grad[3] else None
            return (dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), db, *nothing)


class _Saved(_Attention):
    """Normalised weights saved, the softmax backward from them."""

    @staticmethod
    def compute(call: Call, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The definition."""
        q, k, v = call.inputs()
        p = softmax(call.masked(q @ k.mT * call.scale))
        return call.out((p if kept is None else p * kept) @ v), p

    @staticmethod
    def derive(call: Call, kept: Tensor | None, out: Tensor, saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """dS = P (dP - rowsum(P dP))."""
        q, k, v = call.inputs()
        grad = grad.to(call.wide)
        dp = grad @ v.mT
        used = saved
        if kept is not None:
            dp, used = dp * kept, saved * kept
        ds = saved * (dp - (saved * dp).sum(-1, keepdim=True))
        return ds @ k * call.scale, ds.mT @ q * call.scale, used.mT @ grad, ds


class _Flash(_Attention):
    """FlashAttention: tiles of rows and keys, saved log-sum-exp, recomputed weights in the backward."""

    tile = (64, 64)

    @classmethod
    def _spans(cls, call: Call) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
        """The row tiles, each with its key tiles (none wholly in the future)."""
        return [
            (rows, tiles(min(rows[1], call.keys) if call.causal else call.keys, cls.tile[1]))
            for rows in tiles(call.rows, max(cls.tile[0], -(-call.rows // 16)))
        ]

    @classmethod
    def compute(cls, call: Call, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """Online softmax with weights rounded to a half input dtype; the log-sum-exp is saved (0 for dead rows)."""
        q, k, v = call.inputs()
        outs, lses = [], []
        for rows, spans in cls._spans(call):
            block = q[..., rows[0] : rows[1], :]
            m = block.new_full((*block.shape[:-1], 1), -INF)
            total, acc = torch.zeros_like(m), block.new_zeros(*block.shape[:-1], v.shape[-1])
            for a, b in spans:
                s = call.masked(block @ k[..., a:b, :].mT * call.scale, rows, (a, b))
                top = torch.maximum(m, s.amax(-1, keepdim=True))
                safe = torch.where(top == -INF, 0.0, top)
                e, alpha = torch.exp(s - safe), torch.exp(m - safe)
                total = total * alpha + e.sum(-1, keepdim=True)
                if kept is not None:
                    e = e * kept[..., rows[0] : rows[1], a:b]
                acc = acc * alpha + _half(e, call.q.dtype) @ v[..., a:b, :]
                m = top
            outs.append(acc / alive(total))
            lses.append(torch.where(m == -INF, 0.0, m + alive(total).log()))
        return call.out(torch.cat(outs, -2)), torch.cat(lses, -2)

    @classmethod
    def derive(cls, call: Call, kept: Tensor | None, out: Tensor, saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """delta = rowsum(dO O), P = exp(S - LSE), dS = P (dP - delta); P and dS rounded to a half input dtype."""
        q, k, v = call.inputs()
        grad, dtype = grad.to(call.wide), call.q.dtype
        delta = (grad * out.to(call.wide)).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        ds_all = q.new_zeros(*q.shape[:-1], call.keys) if call.bias is not None else q.new_zeros(0)
        for (r, t), spans in cls._spans(call):
            block, up = q[..., r:t, :], grad[..., r:t, :]
            for a, b in spans:
                s = call.masked(block @ k[..., a:b, :].mT * call.scale, (r, t), (a, b))
                p = torch.exp(s - saved[..., r:t, :])
                dp = up @ v[..., a:b, :].mT
                used = p
                if kept is not None:
                    dp, used = dp * kept[..., r:t, a:b], p * kept[..., r:t, a:b]
                ds = p * (dp - delta[..., r:t, :])
                if call.bias is not None:
                    ds_all[..., r:t, a:b] = ds
                ds = _half(ds, dtype)
                dv[..., a:b, :] += _half(used, dtype).mT @ up
                dk[..., a:b, :] += ds.mT @ block * call.scale
                dq[..., r:t, :] += ds @ k[..., a:b, :] * call.scale
        return dq, dk, dv, ds_all


class _FlashTall(_Flash):
    """FlashAttention with tiles of 128 rows and 32 keys."""

    tile = (128, 32)


class _Dense(_Attention):
    """All scores at once, log-sum-exp saved, weights recomputed in the backward."""

    @staticmethod
    def compute(call: Call, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights exp(S - LSE)."""
        q, k, v = call.inputs()
        s = call.masked(q @ k.mT * call.scale)
        m = peak(s)
        lse = m + alive(torch.exp(s - m).sum(-1, keepdim=True)).log()
        p = torch.exp(s - lse)
        return call.out((p if kept is None else p * kept) @ v), lse

    @staticmethod
    def derive(call: Call, kept: Tensor | None, out: Tensor, saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """delta from the recomputed weights, no roundings to the input dtype."""
        q, k, v = call.inputs()
        grad = grad.to(call.wide)
        p = torch.exp(call.masked(q @ k.mT * call.scale) - saved)
        used = p if kept is None else p * kept
        delta = (grad * (used @ v)).sum(-1, keepdim=True)
        dp = grad @ v.mT
        ds = p * ((dp if kept is None else dp * kept) - delta)
        return (ds * call.scale) @ k, (ds * call.scale).mT @ q, used.mT @ grad, ds


def _array(t: Tensor, dtype: torch.dtype) -> np.ndarray:
    """A C-contiguous array of a tensor."""
    return np.ascontiguousarray(t.detach().to(dtype).cpu().numpy())


class _Numpy(_Attention):
    """NumPy in the wide dtype, forward and backward."""

    inner: type | None = None

    @classmethod
    def product(cls, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """A matrix product in the dtype of its arguments, or with accumulators of another one."""
        if cls.inner is None:
            return np.matmul(a, b)
        return np.matmul(a.astype(cls.inner), b.astype(cls.inner)).astype(a.dtype)

    @classmethod
    def compute(cls, call: Call, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The definition in NumPy; the weights are saved."""
        k, v = call.heads()
        q_, k_, v_ = (_array(t, call.wide) for t in (call.q, k, v))
        s = cls.product(q_, k_.swapaxes(-1, -2)) * q_.dtype.type(call.scale)
        merged = call.merged()
        if merged is not None:
            bias = _array(merged, call.wide)
            s = np.where(bias == -np.inf, bias, s + bias)
        m = s.max(-1, keepdims=True)
        e = np.exp(s - np.where(m == -np.inf, q_.dtype.type(0), m))
        total = e.sum(-1, keepdims=True, dtype=cls.inner).astype(e.dtype)
        p = e / np.where(total == 0, q_.dtype.type(1), total)
        used = p if kept is None else p * _array(kept, call.wide)
        return call.out(torch.from_numpy(cls.product(used, v_))), torch.from_numpy(p)

    @classmethod
    def derive(cls, call: Call, kept: Tensor | None, out: Tensor, saved: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """The softmax backward in NumPy."""
        k, v = call.heads()
        q_, k_, v_, p, up = (_array(t, call.wide) for t in (call.q, k, v, saved, grad))
        dp = cls.product(up, v_.swapaxes(-1, -2))
        used = p
        if kept is not None:
            factor = _array(kept, call.wide)
            dp, used = dp * factor, p * factor
        ds = p * (dp - (p * dp).sum(-1, keepdims=True, dtype=cls.inner).astype(p.dtype))
        scaled = ds * q_.dtype.type(call.scale)
        dq, dk = cls.product(scaled, k_), cls.product(scaled.swapaxes(-1, -2), q_)
        dv = cls.product(used.swapaxes(-1, -2), up)
        return tuple(torch.from_numpy(np.ascontiguousarray(t)) for t in (dq, dk, dv, ds))


class _NumpyFloat64(_Numpy):
    """NumPy arrays in the wide dtype, all sums in float64."""

    inner = np.float64


@right(compile=False, note="autograd.Function: saved weights; double backward recomputes the definition")
def function_saved_weights(call: Call) -> Tensor:
    """The definition with a hand-written backward from saved weights."""
    return _Saved.run(call)


@right(compile=False, note="autograd.Function: saved log-sum-exp, dense; double backward recomputes the definition")
def function_saved_lse(call: Call) -> Tensor:
    """Weights recomputed from the log-sum-exp in a hand-written backward."""
    return _Dense.run(call)


@right(compile=False, note="FlashAttention, tiles 64 x 64; half: P and dS rounded to it; double backward recomputes")
def flash(call: Call) -> Tensor:
    """FlashAttention forward and backward."""
    return _Flash.run(call)


@right(compile=False, note="FlashAttention, tiles 128 x 32; half: P and dS rounded to it; double backward recomputes")
def flash_tall(call: Call) -> Tensor:
    """FlashAttention forward and backward with tall tiles."""
    return _FlashTall.run(call)


@right(compile=False, note="NumPy in an autograd.Function (CPU); double backward recomputes in torch")
def numpy_attention(call: Call) -> Tensor:
    """The definition in NumPy with a hand-written backward."""
    return _Numpy.run(call)


@right(compile=False, note="NumPy C-order arrays, float64 accumulators (CPU); double backward recomputes in torch")
def numpy_float64_sums(call: Call) -> Tensor:
    """NumPy with float64 accumulators and a hand-written backward."""
    return _NumpyFloat64.run(call)
