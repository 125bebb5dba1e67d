"""The SDPA reference modules to harness's variants."""

from collections.abc import Mapping

from torch import nn

from harness.kernels.call import Kernel
from harness.references.mla_block import MlaBlock
from harness.references.sdpa import SdpaAttention
from harness.references.sdpa_mla import ExpandedMLA
from harness.swaps.converters import VARIANT, Conversion, Request, convert_child, converts
from harness.swaps.weights import WeightSource
from harness.variants.blocks import EncoderLayer
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.mla import MultiHeadLatentAttention


def renamed(module: nn.Module, names: Mapping[str, str]) -> Conversion:
    """Every parameter keeps its shape; the leading part of its name changes as `names` says (new -> old)."""
    weights = {}
    for key, _ in module.named_parameters():
        part, _, kind = key.rpartition(".")
        weights[key] = WeightSource(f"{names[part]}.{kind}")
    return Conversion(module, weights)


@converts(SdpaAttention, to=VARIANT)
def convert_sdpa(old: SdpaAttention, kernel: Kernel, request: Request) -> Conversion:
    new = GroupedQueryAttention(
        old.wq.in_features,
        old.heads,
        old.kv_heads,
        head_dim=old.head_dim,
        bias=old.wq.bias is not None,
        kernel=kernel,
        device="meta",  # as in torch_layers.py: every weight comes from the old module
        dtype=old.wq.weight.dtype,
    )
    return renamed(new, {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "out_proj": "wo"})


MLA_NAMES = {
    "q_proj": "wq",
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj": "wkv_a",
    "kv_a_norm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "out_proj": "wo",
}


@converts(ExpandedMLA, to=VARIANT, options=("mode",))
def convert_mla(old: ExpandedMLA, kernel: Kernel, request: Request) -> Conversion:
    new = MultiHeadLatentAttention(
        old.wkv_a.in_features,
        old.heads,
        kv_lora_rank=old.rank,
        q_lora_rank=old.q_rank,
        nope_head_dim=old.nope,
        rope_head_dim=old.pe,
        v_head_dim=old.value,
        bias=old.wo.bias is not None,
        mode=request.options.get("mode", "auto"),
        kernel=kernel,
        device="meta",  # as in torch_layers.py: every weight comes from the old module
        dtype=old.wo.weight.dtype,
    )
    return renamed(new, MLA_NAMES)


@converts(MlaBlock, to=VARIANT, options=("mode",))
def convert_mla_block(old: MlaBlock, kernel: Kernel, request: Request) -> Conversion:
    new = EncoderLayer(
        convert_child("attn", old.attn, convert_mla, kernel, request).module,
        old.up.in_features,
        old.up.out_features,
        norm_first=True,
        activation="gelu",
        bias=old.up.bias is not None,
        device="meta",  # as in torch_layers.py: every weight comes from the old module
        dtype=old.up.weight.dtype,
    )
    names = {"linear1": "up", "linear2": "down", "norm1": "attn_norm", "norm2": "mlp_norm"}
    names |= {f"attention.{ours}": f"attn.{theirs}" for ours, theirs in MLA_NAMES.items()}
    return renamed(new, names)
