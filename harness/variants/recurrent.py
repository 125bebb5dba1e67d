"""Layers around linear recurrences: Lightning, Gated DeltaNet, KDA and Mamba2, and a cache that no length enlarges.

Parameters have the names and shapes of transformers' classes, so that state dicts go over as they are. A token that a
mask hides from all leaves the state as it was.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.kernels.call import Unsupported
from harness.variants.recurrence import FORMS, Form, Recurrence, StateCache, run
from harness.variants.specs.recurrent import CHUNK, CONV, DeltaSizes, Mamba2Sizes


class RecurrentLayer(nn.Module):
    """A subclass says in `_mix` what its recurrence is, and what becomes of its outputs."""

    def __init__(self, *, form: Form = "auto", chunk: int = CHUNK, counted: Callable[[], None] | None = None) -> None:
        """`counted` is called in each forward pass: there is no kernel whose calls would show that it ran."""
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"form = {form!r}: must be one of {', '.join(FORMS)}")
        if chunk < 1:
            raise ValueError(f"chunk = {chunk}: must be at least 1")
        self.form, self.chunk, self.counted = form, chunk, counted

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = True,
        window: None = None,
        cache: StateCache | None = None,
    ) -> Tensor:
        """x (B, L, E) -> (B, L, E). A mask may hide whole tokens alone: bool, the same for all queries and heads."""
        if not causal or window is not None:
            raise Unsupported(f"causal = {causal}, window = {window}: a recurrence is causal, and forgets by its decay")
        if self.counted is not None:
            self.counted()
        shown = None if mask is None else _tokens(mask, x.shape[0], x.shape[1])[..., None]  # (B, L, 1)
        if shown is not None:
            x = torch.where(shown, x, 0.0)
        out = self._mix(x, shown, cache)
        if cache is not None:
            cache.length += x.shape[1]
        return out

    def _mix(self, x: Tensor, shown: Tensor | None, cache: StateCache | None) -> Tensor:
        raise NotImplementedError

    def _run(self, steps: Recurrence, shown: Tensor | None, cache: StateCache | None) -> Tensor:
        """(B, L, H, Dv), in float32 at least."""
        if shown is not None:  # a hidden token writes nothing, and lets nothing be forgotten
            at = shown[:, None]  # (B, 1, L, 1)
            k, g = torch.where(at, steps.k, 0.0), torch.where(at, steps.g, 0.0)
            steps = Recurrence(steps.q, k, steps.v, g, steps.beta)
        before = None if cache is None else cache.get("recurrence")
        out, state = self._scan(steps, before)
        if cache is not None:
            cache.put("recurrence", state)
        return out.transpose(1, 2)

    def _scan(self, steps: Recurrence, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return run(steps, state, form=self.form, chunk=self.chunk)

    def _convolve(self, x: Tensor, conv: nn.Conv1d, cache: StateCache | None) -> Tensor:
        """silu of a causal convolution of each channel, (B, L, channels); the cache holds its last `width` inputs."""
        width = conv.kernel_size[0]
        past = None if cache is None else cache.get("convolution")
        past = x.new_zeros(x.shape[0], x.shape[2], width) if past is None else past
        seen = torch.cat((past, x.mT), dim=2)  # (B, channels, width + L)
        if cache is not None:
            cache.put("convolution", seen[:, :, -width:])
        return F.silu(F.conv1d(seen[:, :, 1:], conv.weight, conv.bias, groups=conv.groups)).mT

    def new_cache(self, capacity: int = 0) -> StateCache:
        """As large for any number of tokens."""
        return StateCache()

    def extra_repr(self) -> str:
        return f"{self.form}, chunk={self.chunk}"


class LightningAttention(RecurrentLayer):
    """MiniMax-01: a fixed decay for each head; norm and gate behind it."""

    def __init__(
        self, embed_dim: int, num_heads: int, *, head_dim: int, layer: int = 0, layers: int = 1,
        device: Any = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """`layer` of `layers`: later ones forget more slowly."""
        super().__init__(**options)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.head_dim = num_heads, head_dim
        slower = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        self.slopes = [slower * 2.0 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
        inner = num_heads * head_dim
        self.qkv_proj = nn.Linear(embed_dim, 3 * inner, bias=False, **place)
        self.norm = nn.RMSNorm(inner, eps=1e-6, **place)
        self.output_gate = nn.Linear(embed_dim, inner, bias=False, **place)
        self.out_proj = nn.Linear(inner, embed_dim, bias=False, **place)

    def _mix(self, x: Tensor, shown: Tensor | None, cache: StateCache | None) -> Tensor:
        qkv = F.silu(self.qkv_proj(x)).unflatten(-1, (self.num_heads, 3 * self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.head_dim, dim=-1)  # (B, H, L, D)
        wide = torch.promote_types(x.dtype, torch.float32)
        slopes = torch.tensor(self.slopes, dtype=wide, device=x.device)
        g = -slopes[:, None, None].expand(*q.shape[:3], 1)
        out = self._run(Recurrence(q, k, v, g), shown, cache).flatten(2).to(x.dtype)
        gated: Tensor = self.out_proj(torch.sigmoid(self.output_gate(x)) * self.norm(out))
        return gated


class GatedDeltaNet(RecurrentLayer):
    """Qwen3-Next: the delta rule with a decay for each token and head; value heads share `num_key_heads`."""

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_key_heads: int, head_dim: int, v_head_dim: int,
        device: Any = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.sizes = sizes = DeltaSizes(num_heads, num_key_heads, head_dim, v_head_dim)
        self.in_proj_qkvz = nn.Linear(embed_dim, 2 * (sizes.keys + sizes.values), bias=False, **place)
        self.in_proj_ba = nn.Linear(embed_dim, 2 * num_heads, bias=False, **place)
        self.conv1d = _conv(sizes.channels, bias=False, **place)
        self.dt_bias = nn.Parameter(torch.ones(num_heads, **place))
        self.A_log = nn.Parameter(torch.zeros(num_heads, **place))
        self.norm = nn.RMSNorm(v_head_dim, eps=1e-6, **place)
        self.out_proj = nn.Linear(sizes.values, embed_dim, bias=False, **place)

    def _mix(self, x: Tensor, shown: Tensor | None, cache: StateCache | None) -> Tensor:
        Hv, Hk, Dk, Dv = self.sizes
        per, wide = Hv // Hk, torch.promote_types(x.dtype, torch.float32)
        # By key head: its query, its key, and the values and gates of its value heads.
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, (Hk, -1)).split((Dk, Dk, per * Dv, per * Dv), dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (Hk, 2 * per)).split(per, dim=-1)
        mixed = self._convolve(torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1), self.conv1d, cache)
        q, k, v = mixed.split((self.sizes.keys, self.sizes.keys, self.sizes.values), dim=-1)
        q, k = (_unit(t.unflatten(-1, (Hk, Dk)).to(wide)).repeat_interleave(per, dim=2) for t in (q, k))
        decay = -self.A_log.to(wide).exp() * F.softplus(a.flatten(2).to(wide) + self.dt_bias.to(wide))  # (B, L, Hv)
        beta = b.flatten(2).sigmoid()
        steps = _by_head(q * Dk**-0.5, k, v.unflatten(-1, (Hv, Dv)), decay[..., None], beta[..., None])
        out = self._run(steps, shown, cache).to(x.dtype)  # (B, L, Hv, Dv)
        out = self.norm(out) * F.silu(z.reshape(out.shape).to(wide)).to(x.dtype)
        projected: Tensor = self.out_proj(out.flatten(2))
        return projected


class KimiForgetGate(nn.Module):
    """Log-decays (B, L, H, D) of each channel of a head, from a low-rank projection."""

    def __init__(self, embed_dim: int, num_heads: int, head_dim: int, **place: Any) -> None:
        super().__init__()
        self.f_a_proj = nn.Linear(embed_dim, head_dim, bias=False, **place)
        self.f_b_proj = nn.Linear(head_dim, num_heads * head_dim, bias=False, **place)
        self.dt_bias = nn.Parameter(torch.ones(num_heads * head_dim, **place))
        self.A_log = nn.Parameter(torch.zeros(1, 1, num_heads, 1, **place))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        speed = F.softplus(self.f_b_proj(self.f_a_proj(x)).to(wide) + self.dt_bias.to(wide))
        return -self.A_log.to(wide).exp() * speed.unflatten(-1, (self.A_log.shape[2], -1))


class KimiDeltaAttention(RecurrentLayer):
    """Kimi Linear's KDA: the delta rule with a decay for each channel of a key."""

    def __init__(
        self, embed_dim: int, num_heads: int, *, head_dim: int, device: Any = None, dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.head_dim, inner = num_heads, head_dim, num_heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, inner, bias=False, **place) for _ in range(3))
        self.conv1d = _conv(3 * inner, bias=False, **place)
        self.forget_gate = KimiForgetGate(embed_dim, num_heads, head_dim, **place)
        self.b_proj = nn.Linear(embed_dim, num_heads, bias=False, **place)
        self.g_a_proj = nn.Linear(embed_dim, head_dim, bias=False, **place)
        self.g_b_proj = nn.Linear(head_dim, inner, bias=False, **place)
        self.o_norm = nn.RMSNorm(head_dim, eps=1e-6, **place)
        self.o_proj = nn.Linear(inner, embed_dim, bias=False, **place)

    def _mix(self, x: Tensor, shown: Tensor | None, cache: StateCache | None) -> Tensor:
        H, D, wide = self.num_heads, self.head_dim, torch.promote_types(x.dtype, torch.float32)
        joined = torch.cat([project(x) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        q, k, v = self._convolve(joined, self.conv1d, cache).unflatten(-1, (3, H, D)).unbind(2)  # (B, L, H, D)
        q, k, beta = _unit(q.to(wide)), _unit(k.to(wide)), self.b_proj(x).sigmoid()
        steps = _by_head(q * D**-0.5, k, v, self.forget_gate(x), beta[..., None])
        out = self._run(steps, shown, cache).to(x.dtype)  # (B, L, H, D)
        gate = self.g_b_proj(self.g_a_proj(x)).view(out.shape)
        projected: Tensor = self.o_proj((self.o_norm(out) * gate.sigmoid()).flatten(2))
        return projected


class Mamba2(RecurrentLayer):
    """Mamba2: a state of N channels for each of P; B and C, its keys and queries, are shared by groups of heads."""

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_groups: int, head_dim: int, state: int,
        device: Any = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.sizes = sizes = Mamba2Sizes(num_heads, num_groups, head_dim, state)
        self.in_proj = nn.Linear(embed_dim, sizes.inner + sizes.channels + num_heads, bias=False, **place)
        self.conv1d = _conv(sizes.channels, bias=True, **place)
        self.dt_bias = nn.Parameter(torch.ones(num_heads, **place))
        self.A_log = nn.Parameter(torch.zeros(num_heads, **place))
        self.norm = nn.RMSNorm(sizes.inner, eps=1e-5, **place)
        self.D = nn.Parameter(torch.ones(num_heads, **place))
        self.out_proj = nn.Linear(sizes.inner, embed_dim, bias=False, **place)

    def _mix(self, x: Tensor, shown: Tensor | None, cache: StateCache | None) -> Tensor:
        H, G, P, N = self.sizes
        wide = torch.promote_types(x.dtype, torch.float32)
        gate, mixed, dt = self.in_proj(x).split((self.sizes.inner, self.sizes.channels, H), dim=-1)
        values, keys, queries = self._convolve(mixed, self.conv1d, cache).split((H * P, G * N, G * N), dim=-1)
        values = values.unflatten(-1, (H, P))  # (B, L, H, P)
        k, q = (t.unflatten(-1, (G, N)).repeat_interleave(H // G, dim=2) for t in (keys, queries))  # (B, L, H, N)
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))[..., None]  # (B, L, H, 1)
        steps = _by_head(q, k, values * dt, -self.A_log.to(wide).exp()[:, None] * dt, None)
        out = self._run(steps, shown, cache) + self.D.to(wide)[:, None] * values  # (B, L, H, P)
        out = out.flatten(2) * F.silu(gate.to(wide))
        projected: Tensor = self.out_proj(self.norm(out.to(x.dtype)))
        return projected


def _conv(channels: int, *, bias: bool, **place: Any) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, CONV, groups=channels, bias=bias, **place)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Recurrence:
    """From (B, L, H, channels), each."""
    q, k, v, g = (t.transpose(1, 2) for t in (q, k, v, g))
    return Recurrence(q, k, v, g, None if beta is None else beta.transpose(1, 2))


def _tokens(mask: Tensor, batch: int, length: int) -> Tensor:
    """(B, L), True = shown: of a mask over keys, the newest L."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
        rule = "a recurrence can hide whole tokens alone, by a bool mask (B, 1, 1, S)"
        raise Unsupported(f"mask {mask.dtype} {tuple(mask.shape)}: {rule}")
    return mask[:, 0, 0, -length:].expand(batch, length)
