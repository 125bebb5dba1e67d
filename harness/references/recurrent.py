"""Lightning, Gated DeltaNet, KDA and Mamba2, token by token, in one dtype throughout: in float64 truly in float64.

Parameters have the names of transformers' classes. Those cast to float32 inside, whatever the model's dtype, so that a
copy of them in double precision would be no golden.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.references import Reference
from harness.variants.specs.recurrent import CONV


class State:
    """What the tokens so far have left: whatever a module keeps, by name."""

    def __init__(self, capacity: int = 0) -> None:
        self.kept: dict[str, Tensor] = {}


class Recurrent(nn.Module):
    def forward(self, x: Tensor, keep: Tensor | None = None, past: State | None = None) -> Tensor:
        """keep (B, L), False = padding."""
        state = State() if past is None else past
        if keep is not None:
            x = x * keep[..., None]
        return self.mixed(x, torch.ones(x.shape[:2], dtype=torch.bool) if keep is None else keep, state)

    def mixed(self, x: Tensor, keep: Tensor, state: State) -> Tensor:
        raise NotImplementedError


def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, keep: Tensor, state: State) -> Tensor:
    """q, k (B, L, H, Dk), v (B, L, H, Dv), decay (B, L, H, Dk) within (0, 1], beta (B, L, H) -> (B, L, H, Dv)."""
    B, L, H, _ = q.shape
    memory = state.kept.get("memory")
    if memory is None:
        memory = torch.zeros(B, H, k.shape[-1], v.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(L):
        faded = torch.einsum("bhkv,bhk->bhkv", memory, decay[:, t])
        new = v[:, t]
        if beta is not None:
            recalled = torch.einsum("bhkv,bhk->bhv", faded, k[:, t])
            new = (new - recalled) * beta[:, t, :, None]
        written = faded + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        memory = torch.where(keep[:, t, None, None, None], written, memory)
        outputs.append(torch.einsum("bhkv,bhk->bhv", memory, q[:, t]))
    state.kept["memory"] = memory
    return torch.stack(outputs, dim=1)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, state: State) -> Tensor:
    """x (B, L, channels), weight (channels, 1, CONV): a sum of shifted inputs, then silu."""
    before = state.kept.get("inputs")
    if before is None:
        before = torch.zeros(x.shape[0], CONV - 1, x.shape[2], dtype=x.dtype)
    seen, L = torch.cat([before, x], dim=1), x.shape[1]
    state.kept["inputs"] = seen[:, -(CONV - 1) :]
    out = sum(seen[:, lag : lag + L] * weight[:, 0, lag] for lag in range(CONV))
    assert isinstance(out, Tensor)
    return F.silu(out if bias is None else out + bias)


def wide(*tensors: Tensor) -> list[Tensor]:
    """Half precision keeps its recurrence in float32."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def normed(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


class Weight(nn.Module):
    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0]))


class Lightning(Recurrent):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed_dim, self.heads, self.head_dim = case.embed_dim, case.heads, case.head_dim
        inner = case.heads * case.head_dim
        self.qkv_proj = nn.Linear(case.embed_dim, 3 * inner, bias=False)
        self.norm = Weight(inner)
        self.output_gate = nn.Linear(case.embed_dim, inner, bias=False)
        self.out_proj = nn.Linear(inner, case.embed_dim, bias=False)

    def mixed(self, x: Tensor, keep: Tensor, state: State) -> Tensor:
        B, L, _ = x.shape
        qkv = F.silu(self.qkv_proj(x)).view(B, L, self.heads, 3, self.head_dim)
        q, k, v = wide(*qkv.unbind(3))
        # The first of one layer: the rate of its last head is 2^-8.
        rates = torch.tensor([(1 / 2 ** (8 / self.heads)) ** (h + 1) for h in range(self.heads)], dtype=q.dtype)
        decay = torch.exp(-rates * (1 + 1e-5))[:, None].expand(B, L, self.heads, self.head_dim)
        out = scan(q, k, v, decay, None, keep, state).reshape(B, L, -1).to(x.dtype)
        projected: Tensor = self.out_proj(torch.sigmoid(self.output_gate(x)) * rms(out, self.norm.weight, 1e-6))
        return projected


