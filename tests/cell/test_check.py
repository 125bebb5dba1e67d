"""`harness.check` and `harness.assert_equivalent`, as a user's own tests call them."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import harness
from harness.cell.check import REGIMES
from harness.cell.rule import JITTER_DRAWS, LARGE_DRAWS, LARGE_ELEMENTS


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


QKV = ((2, 4, 12, 8),) * 3


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def scale_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_hand(1.001 * q, k, v)


def names(found: harness.Equivalence) -> list[str]:
    return [verdict.tensor for verdict in found.verdicts]


def random_mha(embed_dim: int = 32, heads: int = 4, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(embed_dim, heads, batch_first=True, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return module


class SelfAttention(nn.Module):
    """A user's module around either implementation."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


# Functions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_right_function_passes(dtype: torch.dtype):
    found = harness.check(harness.attention, F.scaled_dot_product_attention, tensors(*QKV, dtype=dtype))
    assert found.passed
    assert found.status == "ok"
    assert names(found) == ["out"]
    assert found.verdicts[0].regime == "given"


def test_a_wrong_function_fails_with_its_factor():
    found = harness.check(scale_off, F.scaled_dot_product_attention, tensors(*QKV))
    assert not found.passed
    assert found.status == "mismatch"
    assert found.worst.err_ratio is not None and found.worst.err_ratio > 32


def test_one_tensor_a_sequence_and_a_mapping_are_inputs():
    q, k, v = tensors(*QKV)
    assert harness.check(torch.tanh, torch.tanh, q).passed
    assert not harness.check(torch.tanh, torch.sin, q).passed
    assert harness.check(by_hand, F.scaled_dot_product_attention, [q, k, v]).passed
    assert not harness.check(lambda q, v, k: by_hand(q, k, v), by_hand, [q, k, v]).passed  # the order counts
    assert harness.check(by_hand, by_hand, {"v": v, "q": q, "k": k}).passed
    assert harness.check(lambda q, v, k: by_hand(q, k, v), by_hand, {"v": v, "q": q, "k": k}).passed  # names do


def test_other_arguments_go_through_untouched():
    q, k, v = tensors(*QKV)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()

    def ours(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float) -> Any:
        return harness.attention(q, k, v, mask=attn_mask, scale=scale)

    inputs: dict[str, Any] = {"attn_mask": mask, "scale": 0.25}
    found = harness.check(
        lambda q, k, v: ours(q, k, v, **inputs),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **inputs),
        (q, k, v),
    )
    assert found.passed
    direct = {"query": q, "key": k, "value": v, **inputs}
    for changed in ({}, {"scale": 0.26}, {"attn_mask": torch.ones_like(mask)}):

        def other(query: Tensor, key: Tensor, value: Tensor, changed: Any = changed, **rest: Any) -> Any:
            return ours(query, key, value, **rest | changed)

        assert harness.check(other, F.scaled_dot_product_attention, direct).passed is (changed == {})


def test_the_inputs_are_not_changed():
    q, k, v = tensors(*QKV)
    before = q.clone()
    found = harness.check(lambda q, k, v: by_hand(q.mul_(2), k, v), by_hand, (q, k, v), gradients=False)
    assert torch.equal(q, before)
    assert not q.requires_grad
    assert not found.passed


def test_inputs_without_a_floating_tensor_are_refused():
    with pytest.raises(ValueError, match="hold a floating-point tensor"):
        harness.check(by_hand, by_hand, (torch.arange(3), 2))


def test_the_seed_decides_every_number():
    first, again = (harness.check(by_hand, F.scaled_dot_product_attention, tensors(*QKV), seed=4) for _ in range(2))
    other = harness.check(by_hand, F.scaled_dot_product_attention, tensors(*QKV), seed=5)
    assert first == again
    assert first != other


