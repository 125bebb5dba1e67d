"""SDPA's own: nothing is packed."""

from torch import Tensor

from harness.kernels.layouts.layout import Layout, Prepared, SdpaCall


def prepare(call: SdpaCall) -> Prepared:
    options = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    named = {name: getattr(call, name) for name in options}
    return Prepared((call.q, call.k, call.v), named, shape=(*call.q.shape[:3], call.v.shape[3]))


def restore(result: Tensor, memo: None) -> Tensor:
    return result


LAYOUT = Layout(
    "bhld",
    prepare,
    restore,
    "f(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)",
)
