"""Attention modules with KV caches: inside (B, H, L, D), at the edges (B, L, E)."""
