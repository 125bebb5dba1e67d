"""Compare every kernel with a float64 textbook over varied calls; exit 1 on any failure.

``verify.py [-k part_of_name] [--compile BACKEND]``; with ``--compile`` the kernels that say they compile are compiled
in one graph with that backend (``aot_eager``, ``inductor``) and compared on a few calls instead.

The bounds are per element: the relative error that rounding in the kernel's wide dtype allows every weight, and for
half inputs some units of the half dtype, carried through the absolute values of all the products.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from right import KERNELS, Kernel

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
INF = math.inf


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The textbook in float64 and its weights (kept: a factor for every weight, for dropout)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = torch.matmul(q, k.transpose(-1, -2)) * scale
    hidden = torch.zeros_like(s, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        hidden = hidden | (mask == -INF)
        s = s + mask.double().masked_fill(mask == -INF, 0.0)
    if causal:
        hidden = hidden | ~torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    dead = hidden.all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(hidden & ~dead, -INF), -1).masked_fill(dead, 0.0)
    return torch.matmul(p if kept is None else p * kept, v), p


@dataclass(frozen=True)
class Case:
    """One call of every kernel."""

    name: str
    b: int = 2
    h: int = 2
    h_kv: int | None = None
    rows: int = 17
    keys: int = 29
    d: int = 16
    d_v: int | None = None
    dtype: torch.dtype = F32
    mask: str = ""
    causal: bool = False
    scale: float | None = None
    layout: str = ""
    size: float = 1.0
    grads: bool = True

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Fresh inputs, the same every time."""
        g = torch.Generator().manual_seed(1234 + self.rows + 7 * self.keys)
        n, d_v = self.h_kv or self.h, self.d if self.d_v is None else self.d_v

        def draw(heads: int, length: int, width: int) -> Tensor:
            if self.layout == "blhd":
                t = torch.randn(self.b, length, heads, width, generator=g).transpose(1, 2)
            elif self.layout == "steps":
                t = torch.randn(self.b, heads, 2 * length, 3 * width, generator=g)[:, :, ::2, 1::3]
            elif self.layout == "expanded":
                t = torch.randn(1, heads, length, width, generator=g).expand(self.b, -1, -1, -1)
            elif self.layout == "transposed":
                t = torch.randn(self.b, heads, width, length, generator=g).transpose(-1, -2)
            else:
                t = torch.randn(self.b, heads, length, width, generator=g)
            return t * self.size if self.size != 1 else t

        q, k, v = draw(self.h, self.rows, self.d), draw(n, self.keys, self.d), draw(n, self.keys, d_v)
        q, k, v = (t.to(self.dtype) for t in (q, k, v))
        return q, k, v, self._mask(g)

    def _mask(self, g: torch.Generator) -> Tensor | None:
        """The mask by its name: kind, then the dimensions that are not broadcast."""
        if not self.mask:
            return None
        kind, dims = self.mask.split(":")
        full = {"B": self.b, "H": self.h, "L": self.rows, "S": self.keys}
        shape = [full.get(c, 1) for c in dims]
        if kind == "alibi":
            slopes = torch.tensor([0.5**i for i in range(self.h)])[None, :, None, None]
            far = torch.arange(self.rows)[:, None] - torch.arange(self.keys)
            return (-slopes * far.abs()).to(self.dtype)
        keep = torch.rand(shape, generator=g) < 0.6
        if kind.startswith("dead") and len(shape) >= 2 and shape[-2] > 2:
            keep[..., 1, :] = False
            keep[..., -1, :] = False
        if kind in ("bool", "dead"):
            return keep
        if kind == "none":
            return torch.zeros(shape, dtype=torch.bool)
        bias = torch.randn(shape, generator=g)
        if kind in ("inf", "deadinf", "deadf32"):
            bias = bias.masked_fill(~keep, -INF)
        if kind == "min":
            bias = torch.zeros(shape).masked_fill(~keep, torch.finfo(F16 if self.dtype == F16 else F32).min)
            if len(shape) >= 2 and shape[-2] > 2:
                bias[..., 2, :] = bias.min()
            return bias
        if kind in ("f32", "deadf32"):
            return bias
        if kind == "big":
            bias = bias * 30
        return bias.to(self.dtype)