class GatedDelta(Recurrent):
    def __init__(self, case: Case) -> None:
        super().__init__()
        assert case.kv_heads is not None and case.v_head_dim is not None
        self.embed_dim = case.embed_dim
        self.sizes = Hv, Hk, Dk, Dv = case.heads, case.kv_heads, case.head_dim, case.v_head_dim
        self.in_proj_qkvz = nn.Linear(case.embed_dim, 2 * (Hk * Dk + Hv * Dv), bias=False)
        self.in_proj_ba = nn.Linear(case.embed_dim, 2 * Hv, bias=False)
        self.conv1d = Weight(2 * Hk * Dk + Hv * Dv, 1, CONV)
        self.dt_bias = nn.Parameter(torch.empty(Hv))
        self.A_log = nn.Parameter(torch.empty(Hv))
        self.norm = Weight(Dv)
        self.out_proj = nn.Linear(Hv * Dv, case.embed_dim, bias=False)

    def mixed(self, x: Tensor, keep: Tensor, state: State) -> Tensor:
        (B, L, _), (Hv, Hk, Dk, Dv) = x.shape, self.sizes
        per = Hv // Hk
        qkvz = self.in_proj_qkvz(x).view(B, L, Hk, 2 * Dk + 2 * per * Dv)
        ba = self.in_proj_ba(x).view(B, L, Hk, 2 * per)
        q, k = qkvz[..., :Dk].flatten(2), qkvz[..., Dk : 2 * Dk].flatten(2)
        v, z = qkvz[..., 2 * Dk : 2 * Dk + per * Dv].flatten(2), qkvz[..., 2 * Dk + per * Dv :].reshape(B, L, Hv, Dv)
        b, a = ba[..., :per].flatten(2), ba[..., per:].flatten(2)
        mixed = convolved(torch.cat([q, k, v], dim=-1), self.conv1d.weight, None, state)
        q, k, v = mixed.split([Hk * Dk, Hk * Dk, Hv * Dv], dim=-1)
        q, k, v, beta, a, rate, bias = wide(q, k, v, b.sigmoid(), a, self.A_log, self.dt_bias)
        heads = torch.arange(Hv) // per  # the key head of each value head
        q, k = (normed(t.view(B, L, Hk, Dk))[:, :, heads] for t in (q, k))
        decay = torch.exp(-torch.exp(rate) * F.softplus(a + bias))[..., None].expand(B, L, Hv, Dk)
        out = scan(q / Dk**0.5, k, v.view(B, L, Hv, Dv), decay, beta, keep, state).to(x.dtype)
        out = rms(out, self.norm.weight, 1e-6) * F.silu(wide(z)[0]).to(x.dtype)
        projected: Tensor = self.out_proj(out.flatten(2))
        return projected


class ForgetGate(nn.Module):
    def __init__(self, embed_dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.f_a_proj = nn.Linear(embed_dim, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, heads * head_dim, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads * head_dim))
        self.A_log = nn.Parameter(torch.empty(1, 1, heads, 1))


