"""nn.MultiheadAttention, called as its users call it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.case import Case
from harness.references import Reference


def build(case: Case) -> nn.Module:
    return nn.MultiheadAttention(case.embed_dim, case.heads, bias=case.bias, batch_first=True)


def view(case: Case, dense: Tensor | None, plain_causal: bool) -> Mapping[str, Any]:
    """torch's convention: True = blocked; one (L, S) mask, or (B*H, L, S)."""
    if dense is None:
        return {"attn_mask": None, "is_causal": False}
    mask = ~dense if dense.dtype == torch.bool else dense
    if mask.shape[0] == mask.shape[1] == 1:
        mask = mask[0, 0]
        if mask.shape[0] == 1:
            mask = mask.expand(case.seq_len, -1)
    else:
        queries = case.seq_len if mask.shape[2] == 1 else mask.shape[2]
        mask = mask.expand(case.batch, case.heads, queries, -1).flatten(0, 1)
    return {"attn_mask": mask.contiguous(), "is_causal": plain_causal}


def run(
    module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    assert cache is None, "nn.MultiheadAttention has no KV cache"
    result: tuple[Tensor, Tensor | None] = module(
        x, x, x, need_weights=need_weights, average_attn_weights=False, **view
    )
    return result


def run_rows(module: nn.Module, x: Tensor, rows: Tensor, view: Mapping[str, Any]) -> Tensor:
    assert isinstance(module, nn.MultiheadAttention)
    out: Tensor = module(x[:, rows], x, x, need_weights=False, attn_mask=view["attn_mask"])[0]
    return out


REFERENCE = Reference("torch_mha", build, view, run, run_rows=run_rows, gives_weights=True)