def cases() -> Iterator[Case]:
    """The calls."""
    for dtype in (F64, F32, BF16, F16):
        short = str(dtype).split(".")[1]
        yield Case(f"plain {short}", dtype=dtype)
        yield Case(f"causal long keys {short}", rows=37, keys=150, causal=True, dtype=dtype)
        yield Case(f"causal long rows {short}", rows=150, keys=41, causal=True, dtype=dtype, d=8)
        yield Case(f"bool LS dead {short}", mask="dead:LS", rows=33, keys=70, dtype=dtype)
        yield Case(f"float BHLS {short}", mask="float:BHLS", rows=21, keys=130, dtype=dtype)
        yield Case(f"float -inf dead {short}", mask="deadinf:1HLS", rows=21, keys=67, dtype=dtype)
        yield Case(
            f"mask and causal {short}", mask="deadinf:LS", causal=True, rows=70, keys=66, dtype=dtype, h=4, h_kv=2
        )
        yield Case(f"gqa {short}", h=6, h_kv=2, rows=19, keys=101, d=32, d_v=24, dtype=dtype)
        yield Case(f"float32 mask {short}", mask="deadf32:B1LS", rows=9, keys=65, dtype=dtype)
        yield Case(f"finfo.min {short}", mask="min:B1LS", rows=9, keys=75, dtype=dtype)
        yield Case(f"finfo.min causal {short}", mask="min:LS", rows=75, keys=75, dtype=dtype, causal=True)
        yield Case(f"long keys {short}", b=1, h=2, rows=5, keys=1500, d=64, dtype=dtype)
        yield Case(f"bhld view {short}", layout="blhd", rows=31, keys=63, dtype=dtype, mask="bool:B11S")
    for keys in (1, 2, 3, 15, 16, 17, 64, 65, 127, 129, 257, 258):
        yield Case(f"S={keys}", rows=3, keys=keys, d=7, d_v=5, h=1, b=1, grads=keys < 20)
    yield Case("L=1", rows=1, keys=333, h=8, h_kv=1, d=40)
    yield Case("L=1 causal", rows=1, keys=33, causal=True)
    yield Case("L=S=1", rows=1, keys=1)
    yield Case("D=1", d=1, d_v=1)
    yield Case("D=3 Dv=50", d=3, d_v=50, causal=True)
    yield Case("D=65 Dv=1", d=65, d_v=1)
    yield Case("D=128", d=128, rows=8, keys=70)
    yield Case("many rows", b=1, h=1, rows=700, keys=90, causal=True)
    yield Case("square 300 causal", b=1, h=2, h_kv=1, rows=300, keys=300, causal=True, d=32)
    yield Case("key padding", mask="bool:B11S", rows=12, keys=99)
    yield Case("row mask", mask="bool:B1L1", rows=12, keys=99)
    yield Case("one mask", mask="float:1111")
    yield Case("all hidden", mask="none:LS")
    yield Case("all hidden 1", mask="none:1111")
    yield Case("bool BHLS", mask="dead:BHLS", causal=True, rows=40, keys=40)
    yield Case("bool 1HLS", mask="dead:1HLS", h=4, h_kv=2)
    yield Case("float LS", mask="inf:LS")
    yield Case("float 3-D mask", mask="float:HLS")
    yield Case("float B11S", mask="inf:B11S", h=4, h_kv=1)
    yield Case("float row bias", mask="float:1HL1")
    yield Case("big bias", mask="big:BHLS")
    yield Case("alibi", mask="alibi:", rows=60, keys=60, causal=True, h=4)
    yield Case("scale 0", scale=0.0)
    yield Case("negative scale", scale=-0.7, mask="inf:LS")
    yield Case("scale 1", scale=1.0, d=24)
    yield Case("sharp", size=4.0, rows=24, keys=140)
    yield Case("very sharp", size=9.0, rows=24, keys=140, causal=True)
    yield Case("sharp bf16", size=3.0, rows=24, keys=140, dtype=BF16)
    yield Case("tiny", size=1e-4)
    for layout in ("steps", "expanded", "transposed"):
        yield Case(f"layout {layout}", layout=layout, mask="deadinf:BHLS", rows=31, keys=47)
        yield Case(f"layout {layout} gqa", layout=layout, h=4, h_kv=2, causal=True, rows=31, keys=47, dtype=BF16)


