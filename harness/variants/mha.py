"""The two ends of grouped-query attention."""

from typing import Any

from harness.variants.gqa import GroupedQueryAttention


class MultiHeadAttention(GroupedQueryAttention):
    """Every query head has its own key/value head."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, num_heads, **options)


class MultiQueryAttention(GroupedQueryAttention):
    """All query heads share one key/value head."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, 1, **options)