def test_the_reference_runs_once_per_draw_and_as_golden_in_float64():
    seen: list[torch.dtype] = []

    def reference(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.sin()

    assert harness.check(torch.sin, reference, tensors((4, 4))[0]).passed
    assert seen == [torch.float32, torch.float64] * (1 + JITTER_DRAWS)
    seen.clear()
    large = tensors((LARGE_ELEMENTS + 1,))[0]
    assert harness.check(torch.sin, reference, large).passed
    assert seen == [torch.float32, torch.float64] * (1 + LARGE_DRAWS)
    assert not harness.check(lambda x: torch.sin(x * (1 + 1e-4)), reference, large).passed


def test_a_badly_conditioned_problem_widens_its_own_budget():
    """Large numbers that cancel: two right orders of summation differ by far more than eps of the result."""
    half = tensors((512,))[0] * 1e4
    x = torch.cat((half, 1 - half))

    def forwards(x: Tensor) -> Tensor:
        return functools.reduce(torch.add, x.unbind())  # torch.cumsum would sum in float64

    def backwards(x: Tensor) -> Tensor:
        return forwards(x.flip(0))

    one_rounding = torch.finfo(torch.float32).eps * float(backwards(x.double()))
    found = harness.check(forwards, backwards, x)
    (verdict,) = found.verdicts
    assert verdict.max_abs_err is not None and verdict.err_budget is not None
    assert verdict.max_abs_err > 32 * one_rounding
    assert found.passed
    beyond = 2 * verdict.err_budget
    assert not harness.check(lambda x: forwards(x) + beyond, backwards, x).passed  # and no wider


# Outputs


def test_tuples_and_mappings_of_tensors_are_compared_one_by_one():
    q, k, v = tensors(*QKV)

    def pair(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT * 8**-0.5, -1)
        return weights @ v, weights

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = harness.attention(q, k, v, return_weights=True)
        return out

    assert names(found := harness.check(ours, pair, (q, k, v))) == ["out[0]", "out[1]"]
    assert found.passed

    def named(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor | None]:
        return {"heads": by_hand(q, k, v), "cache": None}

    assert names(found := harness.check(named, named, (q, k, v))) == ["heads"]
    assert found.passed


def test_one_wrong_output_of_several_is_named():
    x = tensors((8, 8))[0]
    found = harness.check(lambda x: (x, x.sin(), x.cos()), lambda x: (x, x.sin(), x.cos() + 1e-4), x)
    assert [v.status for v in found.verdicts] == ["ok", "ok", "mismatch"]
    assert found.worst.tensor == "out[2]"


@pytest.mark.parametrize(
    ("candidate", "reference", "told"),
    [
        (lambda x: (x, x), lambda x: (x,), ("out[1]", "the reference has none")),
        (lambda x: (x,), lambda x: (x, x), ("out[1]", "NoneType instead of a tensor")),
        (lambda x: (x, None), lambda x: (x, x), ("out[1]", "NoneType instead of a tensor")),
        (lambda x: {"a": x, "b": x}, lambda x: {"a": x}, ("b", "the reference has none")),
        (lambda x: {"a": x}, lambda x: {"a": x, "b": x}, ("b", "NoneType instead of a tensor")),
        (lambda x: x, lambda x: (x, x), ("out[0]", "NoneType instead of a tensor")),
        (lambda x: None, lambda x: x, ("out", "NoneType instead of a tensor")),
        (lambda x: x[:1], lambda x: x, ("out", "shape (1, 8) instead of (8, 8)")),
        (lambda x: x.double(), lambda x: x, ("out", "dtype torch.float64 instead of torch.float32")),
    ],
)
def test_missing_and_extra_outputs_are_mismatches(candidate, reference, told):
    found = harness.check(candidate, reference, tensors((8, 8))[0])
    assert found.status == "mismatch"
    assert told in [(verdict.tensor, verdict.reason) for verdict in found.verdicts]


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (lambda x: None, "out is NoneType"),
        (lambda x: (x, 3), r"out\[1\] is int"),
        (lambda x: (x, (1j * x,)), r"out\[1\]\[0\] is torch.complex64"),
        (lambda x: {"ids": x.long()}, "ids is torch.int64"),
        (lambda x: (), "returned nothing"),
        (lambda x: {"a": None}, "returned nothing"),
    ],
)
def test_a_reference_that_gives_nothing_to_compare_is_refused(reference, told: str):
    with pytest.raises(ValueError, match=told):
        harness.check(reference, reference, tensors((8, 8))[0])


def test_a_nan_never_passes():
    found = harness.check(lambda x: x / x, lambda x: x * 0 + 1, torch.tensor([1.0, 0.0, 2.0]))
    assert found.status == "mismatch"


def test_where_only_the_reference_overflows_nothing_passes():
    x = torch.full((4, 4), 300.0, dtype=torch.float16)
    found = harness.check(lambda x: x * x, lambda x: x * x, x)
    assert found.status == "skipped"
    assert not found.passed
    with pytest.raises(AssertionError, match="skipped: out: the reference itself is not finite"):
        harness.assert_equivalent(lambda x: x * x, lambda x: x * x, x)