@dataclass
class Expected:
    """What a call gives and how far a right kernel may be from it, per element; first the output, then gradients."""

    values: list[Tensor]
    bounds: list[Tensor]
    dead: Tensor


def expected(case: Case, up: Tensor) -> Expected:
    """The reference result, gradients and bounds of a case."""
    q, k, v, mask = case.tensors()
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    bias = None
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.double().requires_grad_()
        leaves.append(bias)
    out, p = reference(*leaves[:3], mask=mask if bias is None else bias, causal=case.causal, scale=case.scale)
    grads = torch.autograd.grad(out, leaves, up.double())
    with torch.no_grad():
        wide = F64 if case.dtype == F64 else F32
        eps = torch.finfo(wide).eps
        half = torch.finfo(case.dtype).eps if case.dtype in (BF16, F16) else 0.0
        floor = 6e-8 if case.dtype == F16 else 1e-35
        n = k.shape[1]
        group = case.h // n
        qa, ka, va = (t.detach().double().abs() for t in leaves[:3])
        ka, va = ka.repeat_interleave(group, 1), va.repeat_interleave(group, 1)
        scale = abs(1 / math.sqrt(case.d) if case.scale is None else case.scale)
        raw = qa @ ka.mT * scale
        size = raw if bias is None else raw + torch.where(bias == -INF, 0.0, bias.abs())
        rough = (2 + math.sqrt(case.d)) * eps * (size + (raw * (p > 0)).amax(-1, keepdim=True))
        err = rough + (p * rough).sum(-1, keepdim=True) + eps * (8 + math.sqrt(case.keys)) + 1.5 * half
        ua = up.double().abs()
        out_err = (p * err) @ va + floor * (p > 0).double() @ va
        dp = ua @ va.mT
        ds = p * (dp + (p * dp).sum(-1, keepdim=True))
        ds_err = ds * (2 * err + half) + p * (2 * p * err * dp).sum(-1, keepdim=True) + floor * (p > 0)
        bounds = [out_err, ds_err @ ka * scale, ds_err.mT @ qa * scale, (p * err + floor * (p > 0)).mT @ ua]
        if group > 1:
            bounds[2:] = [t.unflatten(1, (n, group)).sum(2) for t in bounds[2:]]
        if bias is not None:
            bounds.append(ds_err.sum_to_size(bias.shape))
        values = [out.detach(), *(t.detach() for t in grads)]
        store = [case.dtype] * 4 + ([mask.dtype] if mask is not None else [])
        for i, value in enumerate(values):
            info = torch.finfo(store[i])
            bounds[i] = 3 * bounds[i] + info.eps * value.abs() + 2 * info.tiny * info.eps + 1e-300
        return Expected(values, bounds, p.sum(-1) == 0)


FAILURES: list[str] = []
WORST: dict[str, tuple[float, str]] = {}


def fail(kernel: Kernel, what: str) -> None:
    """Note a failure."""
    FAILURES.append(f"{kernel.name}: {what}")
    print("FAIL", FAILURES[-1], flush=True)


