"""The drop-ins against nn.MultiheadAttention over the whole space of constructor and forward arguments, in float64."""

import warnings
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, seed, settings
from torch import Tensor, nn

from harness.cell.build import randomise
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj
from harness.variants.multihead import DropInAttention

CLASSES = (EagerMultiheadAttention, EagerMultiheadAttentionWithInProj)
ROUNDING = 1e-12  # of float64 at the sizes below, relative to the largest value: bugs are 1e-3 and more
MASKS = ("none", "bool", "float", "bool per head", "float per head", "causal bool", "causal float")


@dataclass(frozen=True)
class Problem:
    """One point of the space."""

    constructor: dict[str, Any]
    batch: int | None  # None: unbatched
    queries: int
    keys: int
    given_as: str  # which of query, key and value are one tensor
    attn_mask: str
    padding: str
    dead: bool  # masks may hide every key of a row
    need_weights: bool
    average: bool
    hint: bool
    training: bool
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    heads = draw(st.integers(1, 3))
    embed = heads * draw(st.integers(1, 4))
    given_as = draw(st.sampled_from(["self", "kv", "apart"]))
    kdim = draw(st.sampled_from([None, embed, 3])) if given_as != "self" else None
    vdim = draw(st.sampled_from([None, embed, 5])) if given_as == "apart" else kdim
    queries = draw(st.integers(1, 4))
    attn_mask = draw(st.sampled_from(MASKS))
    return Problem(
        constructor={
            "embed_dim": embed,
            "num_heads": heads,
            "dropout": draw(st.sampled_from([0.0, 0.4])),
            "bias": draw(st.booleans()),
            "add_bias_kv": draw(st.booleans()),
            "add_zero_attn": draw(st.booleans()),
            "kdim": kdim,
            "vdim": vdim,
            "batch_first": draw(st.booleans()),
            "dtype": torch.float64,
        },
        batch=draw(st.sampled_from([None, 1, 2, 3])),
        queries=queries,
        keys=queries if given_as == "self" else draw(st.integers(1, 4)),
        given_as=given_as,
        attn_mask=attn_mask,
        padding=draw(st.sampled_from(["none", "bool", "float"])),
        dead=draw(st.booleans()),
        need_weights=draw(st.booleans()),
        average=draw(st.booleans()),
        hint=attn_mask != "none" and draw(st.booleans()),
        training=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def make_mask(kind: str, shape: tuple[int, ...], dead: bool, generator: torch.Generator) -> Tensor | None:
    """In torch's convention: True = blocked."""
    if kind == "none":
        return None
    blocked = torch.rand(shape, generator=generator) < 0.4
    if kind.startswith("causal"):
        blocked = torch.ones(shape, dtype=torch.bool).triu(1)
    if not dead:
        blocked[..., 0] = False
    if "bool" in kind:
        return blocked
    return torch.randn(shape, generator=generator, dtype=torch.float64).masked_fill(blocked, float("-inf"))


def make_inputs(problem: Problem) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(problem.seed)
    options = problem.constructor
    E, H = options["embed_dim"], options["num_heads"]

    def rows(length: int, width: int) -> Tensor:
        if problem.batch is None:
            shape: tuple[int, ...] = (length, width)
        else:
            shape = (problem.batch, length, width) if options["batch_first"] else (length, problem.batch, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = rows(problem.queries, E)
    key = query if problem.given_as == "self" else rows(problem.keys, options["kdim"] or E)
    value = rows(problem.keys, options["vdim"] or E) if problem.given_as == "apart" else key
    batch = problem.batch or 1
    plane = (problem.queries, problem.keys)
    shape = (batch * H, *plane) if "per head" in problem.attn_mask else plane
    padding = (batch, problem.keys) if problem.batch is not None else (problem.keys,)
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": make_mask(problem.attn_mask, shape, problem.dead, generator),
        "key_padding_mask": make_mask(problem.padding, padding, problem.dead, generator),
        "need_weights": problem.need_weights,
        "average_attn_weights": problem.average,
        "is_causal": problem.hint,
    }


def run(module: nn.Module, problem: Problem) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the gradients of every input and parameter under torch's names."""
    inputs = make_inputs(problem)
    leaves = {id(inputs[name]): inputs[name].requires_grad_() for name in ("query", "key", "value")}
    torch.manual_seed(problem.seed)  # of dropout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # mismatched mask types are deprecated, and meant here
        outputs = [t for t in module(**inputs) if t is not None]
    generator = torch.Generator().manual_seed(problem.seed)
    scalar = torch.stack(
        [(t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).nansum() for t in outputs]
    ).sum()
    scalar.backward()
    gradients = {f"input {index}": leaf.grad for index, leaf in enumerate(leaves.values())}
    for name, parameter in module.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(module, EagerMultiheadAttention):
        gradients = in_torch_names(module, gradients)
    return [t.detach() for t in outputs], {key: g for key, g in gradients.items() if g is not None}


def in_torch_names(module: EagerMultiheadAttention, gradients: dict[str, Any]) -> dict[str, Any]:
    parts = module.PARTS
    weights = [gradients.pop(f"{part}.weight") for part in parts]
    if module.packs:
        gradients["in_proj_weight"] = torch.cat(weights)
    else:
        gradients |= {f"{part}_weight": weight for part, weight in zip(parts, weights, strict=True)}
    if "q_proj.bias" in gradients:
        gradients["in_proj_bias"] = torch.cat([gradients.pop(f"{part}.bias") for part in parts])
    return gradients


def make_pair(kind: type[DropInAttention], problem: Problem) -> tuple[nn.MultiheadAttention, DropInAttention]:
    theirs = nn.MultiheadAttention(**problem.constructor)
    randomise(theirs, torch.Generator().manual_seed(problem.seed))
    ours = kind(**problem.constructor, dead_rows="torch")
    ours.load_state_dict(theirs.state_dict())
    return theirs.train(problem.training), ours.train(problem.training)


def differences(kind: type[DropInAttention], problem: Problem) -> dict[str, float]:
    """Of every output and gradient, relative to the largest value; NaN where one side alone is NaN."""
    theirs, ours = make_pair(kind, problem)
    expected, expected_gradients = run(theirs, problem)
    found, found_gradients = run(ours, problem)
    assert len(found) == len(expected)
    assert found_gradients.keys() == expected_gradients.keys()
    pairs = {f"output {index}": pair for index, pair in enumerate(zip(found, expected, strict=True))}
    if not any(bool(t.isnan().any()) for t in expected):
        # torch's NaN rows spoil all its gradients; ours give 0 there.
        pairs |= {key: (found_gradients[key], expected_gradients[key]) for key in expected_gradients}
    result = {}
    for name, (ours_, theirs_) in pairs.items():
        assert ours_.shape == theirs_.shape, name
        assert ours_.dtype == theirs_.dtype, name
        if bool((ours_.isnan() != theirs_.isnan()).any()):
            result[name] = float("nan")
            continue
        size = max(1.0, float(theirs_.nan_to_num().abs().max()))
        result[name] = float((ours_ - theirs_).nan_to_num().abs().max()) / size
    return result


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", CLASSES)
def test_equal_to_torch_over_the_whole_space(kind: type[DropInAttention], part: int) -> None:
    @seed(part)
    @settings(max_examples=400, deadline=None, database=None)
    @given(problem=problems())
    def holds(problem: Problem) -> None:
        wrong = {name: value for name, value in differences(kind, problem).items() if not value <= ROUNDING}
        assert not wrong, f"{wrong} in {problem}"

    holds()


# ---- each of these breaks one clause of the contract; the space above must hold a case that sees it ------------------


def forget_bias_token(module: DropInAttention) -> None:
    module.bias_k = module.bias_v = None


def forget_zero_token(module: DropInAttention) -> None:
    module.add_zero_attn = False


def always_heed_the_hint(module: DropInAttention) -> None:
    attend = module._attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool) -> Any:
        return attend(q, k, v, mask, causal or mask is not None, need_weights)

    module._attend = wrong  # type: ignore[method-assign]


