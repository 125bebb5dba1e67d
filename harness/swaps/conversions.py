"""One kind of attention into another: exactly where that is possible, and elsewhere with the error it costs.

split, fused    nn.MultiheadAttention's contract with three input projections, or one: the same numbers cut differently
mha             every key/value head repeated for each query head of its group: exact
gqa-N, mqa      key/value heads of a group averaged: exact only where they are equal
mla, mla-R      [Wk; Wv] as a product through R latent channels: exact at full rank, the nearest such product below it
lora-R          MLA's decompressor as a product of rank R: exact from full rank on, the nearest such product below it

Query and output projections are the old modules themselves; so are any others that do not change.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from harness.kernels.call import Kernel
from harness.swaps.converters import Conversion, Request, SwapError, converts
from harness.swaps.torch_layers import PARTS, POLICIES, convert_to_drop_in, drop_in_like, split_sources, thirds
from harness.swaps.weights import HOOKS, WeightSource
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj
from harness.variants.gqa import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention
from harness.variants.mla import LowRankLinear, MultiHeadLatentAttention

# All three for every target, also those that are it already: in a model that mixes them, all become the same.
GROUPED = (GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention)
KV_PARTS = ("k_proj", "v_proj")


@converts(*GROUPED, to="mha")
@converts(*GROUPED, to="mqa")
def to_mha_or_mqa(old: GroupedQueryAttention, kernel: Kernel, request: Request) -> Conversion:
    _refuse_size(request)
    kind = MultiHeadAttention if request.to == "mha" else MultiQueryAttention
    return _regrouped(old, kind(old.embed_dim, old.num_heads, head_dim=old.head_dim, **_options(old, kernel)))


@converts(*GROUPED, to="gqa")
def to_gqa(old: GroupedQueryAttention, kernel: Kernel, request: Request) -> Conversion:
    N = request.size
    if N is None:
        raise SwapError('to = "gqa": needs the number of key/value heads, as in "gqa-2"')
    if old.num_kv_heads % N:
        raise SwapError(f"gqa-{N}: {N} must divide the {old.num_kv_heads} key/value heads of {type(old).__name__}")
    new = GroupedQueryAttention(old.embed_dim, old.num_heads, N, head_dim=old.head_dim, **_options(old, kernel))
    return _regrouped(old, new)


@converts(*GROUPED, to="mla", options=("mode",))
def to_mla(old: GroupedQueryAttention, kernel: Kernel, request: Request) -> Conversion:
    k, v = _linears(old, KV_PARTS)
    stack = torch.cat([_numbers(k.weight), _numbers(v.weight)])  # (2 * H_kv * D, E)
    full = min(stack.shape)
    rank = full if request.size is None else request.size
    dtype = k.weight.dtype
    up, down = (factor.to(dtype) for factor in factors(stack, rank))
    new = MultiHeadLatentAttention(
        old.embed_dim,
        old.num_heads,
        kv_lora_rank=rank,
        nope_head_dim=old.head_dim,
        rope_head_dim=0,
        v_head_dim=old.head_dim,
        latent_norm=False,
        mode=request.options.get("mode", "auto"),
        **_options(old, kernel),
    )
    new.q_proj, new.out_proj = old.q_proj, old.out_proj
    weights = [k.weight, v.weight]
    biases = [linear.bias for linear in (k, v) if linear.bias is not None]
    down_bias = up_bias = None
    if biases:
        # All behind the latent: in front of it a bias would survive at full rank alone.
        down_bias = _parameter(torch.zeros(rank), biases)
        both = [torch.zeros(k.out_features) if linear.bias is None else linear.bias.detach() for linear in (k, v)]
        up_bias = _parameter(_per_head(torch.cat([t.to(biases[0]) for t in both]), old), biases)
    new.kv_a_proj = _linear(_parameter(down, weights), down_bias)
    new.kv_b_proj = _linear(_parameter(_per_head(up, old), weights), up_bias)
    error = None if rank >= full else distance(up.double() @ down.double(), stack)
    derived = frozenset(name for name, _ in new.named_parameters() if name.startswith(("kv_a_proj.", "kv_b_proj.")))
    return Conversion(new, {}, derived, error)


@converts(MultiHeadLatentAttention, to="lora")
def to_lora(old: MultiHeadLatentAttention, kernel: Kernel, request: Request) -> Conversion:
    rank, inner = request.size, old.kv_b_proj
    if rank is None:
        raise SwapError('to = "lora": needs the rank of the decompressor, as in "lora-16"')
    if not isinstance(inner, nn.Linear):
        raise SwapError(f"its decompressor is a product already, of rank {old.decompress_rank}")
    _linears(old, ("kv_b_proj",), beside=set(dict(old.named_children())))
    stack = _numbers(inner.weight)  # (H * (N + V), r)
    up, down = (factor.to(inner.weight.dtype) for factor in factors(stack, rank))
    new = MultiHeadLatentAttention(
        old.embed_dim,
        old.num_heads,
        kv_lora_rank=old.kv_lora_rank,
        q_lora_rank=old.q_lora_rank,
        decompress_rank=rank,
        nope_head_dim=old.nope_head_dim,
        rope_head_dim=old.rope_head_dim,
        v_head_dim=old.v_head_dim,
        latent_norm=isinstance(old.kv_a_norm, nn.RMSNorm),
        mode=old.mode,
        **_options(old, kernel),
    )
    new.rope = old.rope
    for name, child in old.named_children():
        if name != "kv_b_proj":
            setattr(new, name, child)
    assert isinstance(new.kv_b_proj, LowRankLinear)
    new.kv_b_proj.down = _linear(_parameter(down, [inner.weight]), None)
    new.kv_b_proj.up = _linear(_parameter(up, [inner.weight]), inner.bias)
    derived = frozenset({"kv_b_proj.down.weight", "kv_b_proj.up.weight"})
    weights = {} if inner.bias is None else {"kv_b_proj.up.bias": WeightSource("kv_b_proj.bias")}
    return Conversion(new, weights, derived, distance(up.double() @ down.double(), stack))


def factors(stack: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """up (M, R) and down (R, E) whose product is `stack` (M, E), or below full rank the nearest that R channels allow.

    At full rank the latent holds the keys and values themselves, or where those are wider the token. An SVD would be
    exact in algebra only: columns of unlike size come back from it with a relative error far beyond their rounding.
    """
    M, E = stack.shape
    if rank < min(M, E):
        if not stack.isfinite().all():
            raise SwapError("its k_proj or v_proj holds NaN or inf: there is no nearest product of lower rank")
        U, S, Vh = torch.linalg.svd(stack, full_matrices=False)
        return U[:, :rank] * S[:rank], Vh[:rank]
    up, down = (torch.eye(M, dtype=stack.dtype), stack) if M <= E else (stack, torch.eye(E, dtype=stack.dtype))
    idle = rank - min(M, E)  # channels asked for beyond full rank
    return F.pad(up, (0, idle)), F.pad(down, (0, 0, 0, idle))


def distance(found: Tensor, original: Tensor) -> float | None:
    """Relative, in the Frobenius norm; None if there is none at all. NaN is a distance."""
    if torch.equal(found, original):
        return None
    size = original.abs().max()  # so that no square underflows to 0
    return float(torch.linalg.vector_norm((found - original) / size) / torch.linalg.vector_norm(original / size))


@converts(nn.MultiheadAttention, to="split", options=POLICIES)
@converts(nn.MultiheadAttention, to="fused", options=POLICIES)
def split_or_fuse_torch(old: nn.MultiheadAttention, kernel: Kernel, request: Request) -> Conversion:
    _refuse_size(request)
    options = {**request.options, "use_in_proj": request.to == "fused"}
    return convert_to_drop_in(old, kernel, dataclasses.replace(request, options=options))


@converts(EagerMultiheadAttentionWithInProj, to="split")
def split_drop_in(old: EagerMultiheadAttentionWithInProj, kernel: Kernel, request: Request) -> Conversion:
    _refuse_size(request)
    if parametrize.is_parametrized(old):
        names = ", ".join(old.parametrizations)  # type: ignore[arg-type]
        raise SwapError(f"its {names} is parametrized: split, it could not be")
    return Conversion(drop_in_like(old, EagerMultiheadAttention, kernel, {}), split_sources(old))


@converts(EagerMultiheadAttention, to="fused")
def fuse_drop_in(old: EagerMultiheadAttention, kernel: Kernel, request: Request) -> Conversion:
    _refuse_size(request)
    linears = _linears(old, PARTS)
    new: Any = drop_in_like(old, EagerMultiheadAttentionWithInProj, kernel, {})
    # Of unlike widths torch keeps three weights, and packs the biases alone.
    weights = {} if old.packs else {f"{part}_weight": WeightSource(f"{part}.weight") for part in PARTS}
    packs = {"weight": old.packs, "bias": old.in_proj_bias is not None}
    packed = [kind for kind, is_packed in packs.items() if is_packed]
    back: dict[str, WeightSource] = {}
    for kind in packed:
        parts = [getattr(linear, kind) for linear in linears]
        setattr(new, f"in_proj_{kind}", _parameter(torch.cat([part.detach() for part in parts]), parts))
        back |= {f"{part}.{kind}": WeightSource(f"in_proj_{kind}", rows) for part, rows in thirds(old.embed_dim)}
    return Conversion(new, weights, frozenset(f"in_proj_{kind}" for kind in packed), back=back)


def _regrouped(old: GroupedQueryAttention, new: GroupedQueryAttention) -> Conversion:
    """Key/value heads repeated or averaged to `new`'s number of them."""
    new.q_proj, new.out_proj = old.q_proj, old.out_proj
    before, after = old.num_kv_heads, new.num_kv_heads
    if before == after:
        new.k_proj, new.v_proj = old.k_proj, old.v_proj
        return Conversion(new, {})
    originals: list[Tensor] = []
    changed: dict[str, nn.Parameter] = {}
    for name, linear in zip(KV_PARTS, _linears(old, KV_PARTS), strict=True):
        for kind, parameter in linear.named_parameters():
            heads = parameter.detach().unflatten(0, (before, -1))  # (H_kv, D, ...)
            heads = _repeated(heads, after) if after > before else _averaged(heads, after)
            changed[f"{name}.{kind}"] = _parameter(heads.flatten(0, 1), [parameter])
            originals.append(parameter)
        setattr(new, name, _linear(changed[f"{name}.weight"], changed.get(f"{name}.bias")))
    error = None
    if after < before:
        error = distance(
            torch.cat([_repeated(_numbers(p).unflatten(0, (after, -1)), before).flatten() for p in changed.values()]),
            torch.cat([_numbers(p).flatten() for p in originals]),
        )
    return Conversion(new, {}, frozenset(changed), error)


