"""MLA: keys and values are decompressed from one cached latent per token (DeepSeek-V2).

r = kv_lora_rank, R = rope_head_dim, N = head_dim (the part without positions), V = v_head_dim, q = q_lora_rank.

With latents in the cache there are two ways to attend. *Expanded*: decompress every latent into per-head keys and
values, then attend with D = N + R. *Absorbed*: move the queries into latent space, where all heads share one key and
one value, and attend with D = r + R. Expanding costs the same for one query as for a thousand; absorbing makes every
query dearer. So few queries are absorbed and many are not, and where the two meet depends on all sizes.

The rule: price = FLOPs + FLOPS_PER_BYTE * bytes, and the lower price wins. Scores and softmax are the same in both
and left out; so is the decompressor, which both read once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.case import PHASES, Case
from harness.variants.specs import MATMUL, VARIANTS, Impossible, VariantSpec, at_least_one, resolve_head_dim

# A round figure for how many FLOPs a byte from memory is worth. Crossovers of the two forms, seen at two sizes on one
# loaded machine, ask for about 3 and about 25: it decides only calls whose two prices are near each other.
FLOPS_PER_BYTE = 8
AXES = ("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim")
WIDE = 4  # bytes of the narrowest dtype that is scored as it is; narrower ones are widened first


class LatentSizes(NamedTuple):
    """H, N, R, V and r."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int

    @classmethod
    def of(cls, case: Case) -> "LatentSizes":
        assert case.kv_lora_rank is not None and case.rope_head_dim is not None and case.v_head_dim is not None
        return cls(case.heads, case.head_dim, case.rope_head_dim, case.v_head_dim, case.kv_lora_rank)

    @property
    def latent_kv_elements(self) -> int:
        return self.rank + self.rope

    @property
    def expanded_kv_elements(self) -> int:
        return self.heads * (self.nope + self.rope + self.value)


@dataclass(frozen=True)
class Cost:
    """Of one batch row."""

    flops: int
    bytes: int

    @property
    def price(self) -> int:
        return self.flops + FLOPS_PER_BYTE * self.bytes


@dataclass(frozen=True)
class FormChoice:
    """What the two forms cost for a call, and so which of them is taken."""

    absorbed: Cost
    expanded: Cost

    @property
    def absorbs(self) -> bool:
        return self.absorbed.price < self.expanded.price


def choose(sizes: LatentSizes, queries: int, keys: int, *, itemsize: int = WIDE) -> FormChoice:
    """What both forms cost for `queries` new tokens over `keys` cached latents of `itemsize` bytes an element."""
    return FormChoice(absorbed_cost(sizes, queries, keys, itemsize), expanded_cost(sizes, queries, keys, itemsize))


def expanded_flops(sizes: LatentSizes, queries: int, keys: int, fresh: int) -> int:
    """Decompress `fresh` latents, then attend per head."""
    H, N, R, V, r = sizes
    return MATMUL * (fresh * r * H * (N + V) + queries * keys * H * (N + R + V))


def absorbed_flops(sizes: LatentSizes, queries: int, keys: int) -> int:
    """Move the queries into latent space, attend there, and bring the result back."""
    H, N, R, V, r = sizes
    return MATMUL * queries * H * (N * r + keys * (2 * r + R) + r * V)


def expanded_cost(sizes: LatentSizes, queries: int, keys: int, itemsize: int) -> Cost:
    H, N, R, V, r = sizes
    made = r + R + H * (N + V)  # per key: the latent read, its decompressed parts written
    joined = H * N + R + H * (N + R)  # nope parts and k_pe read, whole keys written
    attended = H * (N + R) + H * V
    per_query = H * (N + R + V)
    return Cost(
        expanded_flops(sizes, queries, keys, keys),
        itemsize * (keys * (made + joined) + queries * per_query) + _read_bytes(keys * attended, itemsize),
    )


def absorbed_cost(sizes: LatentSizes, queries: int, keys: int, itemsize: int) -> Cost:
    H, _, R, V, r = sizes
    attended = (r + R) + r  # per key, shared by all heads: the latent once as key, once as value
    per_query = H * (r + (r + R) + r + V)  # moved, joined with q_pe, mixed, brought back
    return Cost(
        absorbed_flops(sizes, queries, keys),
        itemsize * queries * per_query + _read_bytes(keys * attended, itemsize),
    )


