"""Which transforms of torch every kernel, mask and drop-in bears: each result beside the untransformed or torch's own.

python -m bench.transforms [--only TEXT] [--backend inductor]

A cell is `ok`, `refused` (an error that says so), or what went wrong; the exit code is 1 if anything did.
"""

import argparse
import copy
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.forward_ad as fw
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from harness.kernels.call import Unsupported
from harness.kernels.front import find_kernel
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.mla import MultiHeadLatentAttention

DTYPE = torch.float64
LENGTH, OTHER = 12, 17  # as first seen by whatever records, and as used later


class Attending(nn.Module):
    """`harness.attention` with one kernel and one rule; `mask` is an input."""

    def __init__(self, kernel: str, **rules: Any) -> None:
        super().__init__()
        self.kernel, self.rules = find_kernel(kernel), rules

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = harness.attention(q, k, v, mask=mask, kernel=self.kernel, **self.rules)
        return out


class Textbook(nn.Module):
    """torch's own, with the same arguments."""

    def __init__(self, causal: bool = False, window: int | None = None) -> None:
        super().__init__()
        self.causal, self.window = causal, window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        L, S = q.shape[2], k.shape[2]
        if self.causal or self.window:
            distance = torch.arange(L)[:, None] + (S - L) - torch.arange(S)
            mask = (distance >= 0) & (distance < (self.window or S))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class SelfAttending(nn.Module):
    """A module that takes query, key and value, called with one input; its output alone."""

    def __init__(self, inner: nn.Module, causal: bool) -> None:
        super().__init__()
        self.inner, self.causal = inner, causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(x, x, x, attn_mask=mask, need_weights=False, is_causal=self.causal)[0]
        return out


class Variant(nn.Module):
    def __init__(self, inner: nn.Module, **rules: Any) -> None:
        super().__init__()
        self.inner, self.rules = inner, rules

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(x, mask=mask, **self.rules)
        return out


@dataclass(frozen=True)
class Subject:
    """`inputs` gives the tensors for a number of tokens; those at `lengths` have it in these dimensions."""

    name: str
    mask: str
    module: nn.Module
    torchs: nn.Module
    inputs: Callable[[int], tuple[Tensor, ...]]
    lengths: tuple[dict[int, str], ...] = field(default=())

    def drawn(self, length: int = LENGTH, *, seed: int = 0) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return self.inputs(length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="rows whose name and mask, or columns that, contain this")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile: inductor takes an hour")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    BACKEND[0] = options.backend
    counts: dict[str, int] = {}
    wrong: list[str] = []
    rows = [row for row in subjects() if options.only in f"{row.name} {row.mask}"] or subjects()
    columns = {name: run for name, run in TRANSFORMS.items() if options.only in name} or TRANSFORMS
    print(f"{'':22}" + " ".join(f"{name:>9}" for name in columns))
    for row in rows:
        found = {name: outcome(run, row) for name, run in columns.items()}
        print(f"{row.name + ' ' + row.mask:22}" + " ".join(f"{kind:>9}" for kind, _ in found.values()), flush=True)
        for name, (kind, why) in found.items():
            counts[kind] = counts.get(kind, 0) + 1
            if kind != "ok":
                wrong.append(f"{row.name}, {row.mask}, {name}: {kind}: {why}")
    print("\n".join(["", *wrong]))
    print(f"\n{counts.get('ok', 0)} of {sum(counts.values())} work; {counts.get('refused', 0)} refused with a message")
    return int(set(counts) - {"ok", "refused"} != set())


