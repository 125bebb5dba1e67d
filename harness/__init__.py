"""Proves that an attention implementation equals its reference, says what it costs, and guards both every night.

Shape notation, used everywhere:

    B  batch             E       embed_dim
    H  query heads       D, D_v  head dim of q and k, of v
    H_kv  kv heads       L       query length
    G  H / H_kv          S       key/value length
    W  window            R       latent rank (MLA)

Inside (B, H, L, D), at module edges (B, L, E). Masks are bool, True = attends, or float, added to the scores.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.battery.result import Judgement as Judgement
    from harness.battery.session import judge as judge
    from harness.cell.check import assert_equivalent as assert_equivalent
    from harness.cell.check import check as check
    from harness.cell.rule import Equivalence as Equivalence
    from harness.diagnosis.result import Diagnosis as Diagnosis
    from harness.diagnosis.session import diagnose as diagnose
    from harness.kernels.domain import kernel as kernel
    from harness.kernels.front import attention as attention
    from harness.report.judgement import assert_kernel as assert_kernel
    from harness.runner import run as run
    from harness.store.reading import load as load
    from harness.swaps.engine import replace_mha_with_eager as replace_mha_with_eager
    from harness.swaps.engine import swap as swap
    from harness.swaps.report import SwapReport as SwapReport
    from harness.variants.blocks import EncoderLayer as EncoderLayer
    from harness.variants.blocks import MLABlock as MLABlock
    from harness.variants.blocks import ScaledDotProductAttention as ScaledDotProductAttention
    from harness.variants.dropin import EagerMultiheadAttention as EagerMultiheadAttention
    from harness.variants.dropin import EagerMultiheadAttentionWithInProj as EagerMultiheadAttentionWithInProj
    from harness.variants.gqa import GroupedQueryAttention as GroupedQueryAttention
    from harness.variants.gqa import MultiHeadAttention as MultiHeadAttention
    from harness.variants.gqa import MultiQueryAttention as MultiQueryAttention
    from harness.variants.mla import MultiHeadLatentAttention as MultiHeadLatentAttention
    from harness.variants.specs.quantised import Quantisation as Quantisation
    from harness.variants.unified import UnifiedAttention as UnifiedAttention

# Where each public name lives. Imported on first use: torch takes seconds, and `harness --help` must not wait for it.
_NAMES = {
    "harness.battery.result": ("Judgement",),
    "harness.battery.session": ("judge",),
    "harness.report.judgement": ("assert_kernel",),
    "harness.cell.check": ("assert_equivalent", "check"),
    "harness.cell.rule": ("Equivalence",),
    "harness.diagnosis.result": ("Diagnosis",),
    "harness.diagnosis.session": ("diagnose",),
    "harness.kernels.domain": ("kernel",),
    "harness.kernels.front": ("attention",),
    "harness.runner": ("run",),
    "harness.store.reading": ("load",),
    "harness.swaps": ("SwapReport", "replace_mha_with_eager", "swap"),
    "harness.variants.blocks": ("EncoderLayer", "MLABlock", "ScaledDotProductAttention"),
    "harness.variants.dropin": ("EagerMultiheadAttention", "EagerMultiheadAttentionWithInProj"),
    "harness.variants.gqa": ("GroupedQueryAttention", "MultiHeadAttention", "MultiQueryAttention"),
    "harness.variants.mla": ("MultiHeadLatentAttention",),
    "harness.variants.specs.quantised": ("Quantisation",),
    "harness.variants.unified": ("UnifiedAttention",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