def drop_in_eval(module: DropInAttention) -> None:
    module.dropout = 0.4
    module.training = True


def forget_a_mask(module: DropInAttention) -> None:
    attend = module._attend
    module._attend = lambda q, k, v, mask, *rest: attend(q, k, v, None, *rest)  # type: ignore[method-assign]


def ignore_batch_first(module: DropInAttention) -> None:
    module.batch_first = not module.batch_first


SABOTAGE = (forget_bias_token, forget_zero_token, always_heed_the_hint, drop_in_eval, forget_a_mask, ignore_batch_first)


@pytest.mark.parametrize("break_it", SABOTAGE)
def test_a_broken_clause_is_seen(break_it: Any) -> None:
    caught = []

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(problem=problems())
    def look(problem: Problem) -> None:
        theirs, ours = make_pair(EagerMultiheadAttention, problem)
        break_it(ours)
        expected = run(theirs, problem)[0]
        try:
            found = run(ours, problem)[0]
        except (AssertionError, RuntimeError):  # shapes no longer fit
            caught.append(problem)
            return
        pairs = zip(found, expected, strict=True)
        if not all(torch.allclose(a, b, rtol=0, atol=ROUNDING, equal_nan=True) for a, b in pairs):
            caught.append(problem)

    look()
    assert len(caught) >= 3, f"seen in {len(caught)} of 60 problems"