def outcome(run: Callable[[Subject], None], row: Subject) -> tuple[str, str]:
    torch.compiler.reset()
    try:
        run(row)
    except Unsupported as refusal:
        return "refused", str(refusal)
    except AssertionError as error:
        return "WRONG", _line(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {_line(error)}"
    return "ok", ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# The rows ---------------------------------------------------------------------------------------------------------


def subjects() -> list[Subject]:
    found = [_kernel(name, mask) for name in ("eager", "tiled", "grouped", "auto") for mask in KERNEL_MASKS]
    found += [_drop_in(name, mask) for name in DROP_INS for mask in ("none", "causal", "bool")]
    found += [_variant(name, mask) for name in ("gqa", "mla") for mask in ("none", "causal")]
    return found


KERNEL_MASKS: dict[str, dict[str, Any]] = {"none": {}, "causal": {"causal": True}, "window": {"window": 5}}
KERNEL_MASKS |= {"bool": {}, "float": {}}
DROP_INS: dict[str, type[nn.Module]] = {"packed": EagerMultiheadAttentionWithInProj, "split": EagerMultiheadAttention}


def _kernel(name: str, mask: str) -> Subject:
    # grouped's own lines are for a few queries over a long cache.
    few = name == "grouped"

    def inputs(length: int) -> tuple[Tensor, ...]:
        L, S = (2, 2050 + length) if few else (length, length)
        q, k, v = (torch.randn(2, h, n, 8, dtype=DTYPE) for h, n in ((4, L), (2, S), (2, S)))
        return q, k, v, *_mask(mask, L, S)

    first: dict[int, str] = {} if few else {2: "length"}
    of_mask: dict[int, str] = {1: "length"} if few else {0: "length", 1: "length"}
    lengths = (first, {2: "length"}, {2: "length"}, *([of_mask] if mask in ("bool", "float") else []))
    rules = KERNEL_MASKS[mask]
    return Subject(name, mask, Attending(name, **rules), Textbook(**rules), inputs, lengths)


def _mask(kind: str, L: int, S: int) -> tuple[Tensor, ...]:
    if kind == "bool":
        return ((torch.rand(L, S) < 0.7) | (torch.arange(S) == 0),)
    return (torch.randn(L, S, dtype=DTYPE),) if kind == "float" else ()


def _drop_in(name: str, mask: str) -> Subject:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True, dtype=DTYPE)
    ours = DROP_INS[name](16, 2, batch_first=True, dtype=DTYPE)
    ours.load_state_dict(theirs.state_dict())

    def inputs(length: int) -> tuple[Tensor, ...]:
        x = torch.randn(2, length, 16, dtype=DTYPE)
        if mask == "causal":
            return x, torch.ones(length, length, dtype=torch.bool).triu(1)
        return (x, *(~m for m in _mask(mask, length, length)))

    lengths: tuple[dict[int, str], ...] = ({1: "length"}, *([{0: "length", 1: "length"}] if mask != "none" else []))
    of_ours, of_theirs = (SelfAttending(m, mask == "causal") for m in (ours, theirs))
    return Subject(name, mask, of_ours, of_theirs, inputs, lengths)


def _variant(name: str, mask: str) -> Subject:
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 8, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8}

    def made(kernel: str) -> nn.Module:
        if name == "gqa":
            return GroupedQueryAttention(16, 4, 2, kernel=kernel, dtype=DTYPE)
        return MultiHeadLatentAttention(16, 2, **sizes, kernel=kernel, dtype=DTYPE)  # type: ignore[arg-type]

    ours, theirs = made("auto"), made("sdpa")
    theirs.load_state_dict(ours.state_dict())
    of_ours, of_theirs = (Variant(m, causal=mask == "causal") for m in (ours, theirs))

    def inputs(length: int) -> tuple[Tensor, ...]:
        return (torch.randn(2, length, 16, dtype=DTYPE),)

    return Subject(name, mask, of_ours, of_theirs, inputs, ({1: "length"},))


# The columns ------------------------------------------------------------------------------------------------------

BACKEND = ["aot_eager"]