def test_what_could_not_be_judged_is_not_ok_beside_what_was():
    x = torch.full((4, 4), 300.0, dtype=torch.float16)
    found = harness.check(lambda x: (x, x * x), lambda x: (x, x * x), x)
    assert [verdict.status for verdict in found.verdicts] == ["ok", "skipped"]
    assert (found.status, found.judged, found.passed) == ("skipped", "ok", False)
    with pytest.raises(AssertionError, match=r"skipped: out\[1\]: the reference itself is not finite"):
        harness.assert_equivalent(lambda x: (x, x * x), lambda x: (x, x * x), x)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_model_of_tokens_is_compared_in_the_dtype_of_its_weights(gradients: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4))
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.get_parameter("1.bias").add_(1e-3)
    tokens = torch.arange(10).view(2, 5)
    assert harness.check(copy.deepcopy(model), model, tokens, gradients=gradients).passed
    assert harness.check(wrong, model, tokens, gradients=gradients).status == "mismatch"


# Gradients


def test_reentrant_checkpointing_is_compared_too():
    def recomputed(q, k, v):
        return checkpoint(by_hand, q, k, v, use_reentrant=True)

    def wrong(q, k, v):
        return checkpoint(lambda q, k, v: by_hand(q, k, v.detach() + 0 * v), q, k, v, use_reentrant=True)

    assert harness.check(recomputed, by_hand, tensors(*QKV), gradients=True).passed
    assert not harness.check(wrong, by_hand, tensors(*QKV), gradients=True).passed


def test_gradients_of_every_floating_input_are_compared():
    inputs = tensors(*QKV)
    found = harness.check(by_hand, F.scaled_dot_product_attention, inputs, gradients=True)
    assert names(found) == ["out", "grad 0", "grad 1", "grad 2"]
    assert found.passed


def test_a_wrong_gradient_behind_a_right_output_is_found():
    def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        return weights.detach() @ v

    inputs = dict(zip("qkv", tensors(*QKV), strict=True))
    assert harness.check(detached, by_hand, inputs).passed
    found = harness.check(detached, by_hand, inputs, gradients=True)
    assert {v.tensor: v.status for v in found.verdicts} == {
        "out": "ok", "grad q": "mismatch", "grad k": "mismatch", "grad v": "ok",
    }  # fmt: skip


def test_a_candidate_that_cuts_the_graph_has_gradients_of_zero():
    found = harness.check(lambda x: x.detach().sin(), torch.sin, tensors((8, 8))[0], gradients=True)
    assert {v.tensor: v.status for v in found.verdicts} == {"out": "ok", "grad 0": "mismatch"}


def test_gradients_of_parameters_with_the_same_name_are_compared():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    x = tensors((3, 8))[0]
    found = harness.check(copy.deepcopy(module), module, x, gradients=True)
    parameters = [f"grad parameter {name}" for name, _ in module.named_parameters()]
    assert names(found) == ["out", "grad 0", *parameters]
    assert found.passed
    assert all(p.grad is None for p in module.parameters())


def test_parameters_that_only_one_side_has_are_no_mismatch():
    module = nn.Linear(8, 8)
    x = tensors((3, 8))[0]
    renamed = nn.Sequential(module)
    for candidate in (renamed, lambda x: F.linear(x, module.weight, module.bias)):
        found = harness.check(candidate, module, x, gradients=True)
        assert names(found) == ["out", "grad 0"]
        assert found.passed


def test_an_input_named_like_a_parameter_keeps_its_own_gradient():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.weight

    found = harness.check(Scale(), Scale(), {"weight": torch.tensor([5.0, 7.0])}, gradients=True)
    assert names(found) == ["out", "grad weight", "grad parameter weight"]
    assert found.passed


# Modules


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_mha_equals_its_swap(gradients: bool, bias: bool):
    model = SelfAttention(random_mha(bias=bias))
    swapped, _ = harness.swap(model)
    x = tensors((2, 10, 32))[0]
    found = harness.check(swapped, model, x, gradients=gradients)
    assert found.passed
    assert "out" in names(found)
    harness.assert_equivalent(swapped, model, x, gradients=gradients)