def within(kernel: Kernel, what: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Note a failure unless every element is within its bound."""
    if got.shape != want.shape:
        fail(kernel, f"{what}: shape {tuple(got.shape)} for {tuple(want.shape)}")
        return
    if not got.numel():
        return
    ratio = ((got.detach().double() - want).abs() / bound).nan_to_num(nan=INF).max().item()
    if ratio > WORST.get(kernel.name, (0.0, ""))[0]:
        WORST[kernel.name] = (ratio, what)
    if not ratio <= 1:
        fail(kernel, f"{what}: {ratio:.3g} times the bound")


def check_case(kernel: Kernel, case: Case, up: Tensor, want: Expected, function: Callable[..., Tensor]) -> None:
    """One kernel on one case: result, gradients, dead rows, untouched inputs."""
    q, k, v, mask = case.tensors()
    gqa = case.h_kv is not None and case.h_kv != case.h
    options = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": gqa}
    copies = [None if t is None else (t._version, t.clone()) for t in (q, k, v, mask)]
    leaves = [q, k, v]
    if kernel.gradients and case.grads:
        leaves = [t.requires_grad_() for t in leaves]
        if mask is not None and mask.dtype != torch.bool and kernel.mask_gradients:
            leaves.append(mask.requires_grad_())
    out = function(q, k, v, attn_mask=mask, **options)
    if out.dtype != case.dtype:
        fail(kernel, f"{case.name}: dtype {out.dtype}")
    within(kernel, f"{case.name} out", out, want.values[0], want.bounds[0])
    if (out[want.dead] != 0).any():
        fail(kernel, f"{case.name}: a dead row is not 0")
    if kernel.gradients and case.grads:
        grads = torch.autograd.grad(out, leaves, up)
        for name, grad, value, bound in zip("qkvm", grads, want.values[1:], want.bounds[1:], strict=False):
            within(kernel, f"{case.name} d{name}", grad, value, bound)
        if (grads[0][want.dead] != 0).any():
            fail(kernel, f"{case.name}: the gradient of a dead row is not 0")
    for t, copy in zip((q, k, v, mask), copies, strict=True):
        if t is not None and copy is not None and (t._version != copy[0] or not torch.equal(t.detach(), copy[1])):
            fail(kernel, f"{case.name}: an input was written to")


def upstream(case: Case) -> Tensor:
    """The gradient that comes from above."""
    g = torch.Generator().manual_seed(99)
    width = case.d if case.d_v is None else case.d_v
    return torch.randn(case.b, case.h, case.rows, width, generator=g).to(case.dtype)


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Normal numbers by a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(kernel: Kernel, what: str, got: Tensor, want: Tensor, rel: float) -> None:
    """Note a failure unless the result is within ``rel`` of the largest magnitude of the wanted one."""
    top = want.abs().max().item() if want.numel() else 0.0
    within(kernel, what, got, want.detach().double(), torch.full_like(want, rel * top + 1e-300, dtype=F64))


def double_backward(kernel: Kernel) -> None:
    """Second derivatives of q, k, v and the mask, or a clear error."""
    for dtype, rel in ((F64, 1e-11), (F32, 2e-5), (BF16, 6e-2)):
        for causal, masked in ((False, False), (True, True)):
            q, k, v = (randn(1, 4, 9, 8, seed=1), randn(1, 2, 70, 8, seed=2), randn(1, 2, 70, 6, seed=3))
            mask = randn(9, 70, seed=4)
            mask[:, 5] = -INF
            mask[3] = -INF
            mask[4, 40:] = -INF

            def second(function: Callable[..., Tensor], kind: torch.dtype, mask: Tensor | None) -> list[Tensor]:
                leaves = [t.to(dtype).to(kind).requires_grad_() for t in (q, k, v)]  # noqa: B023
                if mask is not None:
                    leaves.append(mask.to(dtype).to(kind).requires_grad_())  # noqa: B023
                out = function(*leaves[:3], leaves[3] if mask is not None else None)
                up = randn(*out.shape, dtype=dtype, seed=5).to(kind).requires_grad_()  # noqa: B023
                first = torch.autograd.grad(out, leaves, up, create_graph=True)
                ways = [randn(*t.shape, dtype=dtype, seed=6 + i).to(kind) for i, t in enumerate(first)]  # noqa: B023
                total = torch.stack([(g * w).sum() for g, w in zip(first, ways, strict=True)]).sum()
                return [*torch.autograd.grad(total, [*leaves, up])]

            given = mask if masked and kernel.mask_gradients else None

            def ours(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, causal: bool = causal) -> Tensor:
                return kernel.function(q, k, v, attn_mask=m, is_causal=causal, enable_gqa=True)

            def theirs(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, causal: bool = causal) -> Tensor:
                return reference(q, k, v, mask=m, causal=causal)[0]

            if not kernel.double_backward:
                try:
                    got = second(ours, dtype, given)
                except RuntimeError:
                    continue
            else:
                got = second(ours, dtype, given)
            for i, (a, b) in enumerate(zip(got, second(theirs, F64, given), strict=True)):
                close(kernel, f"double backward {dtype} {causal} #{i}", a, b, rel)


def non_finite(kernel: Kernel) -> None:
    """Non-finite keys and values reach the rows that attend them and no others, forward and backward."""
    for bad in (math.nan, INF, -INF):
        q, k, v = (randn(1, 2, 80, 8, seed=i) for i in (1, 2, 3))
        where = slice(50, 53)
        k2, v2 = k.clone(), v.clone()
        k2[:, :, where], v2[:, :, where] = bad, bad
        keep = torch.ones(80, 80, dtype=torch.bool)
        keep[:, where] = False
        masks: list[tuple[str, Tensor | None, bool]] = [("bool", keep, False), ("causal", None, True)]
        masks.append(("float", torch.zeros(80, 80).masked_fill(~keep, -INF), False))
        for name, mask, causal in masks:
            leaves = [t.clone() for t in (q, k2, v2)]
            if kernel.gradients:
                leaves = [t.requires_grad_() for t in leaves]
            out = kernel.function(*leaves, attn_mask=mask, is_causal=causal)
            clean = [t.double().requires_grad_() for t in (q, k, v)]
            want, _ = reference(*clean, mask=mask, causal=causal)
            rows = slice(0, 50 if causal else 80)
            close(kernel, f"non-finite {bad} {name}", out[:, :, rows], want[:, :, rows], 1e-5)
            if causal and math.isnan(bad) and not out[:, :, 53:].isnan().all():
                fail(kernel, "an attended NaN is not in the output")
            if kernel.gradients and not causal:
                up = randn(*out.shape, seed=9)
                got, wanted = torch.autograd.grad(out, leaves, up), torch.autograd.grad(want, clean, up.double())
                for n, a, b in zip("qkv", got, wanted, strict=True):
                    close(kernel, f"non-finite {bad} {name} d{n}", a, b, 2e-5)
    q, k, v = (randn(1, 2, 30, 8, seed=i) for i in (1, 2, 3))
    v[0, 1, 4, 3] = INF
    k[0, 0, 7] = math.nan
    out = kernel.function(q, k, v)
    if not out[0, 0].isnan().all() or not (out[0, 1, :, 3] == INF).all():
        fail(kernel, "attended non-finite values are not in the output")
    q, k, v = (randn(1, 2, 30, 8, seed=i) for i in (1, 2, 3))
    huge_k, huge_v = k.clone(), v.clone()
    huge_k[:, :, 20:], huge_v[:, :, 20:] = 1e20, -1e20
    keep = torch.arange(30) < 20
    out = kernel.function(q, huge_k, huge_v, attn_mask=keep.expand(30, 30))
    close(kernel, "huge masked garbage", out, reference(q, k, v, mask=keep.expand(30, 30))[0], 1e-5)


def empty(kernel: Kernel) -> None:
    """Empty sizes."""
    for b, h, rows, keys in ((2, 2, 0, 5), (2, 2, 5, 0), (0, 2, 3, 5), (2, 0, 3, 5), (1, 1, 0, 0)):
        leaves = [randn(b, h, rows, 4), randn(b, h, keys, 4), randn(b, h, keys, 3)]
        if kernel.gradients:
            leaves = [t.requires_grad_() for t in leaves]
        for causal in (False, True):
            out = kernel.function(*leaves, is_causal=causal)
            if out.shape != (b, h, rows, 3) or (out != 0).any():
                fail(kernel, f"empty sizes {b, h, rows, keys}")
            if kernel.gradients:
                for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
                    if grad.shape != leaf.shape or (grad != 0).any():
                        fail(kernel, f"gradients of empty sizes {b, h, rows, keys}")
    if kernel.function(randn(1, 1, 3, 4), randn(1, 1, 5, 4), randn(1, 1, 5, 0)).shape != (1, 1, 3, 0):
        fail(kernel, "D_v = 0")
    out = kernel.function(randn(1, 1, 3, 0), randn(1, 1, 5, 0), randn(1, 1, 5, 2))
    close(kernel, "D = 0", out, randn(1, 1, 5, 2).double().mean(-2, keepdim=True).expand(1, 1, 3, 2), 1e-6)


def modes(kernel: Kernel) -> None:
    """no_grad, inference_mode, autocast, ranks, one tensor as all inputs, other threads, wrong arguments."""
    q, k, v = randn(1, 4, 40, 16, seed=1), randn(1, 2, 70, 16, seed=2), randn(1, 2, 70, 16, seed=3)
    mask = randn(40, 70, seed=4)
    want = reference(q, k, v, mask=mask, causal=True)[0]
    options = {"attn_mask": mask, "is_causal": True, "enable_gqa": True}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(kernel, mode.__name__, kernel.function(q, k, v, **options), want, 1e-5)
            if kernel.gradients:
                leaf = q.clone().requires_grad_()
                close(kernel, f"{mode.__name__} with a leaf", kernel.function(leaf, k, v, **options), want, 1e-5)
    with torch.autocast("cpu", dtype=BF16):
        out = kernel.function(q, k, v, **options)
    if out.dtype != BF16:
        fail(kernel, f"autocast gives {out.dtype}")
    rounded = [t.to(BF16) for t in (q, k, v, mask)]
    close(kernel, "autocast", out, reference(*rounded[:3], mask=rounded[3], causal=True)[0], 6e-3)
    if kernel.gradients:  # the forward-only kernels may have no float64
        with torch.autocast("cpu", dtype=BF16):
            wide = kernel.function(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
        if wide.dtype != F64:
            fail(kernel, f"autocast of float64 gives {wide.dtype}")
        close(kernel, "autocast float64", wide, reference(q, k, v, causal=True)[0], 1e-13)
    if kernel.gradients:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with torch.autocast("cpu", dtype=BF16):
            out = kernel.function(*leaves, **options)
        double = [t.to(BF16).double().requires_grad_() for t in (q, k, v)]
        up = randn(*out.shape, seed=8).to(BF16)
        wanted = torch.autograd.grad(reference(*double, mask=mask.to(BF16), causal=True)[0], double, up.double())
        for n, a, b in zip("qkv", torch.autograd.grad(out, leaves, up), wanted, strict=True):
            close(kernel, f"autocast d{n}", a, b, 2e-2)
            if a.dtype != F32:
                fail(kernel, "autocast: dtype of a gradient")
        x = randn(1, 2, 33, 16, dtype=F64).requires_grad_()
        y = x.detach().clone().requires_grad_()
        up = randn(1, 2, 33, 16, seed=3)
        grad = torch.autograd.grad(kernel.function(x, x, x, is_causal=True), x, up.double())[0]
        close(
            kernel,
            "q is k is v",
            grad,
            torch.autograd.grad(reference(y, y, y, causal=True)[0], y, up.double())[0],
            1e-12,
        )
        if kernel.double_backward:
            first = torch.autograd.grad(kernel.function(x, x, x), x, up.double(), create_graph=True)[0]
            first2 = torch.autograd.grad(reference(y, y, y)[0], y, up.double(), create_graph=True)[0]
            grad, grad2 = torch.autograd.grad(first.sin().sum(), x)[0], torch.autograd.grad(first2.sin().sum(), y)[0]
            close(kernel, "q is k is v, double", grad, grad2, 1e-11)
    else:
        try:
            kernel.function(q.clone().requires_grad_(), k, v, **options)
            fail(kernel, "an input that requires grad is accepted")
        except NotImplementedError:
            pass
    if kernel.function(q[0], k[0].repeat(2, 1, 1), v[0].repeat(2, 1, 1)).shape != (4, 40, 16):
        fail(kernel, "3-D inputs")
    results: list[Tensor] = []
    lock = threading.Lock()

    def work() -> None:
        for _ in range(2):
            got = kernel.function(q, k, v, **options)
            with lock:
                results.append(got)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(results) != 6:
        fail(kernel, "a thread failed")
    for got in results:
        close(kernel, "threads", got, want, 1e-5)
    wrong = [(q, k, v), (q, k.double(), v), (q, k[..., :3], v), (q, k, v[:, :, 1:])]
    for i, args in enumerate(wrong):
        try:
            kernel.function(*args, enable_gqa=i > 0)
            fail(kernel, f"wrong arguments #{i} are accepted")
        except (RuntimeError, ValueError):
            pass


def dropout(kernel: Kernel) -> None:
    """Every weight is dropped or scaled on its own, by the global generator, and gradients use the same draw."""
    b, h, rows, keys = 2, 4, 50, 90
    q, k = randn(b, h, rows, 8, dtype=F64, seed=1), randn(b, h, keys, 8, dtype=F64, seed=2)
    v = torch.eye(keys, dtype=F64).expand(b, h, keys, keys)
    if not kernel.dropout:
        try:
            kernel.function(q, k, v, dropout_p=0.3)
            fail(kernel, "dropout is accepted")
        except NotImplementedError:
            pass
        return
    for causal in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        torch.manual_seed(5)
        out = kernel.function(*leaves, dropout_p=0.3, is_causal=causal)
        torch.manual_seed(5)
        again = kernel.function(q, k, v, dropout_p=0.3, is_causal=causal)
        other = kernel.function(q, k, v, dropout_p=0.3, is_causal=causal)
        if not torch.allclose(out, again, rtol=1e-9, atol=0) or torch.allclose(out, other):
            fail(kernel, "dropout does not follow the global generator")
        kept = (out.detach() != 0).double() / 0.7
        double = [t.clone().requires_grad_() for t in (q, k, v)]
        want, p = reference(*double, causal=causal, kept=kept)
        close(kernel, "dropout", out, want, 1e-12)
        up = randn(*out.shape, dtype=F64, seed=3)
        if kernel.gradients:
            got, wanted = torch.autograd.grad(out, leaves, up), torch.autograd.grad(want, double, up)
            for n, x, y in zip("qkv", got, wanted, strict=True):
                close(kernel, f"dropout d{n}", x, y, 1e-12)
        live = p > 0
        drops = (out == 0) & live
        count = int(live.sum())
        if abs(int(drops.sum()) / count - 0.3) > 5 * math.sqrt(0.21 / count):
            fail(kernel, f"dropout rate {int(drops.sum()) / count}")
        for dim in range(4):
            first, second = slice(0, -1), slice(1, None)
            pair, base = (t.transpose(0, dim)[first] & t.transpose(0, dim)[second] for t in (drops, live))
            if abs(int(pair.sum()) / int(base.sum()) - 0.09) > 6 * math.sqrt(0.09 / int(base.sum())):
                fail(kernel, "dropped weights are not independent")
    if (kernel.function(q, k, v, dropout_p=1.0) != 0).any():
        fail(kernel, "dropout of 1")


def compiled(kernel: Kernel, backend: str) -> None:
    """A few calls with the kernel compiled in one graph."""
    some = (
        Case("compiled", h=4, h_kv=2, rows=21, keys=70, mask="deadinf:LS", causal=True),
        Case("compiled bf16", rows=21, keys=70, d_v=8, mask="dead:LS", dtype=BF16),
    )
    for case in some:
        torch._dynamo.reset()
        up = upstream(case)
        function = torch.compile(kernel.function, backend=backend, fullgraph=True, dynamic=False)
        try:
            check_case(kernel, case, up, expected(case, up), function)
        except Exception as error:
            fail(kernel, f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
    torch._dynamo.reset()


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only kernels with this in their name")
    parser.add_argument("--compile", metavar="BACKEND", help="check compiled kernels instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.time()
    kernels = [kernel for kernel in KERNELS if arguments.k in kernel.name]
    if len({kernel.name for kernel in KERNELS}) != len(KERNELS):
        raise RuntimeError("two kernels have one name")
    spent = {kernel.name: 0.0 for kernel in kernels}
    refused: dict[str, list[str]] = {kernel.name: [] for kernel in kernels}

    def timed(kernel: Kernel, name: str, run: Callable[[], None]) -> None:
        begun = time.time()
        try:
            run()
        except Exception as error:
            if isinstance(error, NotImplementedError) and "DOMAIN" in kernel.note:
                refused[kernel.name].append(name)
                return
            fail(kernel, f"{name}: {type(error).__name__}: {str(error)[:300]}")
        spent[kernel.name] += time.time() - begun

    if arguments.compile:
        for kernel in kernels:
            if kernel.compile:
                timed(kernel, "compile", partial(compiled, kernel, arguments.compile))
                print(f"{kernel.name:28} {spent[kernel.name]:6.1f} s", flush=True)
    else:
        for case in cases():
            up = upstream(case)
            want = expected(case, up)
            for kernel in kernels:
                timed(kernel, case.name, partial(check_case, kernel, case, up, want, kernel.function))
        for kernel in kernels:
            if kernel.gradients:
                timed(kernel, "double backward", partial(double_backward, kernel))
            for check in (non_finite, empty, modes, dropout):
                timed(kernel, check.__name__, partial(check, kernel))
    for kernel in kernels:
        ratio, what = WORST.get(kernel.name, (0.0, ""))
        print(f"{kernel.name:28} {spent[kernel.name]:6.1f} s  worst {ratio:8.3g} of the bound ({what})")
        if refused[kernel.name]:
            print(f"    refused as outside its domain: {', '.join(refused[kernel.name])}")
    print(f"{len(kernels)} kernels, {len(FAILURES)} failures, {time.time() - start:.0f} s")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
