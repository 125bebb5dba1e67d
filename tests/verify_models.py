"""Models as a user of `harness verify` would write them: right ones, and ones with something wrong about them."""

from typing import Any

import torch
from torch import Tensor, nn

from harness.cell.build import randomise
from harness.models.families.family import Batch


class Encoder(nn.Module):
    """torch's own encoder: in eval its fast path calls no attention module at all."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        randomise(self, torch.Generator().manual_seed(0))

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if causal else None
        return self.encoder(self.embed(x), mask=mask)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def encoder() -> tuple[nn.Module, Tensor]:
    return Encoder(), noise(2, 7, 6)


def encoder_by_keywords() -> tuple[nn.Module, dict[str, Any]]:
    return Encoder(), {"x": noise(2, 7, 6), "causal": True}


def half() -> tuple[nn.Module, Tensor]:
    return Encoder().bfloat16(), noise(2, 7, 6).bfloat16()


class Twice(nn.Module):
    """One attention run twice in a pass, writing into its own input, and giving a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        randomise(self, torch.Generator().manual_seed(0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[None, Tensor]:
        x += self.attention(x, x, x, need_weights=False)[0]
        return None, self.attention(x, y, y)[0]


def twice() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Twice(), (noise(2, 5, 8), noise(2, 3, 8))


def two_batches() -> tuple[nn.Module, dict[str, Batch]]:
    short, long = Batch({}, args=(noise(1, 3, 6),)), Batch({"x": noise(2, 9, 6), "causal": True})
    return Encoder(), {"short": short, "long and causal": long}


def bare_attention() -> tuple[nn.Module, tuple[Tensor, ...]]:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    randomise(attention, torch.Generator().manual_seed(0))
    return attention, (noise(2, 5, 8),) * 3


def language_model() -> nn.Module:
    """Of a class that no family has."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = Qwen2ForCausalLM(config)
    randomise(model, torch.Generator().manual_seed(0))
    return model


def flux() -> nn.Module:
    """Of a class that a family has: its batches will do."""
    from harness.models.families.flux import FAMILY

    return FAMILY.build({"num_layers": 1, "num_single_layers": 1})


# Something wrong


def without_inputs() -> nn.Module:
    return Encoder()


def odd_inputs() -> tuple[nn.Module, int]:
    return Encoder(), 7


def no_model() -> int:
    return 3


def without_attention() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 4), noise(2, 4)


def cannot_be_built() -> nn.Module:
    raise RuntimeError("no weights on this machine")


class Odd(Encoder):
    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        raise KeyError("lengths")


def cannot_run() -> tuple[nn.Module, Tensor]:
    return Odd(), noise(2, 7, 6)


class Rounding(Encoder):
    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        return torch.from_numpy(super().forward(x, causal).detach().numpy().astype("float32"))


def rounds_behind_our_back() -> tuple[nn.Module, Tensor]:
    return Rounding(), noise(2, 7, 6)


class Subclass(nn.MultiheadAttention):
    """The swap cannot know what it computes."""


def unknown_subclass() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.ModuleDict({"attention": Subclass(8, 2)}), (noise(5, 8),) * 3


def padded_encoder() -> Any:
    """torch's encoder turns this into nested tensors on its fast path, and gives padding another value than off it."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return nn.TransformerEncoder(layer, 2), {"src": torch.randn(2, 6, 16), "src_key_padding_mask": padding}


def one_layer_three_times() -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(layer, layer, layer), torch.randn(2, 6, 16)


def leaves() -> Any:
    raise SystemExit(0)


class WithWeights(nn.Module):
    """Gives its input back first, then the attention's output and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return x, *self.attention(x, x, x)


def with_weights() -> Any:
    return WithWeights(), torch.randn(2, 6, 16)