@pytest.mark.parametrize("which", ["q_proj", "k_proj", "v_proj", "out_proj"])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_one_weight_off_by_one_percent_fails(which: str, kind: str):
    model = SelfAttention(random_mha())
    swapped, _ = harness.swap(model)
    parameter = swapped.get_parameter(f"attention.{which}.{kind}")
    with torch.no_grad():
        parameter.view(-1)[parameter.abs().argmax()] *= 1.01
    x = tensors((2, 10, 32))[0]
    found = harness.check(swapped, model, x)
    if (which, kind) == ("k_proj", "bias"):
        assert found.passed  # it shifts all scores of a query alike, and the softmax does not see it
    else:
        assert found.status == "mismatch"
        with pytest.raises(AssertionError):
            harness.assert_equivalent(swapped, model, x)


def test_the_modules_are_left_as_they_were():
    model = SelfAttention(random_mha())
    swapped, _ = harness.swap(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    harness.check(swapped, model, tensors((2, 10, 32))[0], gradients=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dtype == torch.float32
    assert {p.dtype for p in swapped.parameters()} == {torch.float32}


def test_the_fast_path_hides_no_wrong_module():
    """In eval and no_grad torch's encoder layer never calls self_attn: a wrong one would be equal to the last bit."""

    class Wrong(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(*args, **kwargs)
            return 1.01 * out, weights

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    wrong = copy.deepcopy(layer)
    wrong.self_attn = Wrong(16, 2, batch_first=True).eval()
    wrong.self_attn.load_state_dict(layer.self_attn.state_dict())
    x = tensors((2, 6, 16))[0]
    with torch.no_grad():
        assert torch.equal(wrong(x), layer(x))  # the trap
    assert torch.backends.mha.get_fastpath_enabled()
    assert harness.check(wrong, layer, x).status == "mismatch"
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_is_restored_after_a_crash():
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        harness.check(broken, torch.sin, tensors((2, 2))[0])
    assert torch.backends.mha.get_fastpath_enabled()


# The assertion's message


def test_the_message_says_what_where_and_how_much():
    inputs = tensors(*QKV)
    with pytest.raises(AssertionError) as caught:
        harness.assert_equivalent(scale_off, F.scaled_dot_product_attention, inputs, gradients=True)
    message = str(caught.value)
    reference = F.scaled_dot_product_attention
    found = harness.check(scale_off, reference, inputs, gradients=True, regimes=REGIMES)
    first, *table = message.splitlines()
    assert first == f"mismatch: {found.worst.tensor}: {found.worst.reason}"
    assert " N (worst block " in first
    for column in ("tensor", "status", "max_abs_err", "err_budget", "err_ratio"):
        assert column in table[0]
    assert len(table) == 1 + len(found.verdicts)


def test_the_assertion_passes_what_agrees_with_float64_and_nothing_else():
    """In float32 the one agrees with torch in float64 to some eps, the other is off by a thousandth."""
    inputs = tensors(*QKV)
    q, k, v = (t.double() for t in inputs)
    golden = F.scaled_dot_product_attention(q, k, v)
    errors = [float((function(*inputs).double() - golden).abs().max()) for function in (by_hand, scale_off)]
    floor = torch.finfo(torch.float32).eps * float(golden.abs().max())
    assert errors[0] <= 8 * floor < 100 * floor < errors[1]
    harness.assert_equivalent(by_hand, F.scaled_dot_product_attention, inputs)
    with pytest.raises(AssertionError, match="mismatch: out"):
        harness.assert_equivalent(scale_off, F.scaled_dot_product_attention, inputs)


def test_a_candidate_that_writes_into_its_input_fails():
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def destructive(x: torch.Tensor) -> torch.Tensor:
        result = 2 * x
        x.zero_()
        return result

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    assert harness.check(doubled, doubled, x).passed
    found = harness.check(destructive, doubled, x)
    assert found.status == "mismatch"
    assert found.worst.tensor == "input 0"
    assert bool(x.any())  # the caller's own tensor is untouched
    assert harness.check(doubled, destructive, x).passed  # the candidate is not blamed for the reference


# What plain numbers hide


def without_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.exp(q @ k.mT * q.shape[-1] ** -0.5)
    return weights / weights.sum(-1, keepdim=True) @ v


class RemembersByShape:
    def __init__(self) -> None:
        self.known: dict[torch.Size, Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.known.setdefault(q.shape, by_hand(q, k, v))


class OneBuffer(RemembersByShape):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.known.setdefault(q.shape, torch.empty_like(q)).copy_(by_hand(q, k, v))


def one_percent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_hand(1.01 * q.float(), k.float(), v.float()).to(q.dtype)


@pytest.mark.parametrize(
    ("candidate", "dtype", "told"),
    [
        (without_max, torch.float32, "peaked"),
        (RemembersByShape(), torch.float32, "peaked"),
        (OneBuffer(), torch.float32, "a later call overwrote it"),
        (one_percent, torch.bfloat16, r"out \(in float32\)"),
    ],
)
def test_the_assertion_sees_what_one_plain_call_does_not(candidate: Any, dtype: torch.dtype, told: str):
    inputs = tensors(*QKV, dtype=dtype)
    assert harness.check(candidate, F.scaled_dot_product_attention, inputs).passed
    with pytest.raises(AssertionError, match=told):
        harness.assert_equivalent(candidate, F.scaled_dot_product_attention, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("candidate", [harness.attention, by_hand])
def test_right_ones_pass_in_all_regimes(candidate: Any, dtype: torch.dtype):
    if candidate is by_hand and dtype == torch.float16:
        pytest.skip("it overflows in half precision, which is what the regimes are for")
    reference = F.scaled_dot_product_attention if candidate is harness.attention else by_hand
    for seed in range(3):
        harness.assert_equivalent(candidate, reference, tensors(*QKV, dtype=dtype), seed=seed, gradients=seed == 2)
    harness.assert_equivalent(by_hand, by_hand, dict(zip("qkv", tensors(*QKV), strict=True)))


def test_regimes_are_for_q_k_and_v():
    with pytest.raises(ValueError, match="regimes are for calls of q, k and v"):
        harness.check(torch.tanh, torch.tanh, tensors((3, 4)), regimes=("peaked",))
    with pytest.raises(ValueError, match="did you mean 'peaked'"):
        harness.check(by_hand, by_hand, tensors(*QKV), regimes=("peakd",))


# Tokens, keywords, several outputs, chosen gradients


class Model(nn.Module):
    def __init__(self, wrong: float = 0.0, shift: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.wrong, self.shift = wrong, shift

    def forward(self, input_ids: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(input_ids) * (1 if scale is None else scale)
        logits = self.head(x) + self.wrong
        return {"logits": logits, "best": logits.argmax(-1) + self.shift, "past": ((x, 2 * x), None)}


def test_a_model_of_tokens_with_keywords_and_several_outputs():
    ids, scale = torch.arange(6).view(2, 3), torch.tensor(1.5)
    found = harness.check(Model(), Model(), (ids,), keywords={"scale": scale})
    assert found.passed and names(found) == ["logits", "best", "past[0][0]", "past[0][1]"]
    assert harness.check(Model(), Model(), {"input_ids": ids}).passed
    (wrong,) = (v for v in harness.check(Model(shift=1), Model(), {"input_ids": ids}).verdicts if v.status != "ok")
    assert (wrong.tensor, wrong.reason) == ("best", "6 of 6 numbers differ, the first at [0, 0]")
    assert harness.check(Model(shift=1), Model(), {"input_ids": ids}, outputs=["logits"]).passed
    assert not harness.check(Model(wrong=1e-3), Model(), {"input_ids": ids}, outputs=["logits"]).passed
    with pytest.raises(ValueError, match=r"outputs = 'logit'.*did you mean 'logits'"):
        harness.check(Model(), Model(), {"input_ids": ids}, outputs=["logit"])


def test_a_candidate_that_writes_into_its_tokens_fails():
    def writes(ids: Tensor, x: Tensor) -> Tensor:
        ids += 1
        return 2 * x

    found = harness.check(writes, lambda ids, x: 2 * x, (torch.arange(3), torch.ones(3)))
    assert (found.worst.tensor, found.worst.reason) == ("input 0", "was written into")


def test_only_the_chosen_gradients_are_compared():
    class CutsK(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return by_hand(q, k.detach(), v)

    inputs = dict(zip("qkv", tensors(*QKV), strict=True))
    assert harness.check(CutsK(), by_hand, inputs, gradients=["q", "v"]).passed
    assert names(harness.check(by_hand, by_hand, inputs, gradients=["v"])) == ["out", "grad v"]
    assert not harness.check(CutsK(), by_hand, inputs, gradients=["k"]).passed
    with pytest.raises(ValueError, match="gradients = 'w'"):
        harness.check(by_hand, by_hand, inputs, gradients=["w"])
