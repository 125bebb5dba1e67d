"""Each check sees the kernel it is there for, and none sees anything in a right one."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import DTYPES, PHASES, Case
from harness.cell import self_checks as metamorphic
from harness.cell.build import Pair, build_pair
from harness.cell.probe import floor_of, make_question
from harness.cell.rule import TensorVerdict
from harness.kernels.call import AttentionCall, ContractBroken, Kernel, Unsupported
from harness.kernels.eager import eager
from harness.kernels.front import find_kernel
from harness.variants import masks
from tests import wrong_kernels
from tests.support import ROOT

Run = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]


def make_case(**axes: object) -> Case:
    defaults: dict[str, object] = {
        "variant": "gqa",
        "kernel": "eager",
        "embed_dim": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "seq_len": 40,
        "batch": 1,
        "mask": "none",
        "dtype": "float32",
        "phase": "prefill",
    }
    if str(axes.get("variant")).startswith("mla"):
        defaults |= {"kv_heads": None, "kv_lora_rank": 32, "rope_head_dim": 4, "v_head_dim": 8}
    return Case(**(defaults | axes))  # type: ignore[arg-type]


def pair_of(kernel: Kernel, **axes: object) -> Pair:
    return build_pair(make_case(**axes), kernel, seed=1)


def wrong(run: Run, **options: object) -> Kernel:
    return Kernel("wrong", run, **({"origin": "saboteur"} | options))  # type: ignore[arg-type]


def found(kernel: Kernel, *, seed: int = 3, **axes: Any) -> dict[str, TensorVerdict]:
    """By check, without the common prefix."""
    verdicts = list(metamorphic.verdicts(pair_of(kernel, **axes), seed=seed))
    assert all(v.regime == "metamorphic" and v.tensor.startswith("check: ") for v in verdicts)
    return {v.tensor.removeprefix("check: "): v for v in verdicts}


def failed(kernel: Kernel, **axes: Any) -> set[str]:
    return {name for name, v in found(kernel, **axes).items() if v.status in ("mismatch", "degraded")}


# ---- right kernels ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readme_kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    source = (ROOT / "README.md").read_text().split("# my_kernels.py\n")[1].split("```")[0]
    file = tmp_path_factory.mktemp("readme") / "my_kernels.py"
    file.write_text(source)
    return find_kernel(f"{file}:fast")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", list(masks.MASKS))
def test_right_kernels_raise_no_alarm(mask: str, dtype: str, readme_kernel: Kernel) -> None:
    kernels = [find_kernel("eager"), find_kernel("sdpa"), readme_kernel]
    kernels += [find_kernel(f"tests.wrong_kernels:{name}") for name in ("plain", "textbook")]
    variants = itertools.cycle(["gqa", "mla_absorbed", "mla_naive"])
    for phase, kernel in itertools.product(PHASES, kernels):
        verdicts = found(kernel, mask=mask, dtype=dtype, phase=phase, variant=next(variants))
        wrong = {name: v.reason for name, v in verdicts.items() if v.status not in ("ok", "skipped")}
        assert not wrong, (kernel.name, phase, wrong)
        skipped = {name for name, v in verdicts.items() if v.status == "skipped"}
        assert skipped == set()


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "float_bias", "sliding_window", "dead_rows"])
@pytest.mark.parametrize("kernel", ["eager", "tiled", "grouped", "sdpa", "auto"])
def test_right_kernels_raise_no_alarm_at_length(kernel: str, mask: str) -> None:
    for phase in PHASES:
        verdicts = found(find_kernel(kernel), mask=mask, phase=phase, seq_len=150)
        assert {v.status for v in verdicts.values()} <= {"ok", "skipped"}, verdicts


def test_all_checks_apply_where_everything_is_asked_for() -> None:
    eager_kernel = find_kernel("eager")
    assert list(found(eager_kernel, mask="causal", phase="train", dtype="bfloat16")) == list(metamorphic.CHECKS)


def test_checks_that_do_not_apply_say_nothing() -> None:
    without = set(metamorphic.CHECKS) - set(found(find_kernel("eager"), variant="mha", kv_heads=4))
    of_masks = {"dead rows", "hidden NaN", "causal from the first key", "one row unpadded", "smallest mask"}
    assert without == {"repeated groups", "gradient of the mask", "half precision", *of_masks}
    # A user's kernel has not promised what ours have, unless its own cell asks for it.
    user = Kernel("user", eager, shielded=False, origin="my.py")
    assert "dead rows" not in found(user, mask="causal") and "hidden NaN" not in found(user, mask="causal")
    assert "dead rows" in found(user, mask="dead_rows")


def test_absorbed_latents_are_one_head_wider_in_keys_than_in_values() -> None:
    question = make_question(make_case(variant="mla_absorbed"), torch.Generator().manual_seed(0))
    assert question.k.shape[1] == 1 and question.k.shape[-1] == 32 + 4 and question.v.shape[-1] == 32
    assert question.scale == (8 + 4) ** -0.5
    expanded = make_question(make_case(variant="mla_naive"), torch.Generator().manual_seed(0))
    assert expanded.k.shape[1] == expanded.q.shape[1] > 1 and expanded.k.shape[-1] == 8 + 4


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_noise_has_a_part_for_rounding_and_one_for_conditioning(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    floor = floor_of(make_question(make_case(dtype=dtype), generator), generator)
    assert all(float(term.max()) > 0 for term in floor.terms)


# ---- wrong kernels, each with exactly the checks that see it ---------------------------------------------------------


def last_partial_tile_dropped(q, k, v, call):
    S = k.shape[2] // 16 * 16
    mask = None if call.mask is None else call.mask[..., :S]
    return eager(q, k[:, :, :S], v[:, :, :S], dataclasses.replace(call, mask=mask))


def no_maximum_subtracted(q, k, v, call):
    scores = q * call.scale @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if call.bias is not None:
        scores = scores + call.bias
    raised = scores.exp()
    return raised / raised.sum(-1, keepdim=True) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), None


def values_clamped(q, k, v, call):
    return eager(q, k, v.clamp(-3, 3), call)


def scores_capped(q, k, v, call):
    return eager(q, k, v, dataclasses.replace(call, softcap=50.0))


def neighbours_mixed(q, k, v, call):
    out, _ = eager(q, k, v, call)
    return out + 0.01 * out.mean(0), None


def second_row_scaled(q, k, v, call):
    out = eager(q, k, v, call)[0].clone()
    out[1:] *= 1.001
    return out, None


def causal_top_left(q, k, v, call):
    return eager(q, k, v, dataclasses.replace(call, q_start=0))


def groups_tiled(q, k, v, call):
    G = q.shape[1] // k.shape[1]
    return eager(q, k.repeat(1, G, 1, 1), v.repeat(1, G, 1, 1), call)


def channels_read_as_contiguous(q, k, v, call):
    if v.stride(-2) > v.shape[-1]:
        v = torch.as_strided(v, v.shape, v.new_empty(v.shape).stride(), v.storage_offset())
    return eager(q, k, v, call)


def expanded_batch_misread(q, k, v, call):
    out = eager(q, k, v, call)[0].clone()
    if q.stride(0) == 0:
        out[1:] = 0
    return out, None


class EverySecondCallOneBitOff:
    calls = 0

    def __call__(self, q, k, v, call):
        self.calls += 1
        out, _ = eager(q, k, v, call)
        return (out * (1 + torch.finfo(out.dtype).eps) if self.calls % 2 else out), None


def beside_the_view_written(q, k, v, call):
    if k.storage_offset() > 0:
        torch.as_strided(k, (1,), (1,), 0).zero_()
    return eager(q, k, v, call)


def dropout_not_rescaled(q, k, v, call):
    return eager(q, k, v, call)[0] * (1 - call.dropout_p), None


def dropout_keeps_p(q, k, v, call):
    flipped = 1 - call.dropout_p if call.dropout_p else 0.0
    return eager(q, k, v, dataclasses.replace(call, dropout_p=flipped))


def dropout_rows_whole(q, k, v, call):
    """The expectation is right; but instead of p of the weights it drops half of the rows."""
    out, _ = eager(q, k, v, dataclasses.replace(call, dropout_p=0.0))
    return (F.dropout(out.new_ones(*out.shape[:3], 1), 0.5) * out if call.dropout_p else out), None


def dropout_ignored(q, k, v, call):
    return eager(q, k, v, dataclasses.replace(call, dropout_p=0.0))


def torch_called_secretly(q, k, v, call):
    if call.dropout_p:
        return eager(q, k, v, call)
    return F.scaled_dot_product_attention(q, k, v, scale=call.scale, enable_gqa=True), None


def torch_called_by_its_operator(q, k, v, call):
    if q.shape[1] == k.shape[1]:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return eager(q, k, v, call)


def dead_rows_uniform(q, k, v, call):
    out, _ = eager(q, k, v, call)
    allowed = call.allowed(q, k)
    if allowed is None:
        return out, None
    dead = ~allowed.any(-1, keepdim=True).expand(*out.shape[:3], 1)
    return torch.where(dead, v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1), out), None


def dead_rows_with_gradient(q, k, v, call):
    out, _ = eager(q, k, v, call)
    return out + (q - q.detach())[..., : out.shape[-1]], None


def short_chunks_rounded(q, k, v, call):
    if 1 < q.shape[2] <= 8 and q.shape[2] < k.shape[2]:
        call = dataclasses.replace(call, scale=1.01 * call.scale)
    return eager(q, k, v, call)


def queries_beyond_the_keys_dropped(q, k, v, call):
    out = eager(q, k, v, call)[0].clone()
    out[:, :, k.shape[2] :] = 0
    return out, None


def causal_bottom_right(q, k, v, call):
    return eager(q, k, v, dataclasses.replace(call, q_start=k.shape[2] - q.shape[2]))


def mask_read_from_row_0(q, k, v, call):
    if call.mask is not None and call.bias is None and bool(call.mask[0].all()):
        call = dataclasses.replace(call, mask=None)
    return eager(q, k, v, call)


def bias_in_base_two(q, k, v, call):
    """The smallest number, times more than one, is infinite."""
    mask = call.mask if call.bias is None else 1.5 * call.bias / 1.5
    return eager(q, k, v, dataclasses.replace(call, mask=mask))


def no_default_scale(q, k, v, attn_mask=None, scale=None, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=1.0 if scale is None else scale, **options)


def zero_queries_skipped(q, k, v, call):
    out, _ = eager(q, k, v, call)
    return (out if bool(q.any()) else 0 * out), None


def mask_without_gradient(q, k, v, call):
    mask = None if call.mask is None else call.mask.detach()
    return eager(q, k, v, dataclasses.replace(call, mask=mask))


def nan_hidden_behind_the_softmax(q, k, v, attn_mask=None, scale=1.0, is_causal=False, enable_gqa=False, **options):
    """A row that sees nothing gives 0, but softmax's backward pass still multiplies by its NaN."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def second_thread_scaled(q, k, v, call):
    out = eager(q, k, v, call)[0].clone()
    if torch.get_num_threads() > 1:
        out[:, :, q.shape[2] // 2 :] *= 1.001
    return out, None


def scale_off_in_half(q, k, v, call):
    """By 1 %, in half precision alone: less than rounding does to an element, and the float32 shadow is right."""
    return eager(q, k, v, dataclasses.replace(call, scale=1.01 * call.scale))


WRONG: dict[str, tuple[Kernel, dict[str, object], set[str]]] = {
    "scale off in half": (wrong(scale_off_in_half), {"dtype": "bfloat16"}, {"half precision"}),
    "last partial tile dropped": (wrong(last_partial_tile_dropped), {}, {"permuted keys"}),
    "values clamped": (wrong(values_clamped), {}, {"linear in v"}),
    "no maximum subtracted": (wrong(no_maximum_subtracted), {"mask": "none"}, {"large scores", "dropout"}),
    "scores capped": (wrong(scores_capped), {}, {"shifted scores"}),
    "neighbours mixed": (wrong(neighbours_mixed), {}, {"row alone", "expanded batch"}),
    "second row scaled": (wrong(second_row_scaled), {}, {"row alone", "permuted batch", "expanded batch"}),
    "causal top left": (wrong(causal_top_left), {"mask": "causal"}, {"split prefill", "chunk"}),
    "groups tiled": (wrong(groups_tiled), {}, {"repeated groups"}),
    "channels read as contiguous": (wrong(channels_read_as_contiguous), {}, {"views"}),
    "expanded batch misread": (wrong(expanded_batch_misread), {}, {"expanded batch"}),
    "one bit off now and then": (wrong(EverySecondCallOneBitOff()), {}, {"repeated call"}),
    "beside the view written": (wrong(beside_the_view_written), {}, {"inputs untouched"}),
    "dropout not rescaled": (wrong(dropout_not_rescaled), {}, {"dropout"}),
    "dropout keeps p": (wrong(dropout_keeps_p), {}, {"dropout"}),
    "dropout of whole rows": (wrong(dropout_rows_whole), {"head_dim": 40}, {"dropout"}),
    "dropout ignored": (wrong(dropout_ignored), {}, {"dropout"}),
    "torch called secretly": (wrong(torch_called_secretly), {}, {"delegation"}),
    "torch called by its operator": (
        wrong(torch_called_by_its_operator),
        {"variant": "mha", "kv_heads": 4},
        {"delegation"},
    ),
    "dead rows uniform": (wrong(dead_rows_uniform), {"mask": "padding"}, {"dead rows"}),
    "dead rows with gradient": (
        wrong(dead_rows_with_gradient),
        {"mask": "padding", "phase": "train"},
        {"dead rows", "gradient of the mask"},
    ),
    "short chunks rounded": (wrong(short_chunks_rounded), {}, {"chunk"}),
    "short chunks rounded at the end": (wrong(short_chunks_rounded), {"phase": "decode"}, {"chunk"}),
    "queries beyond the keys dropped": (wrong(queries_beyond_the_keys_dropped), {}, {"more queries than keys"}),
    "causal bottom right": (wrong(causal_bottom_right), {"mask": "causal"}, {"causal from the first key"}),
    "mask read from row 0": (wrong(mask_read_from_row_0), {"mask": "padding"}, {"one row unpadded"}),
    "bias in base two": (wrong(bias_in_base_two), {"mask": "padding"}, {"smallest mask"}),
    "no default scale": (find_kernel(no_default_scale), {}, {"default scale"}),
    "zero queries skipped": (wrong(zero_queries_skipped), {}, {"zero scores"}),
    "mask without gradient": (wrong(mask_without_gradient), {"phase": "train"}, {"gradient of the mask"}),
    "NaN hidden behind the softmax": (
        find_kernel(nan_hidden_behind_the_softmax),
        {"mask": "dead_rows", "phase": "train"},
        {"gradient of the mask"},
    ),
    "second thread scaled": (wrong(second_thread_scaled), {}, {"two threads"}),
    "NaN let through": (wrong(eager, shielded=False), {"mask": "causal"}, {"hidden NaN"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_seen_by_its_check_alone(name: str) -> None:
    kernel, axes, checks = WRONG[name]
    assert failed(kernel, **axes) == checks


def test_every_check_has_a_wrong_kernel() -> None:
    assert set().union(*(checks for _, _, checks in WRONG.values())) == set(metamorphic.CHECKS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["values clamped", "groups tiled", "causal top left", "NaN let through"])
def test_wrong_kernels_are_seen_in_every_dtype(name: str, dtype: str) -> None:
    kernel, axes, checks = WRONG[name]
    # In half precision the bare call may see it, too.
    assert failed(kernel, **axes, dtype=dtype) - {"half precision"} == checks


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_result_in_a_buffer_that_is_used_again_is_seen() -> None:
    buffers: dict[object, Tensor] = {}

    def reuses(q, k, v, call):
        out, _ = eager(q, k, v, call)
        return buffers.setdefault((out.shape, k.shape), torch.empty_like(out)).copy_(out), None

    verdict = found(wrong(reuses))["repeated call"]
    assert (verdict.status, verdict.reason) == ("mismatch", "a result was overwritten by later calls")


def test_memory_is_watched_at_the_cells_own_length() -> None:
    buffers: dict[object, Tensor] = {}

    def reuses_when_long(q, k, v, call):
        out, _ = eager(q, k, v, call)
        if k.shape[2] <= 64:
            return out, None
        return buffers.setdefault(out.shape, torch.empty_like(out)).copy_(out), None

    def writes_when_long(q, k, v, call):
        if k.shape[2] > 64:
            beside_the_view_written(q, k, v, call)
        return eager(q, k, v, call)

    assert "repeated call" in failed(wrong(reuses_when_long), seq_len=80)
    assert failed(wrong(writes_when_long), seq_len=80) == {"inputs untouched"}
    assert not failed(wrong(writes_when_long))


def test_long_cells_are_asked_at_a_bounded_length() -> None:
    question = make_question(make_case(seq_len=9000, heads=8), torch.Generator().manual_seed(0), at_length=True)
    assert question.k.shape[1:3] == (1, 2100) and question.q.shape[1:3] == (2, 2100)


def test_a_users_kernel_may_give_a_mask_no_gradient_but_not_a_wrong_one() -> None:
    user = wrong(mask_without_gradient, origin="my.py")
    assert found(user, phase="train")["gradient of the mask"].status == "skipped"

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, mask: Tensor) -> Tensor:
            return mask.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    def doubled(q, k, v, call):
        mask = None if call.bias is None else Doubled.apply(call.mask)
        return eager(q, k, v, dataclasses.replace(call, mask=mask))

    assert found(wrong(doubled, origin="my.py"), phase="train")["gradient of the mask"].status == "mismatch"


def test_a_copy_of_the_last_calls_output_is_seen() -> None:
    last: dict[object, Tensor] = {}

    def remembers(q, k, v, call):
        out, _ = eager(q, k, v, call)
        key = (out.shape, k.shape)
        stale, last[key] = last.get(key, out), out
        return stale.clone(), None

    assert "repeated call" in failed(wrong(remembers))


def test_a_result_in_an_inputs_memory_is_seen() -> None:
    verdict = found(wrong(lambda q, k, v, call: (q, None)))["inputs untouched"]
    assert (verdict.status, verdict.reason) == ("mismatch", "the result shares memory with q")


# ---- statuses --------------------------------------------------------------------------------------------------------


def test_a_users_kernel_may_delegate_and_may_ignore_dropout() -> None:
    user = dataclasses.replace(find_kernel("sdpa"), origin="my.py", delegates=False)
    verdict = found(user)["delegation"]
    assert (verdict.status, verdict.reason) == ("ok", "calls torch's scaled_dot_product_attention")
    assert found(find_kernel("sdpa"))["delegation"].status == "ok"
    assert found(dataclasses.replace(user, origin="harness"))["delegation"].status == "mismatch"
    assert found(wrong(dropout_ignored, origin="my.py"))["dropout"].status == "skipped"


def test_a_callable_is_a_users_kernel() -> None:
    assert found(find_kernel(wrong_kernels.plain))["delegation"].status == "ok"


def test_a_refused_call_is_skipped_unless_it_is_the_first() -> None:
    def only_causal(q, k, v, call):
        if call.mask is not None:
            raise Unsupported("no masks")
        return eager(q, k, v, call)

    verdicts = found(wrong(only_causal), mask="causal")
    skipped = {name: v.reason for name, v in verdicts.items() if v.status == "skipped"}
    with_masks = (
        "permuted keys",
        "large scores",
        "more queries than keys",
        "one row unpadded",
        "smallest mask",
        "dead rows",
    )
    assert skipped == dict.fromkeys(with_masks, "no masks")

    kernel = find_kernel("tests.wrong_kernels:refuses")
    assert [(n, v.status) for n, v in found(kernel).items()] == [("small call", "skipped")]


def test_what_a_kernel_raises_comes_out() -> None:
    raising = find_kernel("tests.wrong_kernels:raises")
    with pytest.raises(RuntimeError, match="no such tile"):
        found(dataclasses.replace(raising, origin="harness"))
    # A user's kernel may refuse what its own case does not ask for, and in whatever way.
    (refused,) = found(raising).values()
    assert refused.status == "skipped" and "RuntimeError: no such tile" in refused.reason
    with pytest.raises(ContractBroken, match="wrote into its input q"):
        found(find_kernel("tests.wrong_kernels:writes_q"))


def test_a_users_kernel_may_refuse_dropout_in_its_own_way() -> None:
    def no_dropout(q, k, v, dropout_p=0.0, **options):
        if dropout_p:
            raise NotImplementedError("no dropout")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    verdicts = found(find_kernel(no_dropout))
    assert verdicts["dropout"].status == "skipped" and "no dropout" in verdicts["dropout"].reason
    assert {v.status for n, v in verdicts.items() if n != "dropout"} == {"ok"}


def test_worse_rounding_is_degraded_not_a_mismatch() -> None:
    def rounded(q, k, v, call):
        weights = eager(q, k, v, dataclasses.replace(call, need_weights=True))[1]
        assert weights is not None
        mantissa, exponent = torch.frexp(weights)
        weights = torch.ldexp((mantissa * 2**21).round() / 2**21, exponent)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), None

    def in_bfloat16(q, k, v, call):
        return eager(q.bfloat16(), k.bfloat16(), v.bfloat16(), call)[0].float(), None

    assert {v.status for n, v in found(wrong(rounded)).items() if n != "dropout"} <= {"ok", "degraded"}
    assert found(wrong(in_bfloat16))["linear in v"].status == "mismatch"


def test_nan_never_passes() -> None:
    verdicts = found(find_kernel("tests.wrong_kernels:gives_nan"))
    assert verdicts["permuted keys"].status == "mismatch" and verdicts["permuted keys"].reason == "not finite"


# ---- the caller's state ----------------------------------------------------------------------------------------------


def test_calls_grad_mode_and_random_numbers_are_the_callers_own() -> None:
    pair = pair_of(find_kernel("eager"), mask="causal", phase="train")
    state = torch.get_rng_state()
    for _ in metamorphic.verdicts(pair, seed=1):
        assert torch.is_grad_enabled()
    assert pair.calls == 0 and torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again, other = (found(find_kernel("sdpa"), mask="alibi", seed=seed) for seed in (5, 5, 6))
    assert first == again != other
