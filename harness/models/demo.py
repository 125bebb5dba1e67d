"""A small model to swap: what `harness demo` shows."""

from torch import Tensor, nn


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
