"""`python -m harness.demo`: swap the attention of a small model, show what was replaced, and prove that it is equal."""

import logging

import torch
from torch import Tensor, nn

from harness import logs
from harness.build import randomise
from harness.checking import check
from harness.report.swaps import print_swap
from harness.swaps import swap


class SimpleModel(nn.Module):
    """Tokens to logits: embedding, two encoder layers of torch's own, and cross-attention to a memory."""

    def __init__(self, vocabulary: int = 50, embed_dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, embed_dim)
        layer = nn.TransformerEncoderLayer(embed_dim, heads, 2 * embed_dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(embed_dim, heads, batch_first=True)
        self.head = nn.Linear(embed_dim, vocabulary)

    def forward(self, memory: Tensor, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens))
        x = x + self.cross(x, memory, memory, need_weights=False)[0]
        logits: Tensor = self.head(x)
        return logits


def main() -> int:
    logs.configure()
    logging.getLogger("harness").setLevel(logging.INFO)  # one line for each module replaced
    model = SimpleModel()
    randomise(model, torch.Generator().manual_seed(0))
    memory, tokens = torch.randn(2, 7, 32), torch.randint(50, (2, 10))
    passed = True
    for use_in_proj in (False, True):
        swapped, report = swap(model, use_in_proj=use_in_proj)
        found = check(swapped.eval(), model.eval(), (memory, tokens), gradients=True)
        print_swap(report, found)
        passed = passed and found.passed and not report.uncalled
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