class KimiDelta(Recurrent):
    def __init__(self, case: Case) -> None:
        super().__init__()
        E, self.heads, self.head_dim = case.embed_dim, case.heads, case.head_dim
        self.embed_dim, inner = E, case.heads * case.head_dim
        self.q_proj = nn.Linear(E, inner, bias=False)
        self.k_proj = nn.Linear(E, inner, bias=False)
        self.v_proj = nn.Linear(E, inner, bias=False)
        self.conv1d = Weight(3 * inner, 1, CONV)
        self.forget_gate = ForgetGate(E, case.heads, case.head_dim)
        self.b_proj = nn.Linear(E, case.heads, bias=False)
        self.g_a_proj = nn.Linear(E, case.head_dim, bias=False)
        self.g_b_proj = nn.Linear(case.head_dim, inner, bias=False)
        self.o_norm = Weight(case.head_dim)
        self.o_proj = nn.Linear(inner, E, bias=False)

    def mixed(self, x: Tensor, keep: Tensor, state: State) -> Tensor:
        (B, L, _), H, D = x.shape, self.heads, self.head_dim
        joined = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        q, k, v = convolved(joined, self.conv1d.weight, None, state).chunk(3, dim=-1)
        gate = self.forget_gate
        speed, rate, bias = wide(gate.f_b_proj(gate.f_a_proj(x)), gate.A_log, gate.dt_bias)
        decay = torch.exp(-torch.exp(rate) * F.softplus(speed + bias).view(B, L, H, D))
        q, k, v, beta = wide(*(t.view(B, L, H, D) for t in (q, k, v)), torch.sigmoid(self.b_proj(x)))
        out = scan(normed(q) / D**0.5, normed(k), v, decay, beta, keep, state).to(x.dtype)
        shown = torch.sigmoid(self.g_b_proj(self.g_a_proj(x))).view(B, L, H, D)
        projected: Tensor = self.o_proj((rms(out, self.o_norm.weight, 1e-6) * shown).flatten(2))
        return projected


class Mamba2Mixer(Recurrent):
    def __init__(self, case: Case) -> None:
        super().__init__()
        assert case.kv_heads is not None
        self.embed_dim = case.embed_dim
        self.sizes = H, G, P, N = case.heads, case.kv_heads, case.head_dim, 2 * case.head_dim
        self.in_proj = nn.Linear(case.embed_dim, 2 * H * P + 2 * G * N + H, bias=False)
        self.conv1d = Weight(H * P + 2 * G * N, 1, CONV, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.A_log = nn.Parameter(torch.empty(H))
        self.norm = Weight(H * P)
        self.D = nn.Parameter(torch.empty(H))
        self.out_proj = nn.Linear(H * P, case.embed_dim, bias=False)

    def mixed(self, x: Tensor, keep: Tensor, state: State) -> Tensor:
        (B, L, _), (H, G, P, N) = x.shape, self.sizes
        gate, inputs, dt = self.in_proj(x).split([H * P, H * P + 2 * G * N, H], dim=-1)
        mixed = convolved(inputs, self.conv1d.weight, self.conv1d.bias, state)
        values, keys, queries, dt, rate, bias, gate, skip = wide(
            mixed[..., : H * P].view(B, L, H, P),
            mixed[..., H * P : H * P + G * N].view(B, L, G, N),
            mixed[..., H * P + G * N :].view(B, L, G, N),
            *(dt, self.A_log, self.dt_bias, gate, self.D),
        )
        heads = torch.arange(H) // (H // G)
        dt = F.softplus(dt + bias)
        decay = torch.exp(-torch.exp(rate) * dt)[..., None].expand(B, L, H, N)
        out = scan(queries[:, :, heads], keys[:, :, heads], values * dt[..., None], decay, None, keep, state)
        out = ((out + values * skip[:, None]).flatten(2) * F.silu(gate)).to(x.dtype)
        projected: Tensor = self.out_proj(rms(out, self.norm.weight, 1e-5))
        return projected


MODULES: Mapping[str, type[Recurrent]] = {
    "lightning": Lightning,
    "gated_deltanet": GatedDelta,
    "kda": KimiDelta,
    "mamba2": Mamba2Mixer,
}


def build(case: Case) -> nn.Module:
    module: Any = MODULES[case.variant]
    built: nn.Module = module(case)
    return built


def view(case: Case, dense: Tensor | None, plain_causal: bool) -> Mapping[str, Any]:
    """Of the last query's row of the mask, which hides padding alone, the part of the new tokens."""
    if dense is None or plain_causal:
        return {"keep": None}
    L = dense.shape[2]
    return {"keep": dense[:, 0, -1, -L:].expand(case.batch, -1)}


def run(
    module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    return module(x, past=cache, **view), None


REFERENCE = Reference("recurrent", build, view, run, new_cache=State)
