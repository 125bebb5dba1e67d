"""Linear recurrences: Lightning, Gated DeltaNet, KDA and Mamba2. Their cache is a state, as large for any length.

`heads` are those of the values; Gated DeltaNet has `kv_heads` key heads, Mamba2 as many groups. Mamba2's state has
twice the channels of a head, as in its own models. Convolutions keep their last CONV inputs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from harness.case import PHASES, Case
from harness.variants.specs import MATMUL, VARIANTS, Impossible, VariantSpec, at_least_one, resolve_head_dim

CHUNK = 64  # tokens that are taken at once, of more than FEW
FEW = 4  # tokens that are taken one by one
CONV = 4  # inputs that a causal convolution sees, the newest included
STATE_BYTES = 4  # float32 at least: what is added to at every token would lose its small parts in half precision


class DeltaSizes(NamedTuple):
    """Hv, Hk, Dk, Dv"""

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """That are convolved."""
        return 2 * self.keys + self.values


class Mamba2Sizes(NamedTuple):
    """H, G, P, N"""

    heads: int
    groups: int
    head_dim: int
    state: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """That are convolved."""
        return self.inner + 2 * self.groups * self.state


def delta_sizes(case: Case) -> DeltaSizes:
    assert case.kv_heads is not None and case.v_head_dim is not None
    return DeltaSizes(case.heads, case.kv_heads, case.head_dim, case.v_head_dim)


def mamba2_sizes(case: Case) -> Mamba2Sizes:
    assert case.kv_heads is not None
    return Mamba2Sizes(case.heads, case.kv_heads, case.head_dim, 2 * case.head_dim)


def _lightning_params(case: Case) -> int:
    inner = case.heads * case.head_dim
    return 5 * case.embed_dim * inner + inner


def _delta_params(case: Case) -> int:
    E, sizes = case.embed_dim, delta_sizes(case)
    projections = E * 2 * (sizes.keys + sizes.values) + E * 2 * sizes.heads + sizes.values * E
    return projections + CONV * sizes.channels + 2 * sizes.heads + sizes.value_dim


def _kimi_params(case: Case) -> int:
    E, H, D = case.embed_dim, case.heads, case.head_dim
    low_rank = E * D + D * H * D
    return 4 * E * H * D + 2 * low_rank + 3 * H * D * CONV + H * D + H + E * H + D


def _mamba2_params(case: Case) -> int:
    E, H, sizes = case.embed_dim, case.heads, mamba2_sizes(case)
    projections = E * (sizes.inner + sizes.channels + H) + sizes.inner * E
    return projections + (CONV + 1) * sizes.channels + 3 * H + sizes.inner


def _state_bytes(case: Case, elements: int, convolved: int) -> int:
    """Of all sequences: the recurrence's state in float32 at least, and the inputs of the convolutions."""
    return case.batch * (elements * max(case.item_bytes, STATE_BYTES) + convolved * CONV * case.item_bytes)


def _lightning_bytes(case: Case) -> int:
    return _state_bytes(case, case.heads * case.head_dim**2, 0)


def _delta_bytes(case: Case) -> int:
    sizes = delta_sizes(case)
    return _state_bytes(case, sizes.heads * sizes.head_dim * sizes.value_dim, sizes.channels)


def _kimi_bytes(case: Case) -> int:
    return _state_bytes(case, case.heads * case.head_dim**2, 3 * case.heads * case.head_dim)


def _mamba2_bytes(case: Case) -> int:
    sizes = mamba2_sizes(case)
    return _state_bytes(case, sizes.inner * sizes.state, sizes.channels)


def _flops(sizes: Callable[[Case], tuple[int, int]], unmultiplied: Callable[[Case], int], *, delta: bool) -> Any:
    """`sizes`: channels of a key and of a value; `unmultiplied`: parameters that no matrix product takes."""

    def flops(case: Case) -> int:
        D, D_v = sizes(case)
        L = 1 if case.phase == "decode" else case.seq_len
        products = 3 if delta else 2  # with the state: written, read, and under the delta rule read by the key
        in_state = L * products * D * D_v
        if L > FEW:  # in chunks: what is read of the other tokens, and under the delta rule how keys overlap
            chunks = [CHUNK] * (L // CHUNK) + [L % CHUNK] * (L % CHUNK > 0)
            in_state += sum(C * C * ((2 if delta else 1) * D + D_v) for C in chunks)
        params = VARIANTS[case.variant].params(case) - unmultiplied(case)
        forward = case.batch * MATMUL * (L * params + case.heads * in_state)
        return 3 * forward if case.phase == "train" else forward

    return flops


def _plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_heads": None, "head_dim": resolve_head_dim(raw)}


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    kv_heads = at_least_one("kv_heads", raw["heads"] if raw["kv_heads"] is None else raw["kv_heads"])
    if raw["heads"] % kv_heads:
        raise Impossible("kv_heads", kv_heads, f"must divide heads ({raw['heads']})")
    return {"head_dim": resolve_head_dim(raw), "kv_heads": kv_heads}


def _delta(raw: Mapping[str, Any]) -> dict[str, Any]:
    resolved = _shared(raw)
    given = raw["v_head_dim"]
    return {**resolved, "v_head_dim": resolved["head_dim"] if given is None else at_least_one("v_head_dim", given)}


for _name, _title, _axes, _resolve, _params, _bytes, _count in (
    ("lightning", "MiniMax's Lightning: linear attention, a fixed decay for each head", (), _plain,
     _lightning_params, _lightning_bytes,
     _flops(lambda case: (case.head_dim, case.head_dim), lambda case: case.heads * case.head_dim, delta=False)),
    ("gated_deltanet", "Qwen3-Next's Gated DeltaNet: the delta rule, a decay for each token",
     ("kv_heads", "v_head_dim"), _delta, _delta_params, _delta_bytes,
     _flops(lambda case: delta_sizes(case)[2:], lambda case: 2 * case.heads + delta_sizes(case).value_dim, delta=True)),
    ("kda", "Kimi Linear's KDA: the delta rule, a decay for each token and channel", (), _plain,
     _kimi_params, _kimi_bytes,
     _flops(lambda case: (case.head_dim, case.head_dim),
            lambda case: case.heads * case.head_dim + case.heads + case.head_dim, delta=True)),
    ("mamba2", "Mamba2: a state space, its keys and queries shared by groups of heads", ("kv_heads",), _shared,
     _mamba2_params, _mamba2_bytes,
     _flops(lambda case: (2 * case.head_dim, case.head_dim),
            lambda case: mamba2_sizes(case).channels + 3 * case.heads + mamba2_sizes(case).inner, delta=False)),
):  # fmt: skip
    VARIANTS.add(
        _name,
        VariantSpec(
            name=_name,
            title=_title,
            axes=frozenset(_axes),
            phases=PHASES,
            resolve=_resolve,
            params=_params,
            kv_elements_per_token=None,
            state_bytes=_bytes,
            flops=_count,
            reference=lambda _: "recurrent",
            core="recurrence",
            masks=("causal", "left_padding"),
        ),
    )