def _read_bytes(elements: int, itemsize: int) -> int:
    """By the attention kernel; half precision is read, written widened, and read again."""
    return elements * (itemsize if itemsize >= WIDE else itemsize + 2 * WIDE)


def latent_params(
    embed_dim: int,
    sizes: LatentSizes,
    q_rank: int | None,
    *,
    decompress_rank: int | None = None,
    bias: bool = False,
    latent_norm: bool = True,
) -> int:
    H, N, R, V, r = sizes
    queries = H * (N + R)
    q = embed_dim * queries if q_rank is None else embed_dim * q_rank + q_rank + q_rank * queries
    norm = r if latent_norm else 0
    wide, rank = H * (N + V), decompress_rank
    decompressor = r * wide if rank is None else rank * (r + wide)
    weights = q + embed_dim * (r + R) + norm + decompressor + H * V * embed_dim
    biases = queries + (q_rank or 0) + (r + R) + H * (N + V) + embed_dim
    return weights + (biases if bias else 0)


def absorbs(case: Case, queries: int, keys: int) -> bool:
    """Whether the module of this case attends in latent space when `queries` new tokens meet `keys` cached ones."""
    mode = VARIANTS[case.variant].swap_options["mode"]
    if mode != "auto":
        return bool(mode == "absorbed")
    return choose(LatentSizes.of(case), queries, keys, itemsize=case.item_bytes).absorbs


def _kv_elements(case: Case) -> int:
    sizes = LatentSizes.of(case)
    return sizes.expanded_kv_elements if case.variant == "mla_naive" else sizes.latent_kv_elements


def latent_flops(case: Case) -> int:
    sizes = LatentSizes.of(case)
    H, N, R, V, r = sizes
    E, keys = case.embed_dim, case.kv_len
    queries = 1 if case.phase == "decode" else case.seq_len
    q = E * H * (N + R) if case.q_lora_rank is None else case.q_lora_rank * (E + H * (N + R))
    projections = MATMUL * queries * (q + E * (r + R) + H * V * E)
    if absorbs(case, queries, keys):
        core = absorbed_flops(sizes, queries, keys)
    else:
        fresh = keys if case.variant == "mla" else queries  # an expanded cache decompresses new tokens only
        core = expanded_flops(sizes, queries, keys, fresh)
    forward = case.batch * (projections + core)
    return 3 * forward if case.phase == "train" else forward


def resolve_latent(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Ranks that are not given follow DeepSeek's proportions: r = 4 N, R = N / 2, V = N."""
    head_dim = resolve_head_dim(raw)
    given = {key: at_least_one(key, raw[key]) for key in AXES if raw[key] is not None}
    rope = given.get("rope_head_dim", max(2, head_dim // 4 * 2))
    if rope % 2:
        raise Impossible("rope_head_dim", rope, "must be even: RoPE turns pairs of channels")
    return {
        "kv_heads": None,
        "head_dim": head_dim,
        "q_lora_rank": given.get("q_lora_rank"),
        "kv_lora_rank": given.get("kv_lora_rank", 4 * head_dim),
        "rope_head_dim": rope,
        "v_head_dim": given.get("v_head_dim", head_dim),
    }


for _name, _title, _mode in (
    ("mla", "multi-head latent: latent cache, absorbed where that is cheaper", "auto"),
    ("mla_absorbed", "MLA that always attends in latent space", "absorbed"),
    ("mla_naive", "MLA with decompressed keys and values in its cache", "naive"),
):
    VARIANTS.add(
        _name,
        VariantSpec(
            name=_name,
            title=_title,
            axes=frozenset(AXES),
            phases=PHASES,
            resolve=resolve_latent,
            params=lambda case: latent_params(case.embed_dim, LatentSizes.of(case), case.q_lora_rank, bias=case.bias),
            kv_elements_per_token=_kv_elements,
            flops=latent_flops,
            reference=lambda _: "sdpa_mla",
            swap_options={"mode": _mode},
        ),
    )