def _repeated(heads: Tensor, number: int) -> Tensor:
    """Each head for every member of its group: consecutive heads share one, so `tile` would mix the groups."""
    return heads.repeat_interleave(number // heads.shape[0], dim=0)


def _averaged(heads: Tensor, number: int) -> Tensor:
    """Means of consecutive heads, (H_kv, D, ...) -> (number, D, ...)."""
    groups = _numbers(heads).unflatten(0, (number, -1))
    first = groups[:, :1]
    # As a change from the first head: the mean of equal heads is then that head, to the bit.
    return (first + (groups - first).mean(1, keepdim=True)).squeeze(1)


def _per_head(rows: Tensor, old: GroupedQueryAttention) -> Tensor:
    """All k rows then all v rows, (2 * H_kv * D, ...) -> for each query head its k rows, then its v rows."""
    pairs = rows.unflatten(0, (2, old.num_kv_heads, old.head_dim)).transpose(0, 1)  # (H_kv, 2, D, ...)
    return _repeated(pairs, old.num_heads).flatten(0, 2)  # (H * 2 * D, ...)


def _options(old: GroupedQueryAttention | MultiHeadLatentAttention, kernel: Kernel) -> dict[str, Any]:
    """On the meta device, without memory or random numbers: every projection is put in afterwards."""
    return {"dropout": old.dropout, "kernel": kernel, "device": "meta"}


def _refuse_size(request: Request) -> None:
    if request.size is not None:
        raise SwapError(f"to = {request.to}-{request.size}: {request.to} takes no number")


def _linears(old: nn.Module, names: Sequence[str], beside: Collection[str] = ("q_proj", "out_proj")) -> list[nn.Linear]:
    """The projections that new weights are computed from: whatever else they do would be lost without a word.

    `beside` are the parts that stay.
    """
    for name in names:
        linear = old.get_submodule(name)
        if type(linear) is not nn.Linear or "forward" in vars(linear):
            raise SwapError(f"its {name} is {type(linear).__name__} with a forward of its own: must be a plain Linear")
        if any(vars(linear)[hooks] for hooks in HOOKS):
            raise SwapError(f"its {name} has hooks, and the new weights no place for them")
    kept = {*names, *beside, "bias_k", "bias_v"}
    if lost := [name for name, _ in old.named_parameters() if name.partition(".")[0] not in kept]:
        raise SwapError(f"parameters that nothing takes over: {', '.join(lost)}")
    return [old.get_submodule(name) for name in names]  # type: ignore[misc]


def _numbers(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise SwapError("its weights are on the meta device: there are no numbers to convert")
    return tensor.detach().to("cpu", torch.float64)


def _parameter(value: Tensor, sources: Sequence[Tensor]) -> nn.Parameter:
    """Learns if any of its sources does."""
    like = sources[0]
    learns = any(source.requires_grad for source in sources)
    return nn.Parameter(value.to(like.device, like.dtype, copy=True), requires_grad=learns)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    return linear
