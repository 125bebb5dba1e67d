"""What the variants share: self-attention over (B, L, E) that may go on from a KV cache."""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from harness.kernels.call import Kernel
from harness.kernels.transforms import record_module
from harness.variants.cache import KVCache
from harness.variants.quantised import QuantisedKVCache
from harness.variants.specs.quantised import Quantisation


class CachedSelfAttention(nn.Module):
    """A subclass projects, fills the cache and attends, in `_attend`."""

    dropout: float
    kernel: Kernel
    out_proj: nn.Linear

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        cache: KVCache | None = None,
        need_weights: bool = False,
    ) -> Any:
        """x (B, L, E) -> (B, L, E), with need_weights also the (B, H, L, S) weights.

        With a cache the L tokens follow those it holds; masks then cover all S tokens.
        """
        if isinstance(x, Proxy):
            masks = {"mask": mask, "causal": causal, "window": window}
            return record_module(x, self, x, **masks, cache=cache, need_weights=need_weights)
        rules: dict[str, Any] = {
            "mask": mask,
            "causal": causal,
            "window": window,
            "dropout_p": self.dropout if self.training else 0.0,
            "return_weights": need_weights,
            "kernel": self.kernel,
        }
        attended = self._attend(x, cache, rules)
        heads, weights = attended if need_weights else (attended, None)
        out = self._out(heads.transpose(1, 2).flatten(2))  # (B, L, E)
        return (out, weights) if need_weights else out

    def _attend(self, x: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Any:
        """The heads' outputs, (B, H, L, D_v), as `attention` gives them when called with `rules`."""
        raise NotImplementedError

    def _out(self, heads: Tensor) -> Tensor:
        out: Tensor = self.out_proj(heads)
        return out

    def new_cache(self, capacity: int = 0, *, quantised: Quantisation | None = None) -> KVCache:
        return KVCache(capacity) if quantised is None else QuantisedKVCache(capacity, quantised)

    def hold(self, cache: KVCache, *streams: Tensor) -> None:
        """Appends what tokens left elsewhere: keys and values, or of latent attention its latents."""
        cache.append(*streams)