def same(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def floats(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Those that may be differentiated, and the others, which stand last."""
    return tuple(t for t in tensors if t.is_floating_point()), tuple(t for t in tensors if not t.is_floating_point())


def expected(row: Subject, tensors: tuple[Tensor, ...]) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        out: Tensor = row.torchs(*tensors)
    return out


def leaves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors)


def compiled(row: Subject, *lengths: int, **options: Any) -> None:
    made = torch.compile(row.module, backend=BACKEND[0], **options)
    for length in lengths:
        tensors = leaves(row.drawn(length))
        into = floats(tensors)[0]
        out, wanted = made(*tensors), expected(row, tensors)
        same(out, wanted)
        same(torch.autograd.grad(out.square().sum(), into), torch.autograd.grad(wanted.square().sum(), into))


def exported(row: Subject, *, dynamic: bool) -> None:
    length = torch.export.Dim("length", min=2, max=4096)
    shapes: Any = tuple(dict.fromkeys(dims, length) for dims in row.lengths)
    program = torch.export.export(row.module, row.drawn(), dynamic_shapes=shapes if dynamic else None).module()
    for tensors in (row.drawn(seed=1), *([row.drawn(OTHER)] if dynamic else [])):
        same(program(*tensors), expected(row, tensors))


def traced(row: Subject) -> None:
    recorded = torch.jit.trace(row.module, row.drawn())  # checks by itself that a second trace gives the same
    for tensors in (row.drawn(seed=1), row.drawn(OTHER)):
        same(recorded(*tensors), expected(row, tensors))


def made_fx(row: Subject) -> None:
    for mode in ("real", "symbolic"):
        graph = make_fx(row.module, tracing_mode=mode, _allow_non_fake_inputs=True)(*row.drawn())
        same(graph(*row.drawn(seed=1)), expected(row, row.drawn(seed=1)))


def vmapped(row: Subject) -> None:
    several = [row.drawn(seed=seed) for seed in range(3)]
    stacked = tuple(torch.stack(each) for each in zip(*several, strict=True))
    same(torch.vmap(row.module)(*stacked), torch.stack([expected(row, each) for each in several]))
    shared = row.drawn()
    dims = (0, *[None] * (len(shared) - 1))
    wanted = torch.stack([expected(row, (each[0], *shared[1:])) for each in several])
    same(torch.vmap(row.module, in_dims=dims)(stacked[0], *shared[1:]), wanted)


def per_sample(row: Subject) -> None:
    several = [row.drawn(seed=seed) for seed in range(3)]
    stacked = tuple(torch.stack(each) for each in zip(*several, strict=True))
    found = torch.vmap(torch.func.grad(lambda *t: row.module(*t).square().sum()))(*stacked)
    same(found, torch.stack([_gradients(row, each)[0] for each in several]))


def _gradients(row: Subject, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensors = leaves(tensors)
    return torch.autograd.grad(expected(row, tensors).square().sum(), floats(tensors)[0])


def func_grad(row: Subject) -> None:
    into, others = floats(row.drawn())
    loss = torch.func.grad(lambda *t: row.module(*t, *others).square().sum(), argnums=tuple(range(len(into))))
    same(loss(*into), _gradients(row, row.drawn()))


def func_jvp(row: Subject) -> None:
    into, others = floats(row.drawn())
    towards = floats(row.drawn(seed=1))[0]
    found = torch.func.jvp(lambda *t: row.module(*t, *others), into, towards)
    with sdpa_kernel(SDPBackend.MATH):
        same(found, torch.func.jvp(lambda *t: row.torchs(*t, *others), into, towards))


def forward_ad(row: Subject) -> None:
    into, others = floats(row.drawn())
    towards = floats(row.drawn(seed=1))[0]
    for grad in (True, False):
        with fw.dual_level(), torch.set_grad_enabled(grad), sdpa_kernel(SDPBackend.MATH):
            duals = [fw.make_dual(a, b) for a, b in zip(into, towards, strict=True)]
            found, wanted = (fw.unpack_dual(m(*duals, *others)) for m in (row.module, row.torchs))
            same(tuple(found), tuple(wanted))


def double_backward(row: Subject) -> None:
    same(_penalty(row, row.module), _penalty(row, row.torchs))


def _penalty(row: Subject, module: nn.Module) -> tuple[Tensor, ...]:
    """The gradients of the squared gradients of a loss that is linear in the output."""
    tensors = leaves(row.drawn())
    into = floats(tensors)[0]
    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(module(*tensors).sum(), into, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), into)


def batched_gradients(row: Subject) -> None:
    tensors = leaves(row.drawn())
    into = floats(tensors)[0]
    out = row.module(*tensors)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, into, grads, is_grads_batched=True)
    wanted = expected(row, tensors)
    each = [torch.autograd.grad(wanted, into, grad, retain_graph=True) for grad in grads]
    same(found, tuple(torch.stack(one) for one in zip(*each, strict=True)))


def autocast(row: Subject) -> None:
    module = copy.deepcopy(row.module).float()
    tensors = tuple(t.float() if t.is_floating_point() else t for t in row.drawn())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(*tensors)
    same(out.double(), expected(row, row.drawn()), 0.03)


def deep_copied(row: Subject) -> None:
    same(copy.deepcopy(row.module)(*row.drawn()), expected(row, row.drawn()))


def pickled(row: Subject) -> None:
    same(pickle.loads(pickle.dumps(row.module))(*row.drawn()), expected(row, row.drawn()))
    file = io.BytesIO()
    torch.save(row.module, file)
    file.seek(0)
    same(torch.load(file, weights_only=False)(*row.drawn()), expected(row, row.drawn()))


def on_meta(row: Subject) -> None:
    module, tensors = copy.deepcopy(row.module).to("meta"), tuple(t.to("meta") for t in row.drawn())
    out, wanted = module(*tensors), expected(row, row.drawn())
    assert (out.is_meta, out.shape, out.dtype) == (True, wanted.shape, wanted.dtype)


def symbolically_traced(row: Subject) -> None:
    tensors = row.drawn(OTHER)
    absent = {"mask": None} if len(tensors) in (1, 3) else {}
    same(torch.fx.symbolic_trace(row.module, absent)(*tensors), expected(row, tensors))


TRANSFORMS: dict[str, Callable[[Subject], None]] = {
    "compile": lambda row: compiled(row, LENGTH, OTHER),
    "fullgraph": lambda row: compiled(row, LENGTH, fullgraph=True),
    "export": lambda row: exported(row, dynamic=False),
    "dynamic": lambda row: exported(row, dynamic=True),
    "jit.trace": traced,
    "make_fx": made_fx,
    "vmap": vmapped,
    "persample": per_sample,
    "grad": func_grad,
    "jvp": func_jvp,
    "fwd AD": forward_ad,
    "backward2": double_backward,
    "batched": batched_gradients,
    "autocast": autocast,
    "deepcopy": deep_copied,
    "pickle": pickled,
    "meta": on_meta,
    "fx": symbolically_traced,
}


if __name__ == "__main__":
    sys.exit(main())
