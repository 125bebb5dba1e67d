"""Cells, random tokens and modules, and when two functions of them are the same."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import harness
from harness.case import Case
from harness.cell.build import randomise
from harness.swaps.weights import WeightSource
from harness.variants.specs import VARIANTS

DERIVED = ("kv_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim")
Function = Callable[..., Any]


def make_case(variant: str = "mha", **axes: Any) -> Case:
    """A small causal cell; sizes that are not given follow from embed_dim and heads as in a config."""
    given: dict[str, Any] = {
        "kernel": "eager", "embed_dim": 32, "heads": 4, "seq_len": 12, "batch": 2, "mask": "causal",
        "dtype": "float32", "phase": "prefill",
    } | axes  # fmt: skip
    raw = dict.fromkeys(DERIVED) | {"kv_heads": 2} | given
    return Case(variant=variant, **(given | VARIANTS[variant].resolve(raw)))


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """One normal tensor for each shape."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def draw_tokens(
    dtype: torch.dtype = torch.float64, *, batch: int, length: int, width: int, seed: int = 1
) -> Tensor:  # (B, L, E)
    """Drawn in float64: float32 numbers in float64 would be multiplied without a rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, width, generator=generator, dtype=torch.float64).to(dtype)


def filled(module: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The module, its parameters random numbers that fill the dtype, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    randomise(module, generator)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 1 + 1e-3 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
    return module.to(dtype).eval()


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def as_torch(q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear, *, heads: int) -> nn.MultiheadAttention:
    """torch's own attention with these projections, in float64."""
    theirs = nn.MultiheadAttention(q.in_features, heads, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([q.weight, k.weight, v.weight]))
        theirs.in_proj_bias.copy_(torch.cat([q.bias, k.bias, v.bias]))
        theirs.out_proj.load_state_dict(out.state_dict())
    return theirs


def assert_same(candidate: Function, reference: Function, *inputs: Tensor) -> None:
    """Both give the same tensors, up to what rounding explains; that is derived, not guessed.

    The limit is the acceptance rule's, in the inputs' own dtype: how far the reference moves when its inputs (and, of a
    module, its weights) move by one rounding, and how far two ways to sum it differ. In float64 that is a few eps.
    """
    harness.assert_equivalent(candidate, reference, inputs)


def by_sources(found: Mapping[str, Tensor], sources: Mapping[str, WeightSource]) -> dict[str, Tensor]:
    """What `differentiated` found of a model, by the names and cuts of the parameters of its swap."""
    return {"out": found["out"], "d x": found["d x"]} | {
        f"d {name}": source.of(found[f"d {source.name}"]) for name, source in sources.items()
    }


def differentiated(function: Function, parameters: Mapping[str, Tensor], cotangent: Tensor) -> Function:
    """The function with its derivatives by x and by the parameters, as one mapping of tensors.

    Not by the names that harness.check knows for gradients: it allows those two to four times as much.
    """

    def run(x: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = function(leaf)
            found = torch.autograd.grad(out, (leaf, *parameters.values()), cotangent)
        return {"out": out.detach()} | {f"d {name}": grad for name, grad in zip(("x", *parameters), found, strict=True)}

    return run
