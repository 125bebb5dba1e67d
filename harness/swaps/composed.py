"""The references of attention with something around its softmax to harness's variants."""

from typing import Any

from torch import nn

from harness.kernels.call import Kernel
from harness.references import composed as references
from harness.swaps.converters import VARIANT, Conversion, Request, converts
from harness.swaps.weights import WeightSource
from harness.variants.composed import DifferentialAttention, GatedAttention, SharedKVAttention, SinkAttention

KINDS: dict[type[nn.Module], Any] = {
    references.Gated: GatedAttention,
    references.Differential: DifferentialAttention,
    references.Sinks: SinkAttention,
    references.Shared: SharedKVAttention,
}


@converts(*KINDS, to=VARIANT)
def convert_composed(old: references.Composed, kernel: Kernel, request: Request) -> Conversion:
    own = {"window": old.window} if isinstance(old, references.Sinks) else {}
    new = KINDS[type(old)](
        old.embed_dim,
        old.heads,
        old.kv_heads,
        head_dim=old.head_dim,
        bias=old.o_proj.bias is not None,
        kernel=kernel,
        device="meta",  # as in torch_layers.py: every weight comes from the old module
        dtype=old.o_proj.weight.dtype,
        **own,
    )
    names = [name for name, _ in new.named_parameters()]
    return Conversion(new, {name: WeightSource(name.replace("out_proj", "o_proj")) for name in names})
