"""One front for all variants, chosen by name."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from harness.kernels.front import AnyKernel
from harness.variants.cache import KVCache
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.mla import MultiHeadLatentAttention
from harness.variants.specs.latent import WIDE, resolve_latent
from harness.variants.specs.quantised import Quantisation

TYPES = "mha, mqa, gqa, gqa-N (N key/value heads), mla, mla-R (a latent of R channels), mla_naive, mla_absorbed"
GROUP = 4  # query heads on a key/value head where "gqa" does not say
MIB = 2**20


class UnifiedAttention(nn.Module):
    """`attention_type`: "mha", "mqa", "gqa", "gqa-4" (4 key/value heads), "mla", "mla-32" (a latent of 32 channels),
    "mla_naive" and "mla_absorbed".

    "gqa" has num_kv_heads, or one for 4 query heads. The MLA ranks may be given; otherwise they follow DeepSeek's
    proportions.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        attention_type: str = "mha",
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        kernel: AnyKernel = "auto",
        kv_lora_rank: int | None = None,
        q_lora_rank: int | None = None,
        rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_type, self.d_model, self.num_heads = attention_type, d_model, num_heads
        options: dict[str, Any] = {"bias": bias, "dropout": dropout, "kernel": kernel, "device": device, "dtype": dtype}
        ranks = {"kv_lora_rank": kv_lora_rank, "q_lora_rank": q_lora_rank}
        ranks |= {"rope_head_dim": rope_head_dim, "v_head_dim": v_head_dim}
        self.attention: GroupedQueryAttention | MultiHeadLatentAttention
        latent = re.fullmatch(r"mla(?:_(naive|absorbed)|-(\d+))?", attention_type)
        if latent is not None:
            if num_kv_heads is not None:
                raise ValueError(f"num_kv_heads = {num_kv_heads}: MLA has none, its heads share a latent")
            if latent[2] is not None:
                if kv_lora_rank not in (None, int(latent[2])):
                    raise ValueError(f"kv_lora_rank = {kv_lora_rank}: {attention_type} has {latent[2]}")
                ranks["kv_lora_rank"] = int(latent[2])
            dims = resolve_latent({"embed_dim": d_model, "heads": num_heads, "head_dim": head_dim, **ranks})
            self.attention = MultiHeadLatentAttention(
                d_model,
                num_heads,
                nope_head_dim=dims["head_dim"],
                **{name: dims[name] for name in ranks},
                mode=latent[1] or "auto",  # type: ignore[arg-type]
                **options,
            )
        else:
            kv_heads = kv_heads_of(attention_type, num_heads, num_kv_heads)
            for name, value in ranks.items():
                if value is not None:
                    raise ValueError(f"{name} = {value}: {attention_type} has none, only MLA does")
            self.attention = GroupedQueryAttention(d_model, num_heads, kv_heads, head_dim=head_dim, **options)

    def forward(self, x: Tensor, **rules: Any) -> Any:
        return self.attention(x, **rules)

    def new_cache(self, capacity: int = 0, *, quantised: Quantisation | None = None) -> KVCache:
        """`quantised`: older tokens as int8, int4 or fp8; `get_cache_info()` of what is given says what it holds."""
        return self.attention.new_cache(capacity, quantised=quantised)

    def get_config(self) -> dict[str, Any]:
        inner = self.attention
        config: dict[str, Any] = {
            "attention_type": self.attention_type,
            "d_model": self.d_model,
            "num_heads": self.num_heads,
            "dropout": inner.dropout,
            "kernel": inner.kernel.name,
            "bias": inner.out_proj.bias is not None,
        }
        if isinstance(inner, GroupedQueryAttention):
            config |= {"num_kv_heads": inner.num_kv_heads, "head_dim": inner.head_dim}
        else:
            ranks = ("rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
            config |= {"head_dim": inner.nope_head_dim, **{name: getattr(inner, name) for name in ranks}}
        return config

    def get_memory_usage(self, seq_len: int, batch_size: int = 1) -> dict[str, float]:
        """Exact bytes, and each in MiB: of the KV cache after seq_len tokens, the parameters, and their total with the
        score matrix of a prefill that keeps all scores, as the textbook does (tiled kernels keep a tile of it).

        In the module's own dtype; scores are float32 at least.
        """
        if seq_len < 0 or batch_size < 0:
            raise ValueError(f"seq_len = {seq_len}, batch_size = {batch_size}: must not be negative")
        item = self.attention.out_proj.weight.element_size()
        per_token = self.attention.kv_elements_per_token() * item
        sizes = {
            "kv_cache_bytes": per_token * seq_len * batch_size,
            "score_matrix_bytes": batch_size * self.num_heads * seq_len**2 * max(item, WIDE),
            "param_bytes": sum(p.numel() * p.element_size() for p in self.parameters()),
        }
        sizes["total_bytes"] = sum(sizes.values())
        in_mib = {name.replace("_bytes", "_mib"): size / MIB for name, size in sizes.items()}
        counts = {"kv_bytes_per_token": per_token, "params": sum(p.numel() for p in self.parameters())}
        return {**counts, **sizes, **in_mib}


def kv_heads_of(attention_type: str, num_heads: int, num_kv_heads: int | None) -> int:
    """The number of key/value heads that the name and num_kv_heads agree on."""
    named = {"mha": num_heads, "mqa": 1}.get(attention_type)
    if match := re.fullmatch(r"gqa-(\d+)", attention_type):
        named = int(match[1])
    if attention_type == "gqa":
        most = max(1, num_heads // GROUP)
        divides = next(number for number in range(most, 0, -1) if not num_heads % number)
        return divides if num_kv_heads is None else num_kv_heads
    if named is None:
        raise ValueError(f"attention_type = {attention_type!r}: must be one of {TYPES}")
    if num_kv_heads not in (None, named):
        raise ValueError(f"num_kv_heads = {num_kv_heads}: {attention_type} with {num_heads} heads has {named}")
    return named
