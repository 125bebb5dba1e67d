"""The token-by-token references of recurrent layers to harness's variants; every parameter keeps its name."""

from typing import Any

from torch import nn

from harness.kernels.call import Kernel
from harness.references import recurrent as references
from harness.swaps.converters import VARIANT, Conversion, Request, converts
from harness.swaps.weights import WeightSource
from harness.variants.recurrent import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2


@converts(references.Lightning, to=VARIANT, options=("form", "chunk"))
def convert_lightning(old: references.Lightning, kernel: Kernel, request: Request) -> Conversion:
    options = _options(old.out_proj, kernel, request)
    return _renamed(LightningAttention(old.embed_dim, old.heads, head_dim=old.head_dim, **options))


@converts(references.GatedDelta, to=VARIANT, options=("form", "chunk"))
def convert_gated_delta(old: references.GatedDelta, kernel: Kernel, request: Request) -> Conversion:
    Hv, Hk, Dk, Dv = old.sizes
    options = _options(old.out_proj, kernel, request)
    return _renamed(GatedDeltaNet(old.embed_dim, Hv, num_key_heads=Hk, head_dim=Dk, v_head_dim=Dv, **options))


@converts(references.KimiDelta, to=VARIANT, options=("form", "chunk"))
def convert_kimi_delta(old: references.KimiDelta, kernel: Kernel, request: Request) -> Conversion:
    options = _options(old.o_proj, kernel, request)
    return _renamed(KimiDeltaAttention(old.embed_dim, old.heads, head_dim=old.head_dim, **options))


@converts(references.Mamba2Mixer, to=VARIANT, options=("form", "chunk"))
def convert_mamba2(old: references.Mamba2Mixer, kernel: Kernel, request: Request) -> Conversion:
    H, G, P, N = old.sizes
    options = _options(old.out_proj, kernel, request)
    return _renamed(Mamba2(old.embed_dim, H, num_groups=G, head_dim=P, state=N, **options))


def _options(out: nn.Linear, kernel: Kernel, request: Request) -> dict[str, Any]:
    """On the meta device: every weight comes from the old module."""
    asked = {name: request.options[name] for name in ("form", "chunk") if name in request.options}
    return {"counted": kernel.counted, "device": "meta", "dtype": out.weight.dtype, **asked}


def _renamed(new: nn.Module) -> Conversion:
    return Conversion(new, {name: WeightSource(name) for name, _ in new.named_parameters()})
