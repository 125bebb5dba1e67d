"""A pre-LN encoder layer around the expanded MLA, from torch's own pieces."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.references import Reference, sdpa, sdpa_mla
from harness.references.sdpa import StaticKV
from harness.references.sdpa_mla import ExpandedMLA, with_padded_values
from harness.variants.specs.blocks import FEEDFORWARD_FACTOR


class MlaBlock(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        wide = FEEDFORWARD_FACTOR * case.embed_dim
        self.attn = ExpandedMLA(case)
        self.attn_norm = nn.LayerNorm(case.embed_dim, bias=case.bias)
        self.mlp_norm = nn.LayerNorm(case.embed_dim, bias=case.bias)
        self.up = nn.Linear(case.embed_dim, wide, bias=case.bias)
        self.down = nn.Linear(wide, case.embed_dim, bias=case.bias)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, past: StaticKV | None = None
    ) -> Tensor:
        return self.rest(x, self.attn(self.attn_norm(x), attn_mask=attn_mask, is_causal=is_causal, past=past))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


def run_rows(module: nn.Module, x: Tensor, rows: Tensor, view: Mapping[str, Any]) -> Tensor:
    assert isinstance(module, MlaBlock)
    return module.rest(x[:, rows], sdpa_mla.run_rows(module.attn, module.attn_norm(x), rows, view))


REFERENCE = Reference("mla_block", MlaBlock, sdpa.view, sdpa.run, run_rows=run_rows, other_backend=with_padded_values)
