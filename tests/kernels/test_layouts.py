"""Kernels with signatures of their own: right ones are what SDPA is, wrong ones are caught, the rest is refused."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.candidate.compute import failure_of
from harness.candidate.examinee import InProcess
from harness.candidate.request import Request
from harness.cell.measure import measure
from harness.kernels.call import ContractBroken, Unsupported
from harness.kernels.domain import Domain, domain_of
from harness.kernels.front import find_kernel
from harness.kernels.layouts import find_layout, layout_names
from harness.kernels.layouts.layout import Adapted, SdpaCall, adapt
from harness.record import Record
from harness.suite.schema import Timing
from tests import layout_kernels
from tests.support import ROOT, called
from tests.support.attention import draw, make_case

FILE = ROOT / "tests" / "layout_kernels.py"
B, H, H_kv, D, D_v = 3, 4, 2, 8, 6


def function(name: str) -> Any:
    return adapt(getattr(layout_kernels, name))


def qkv(L: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = draw((B, H, L, D), (B, H_kv, S, D), (B, H_kv, S, D_v), dtype=torch.float64)
    return q, k, v


def lengths(S: int, *counts: int) -> Tensor:
    """(B, 1, 1, S): right padding."""
    return (torch.arange(S) < torch.tensor(counts)[:, None])[:, None, None]


def agrees(name: str, L: int, S: int, **options: Any) -> bool:
    """With SDPA, to float64's rounding; also the gradients of q, k and v."""
    leaves = [t.requires_grad_() for t in qkv(L, S)]
    q, k, v = leaves
    theirs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    mine = function(name)(*leaves, enable_gqa=True, **options)
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
    cotangent = draw(tuple(theirs.shape), dtype=torch.float64, seed=1)[0]
    pairs = [(mine, theirs)]
    pairs += zip(*(torch.autograd.grad(out, leaves, cotangent) for out in (mine, theirs)), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def lower_right(L: int, S: int) -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).tril(S - L)


def judged(name: str, **axes: Any) -> Record:
    kernel = find_kernel(getattr(layout_kernels, name))
    regimes = ["plain", "poison"]
    return measure(make_case(**axes), kernel, seed=0, regimes=regimes, timing=Timing(enabled=False))


def test_every_layout_is_named_like_its_file():
    assert layout_names() == ("bhld", "blhd", "paged", "varlen")
    for name in layout_names():
        layout = find_layout(name)
        assert layout.name == name and layout.about.startswith("f(q, ")
        assert Domain.of(**layout.limits).layout == "bhld"  # what it can express is said in SDPA's terms


def test_sdpas_own_layout_is_left_as_it_is():
    assert adapt(F.scaled_dot_product_attention) is F.scaled_dot_product_attention
    wrapped = adapt(F.scaled_dot_product_attention, Domain.of(dtypes="float64"))
    assert domain_of(wrapped) == Domain.of(dtypes=["float64"])
    tensors = qkv(3, 5)
    expected = F.scaled_dot_product_attention(*tensors, enable_gqa=True, scale=0.3)
    assert torch.equal(wrapped(*tensors, enable_gqa=True, scale=0.3), expected)


def test_what_is_adapted_is_not_adapted_again():
    once = function("flash")
    assert isinstance(once, Adapted) and adapt(once) is once and once.__name__ == "flash"
    assert find_kernel(once).domain == domain_of(once) == Domain.of(layout="blhd", masks=["none", "causal"])
    assert domain_of(function("paged")).decode_only and not domain_of(function("paged")).dropout


# Against SDPA


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("name", "L", "S", "options"),
    [
        ("flash", 5, 5, {}),
        ("flash", 5, 5, {"is_causal": True}),
        ("flash", 2, 7, {}),
        ("flash", 3, 7, {"attn_mask": lower_right(3, 7)}),
        ("flash", 3, 7, {"attn_mask": torch.zeros(3, 7).masked_fill(~lower_right(3, 7), float("-inf")).double()}),
        ("flash", 3, 7, {"attn_mask": torch.ones(1, 7, dtype=torch.bool)}),
        ("flash", 7, 3, {"attn_mask": lower_right(7, 3)}),
        ("packed", 5, 5, {}),
        ("packed", 5, 5, {"is_causal": True}),
        ("packed", 3, 7, {"is_causal": True}),
        ("packed", 7, 3, {"is_causal": True}),
        ("packed", 3, 7, {"attn_mask": lower_right(3, 7)}),
        ("packed", 5, 7, {"attn_mask": lengths(7, 7, 1, 4)}),
        ("packed", 5, 7, {"attn_mask": ~lengths(7, 0, 6, 4)}),
        ("packed", 7, 7, {"attn_mask": lengths(7, 7, 1, 4) & lower_right(7, 7)}),
        ("packed", 7, 7, {"attn_mask": lengths(7, 7, 0, 4)}),
        ("packed", 1, 9, {"attn_mask": lengths(9, 2, 9, 1)}),
        ("paged", 1, 70, {}),
        ("paged", 1, 16, {}),
        ("paged", 1, 1, {}),
        ("paged", 1, 70, {"attn_mask": lengths(70, 1, 70, 33)}),
        ("paged", 1, 70, {"attn_mask": ~lengths(70, 1, 69, 33)}),
        ("paged", 1, 70, {"attn_mask": lengths(70, 1, 0, 48)}),
        ("paged", 1, 9, {"is_causal": True}),
        ("paged_masked", 1, 70, {"attn_mask": lengths(70, 1, 70, 33)}),
    ],
)
def test_a_right_kernel_is_what_sdpa_is(name, L, S, options, scale):
    assert agrees(name, L, S, scale=scale, **options)


@pytest.mark.parametrize(
    ("name", "L", "S", "options"),
    [
        ("flash_top_left", 3, 7, {"attn_mask": lower_right(3, 7)}),
        ("packed_top_left", 3, 7, {"attn_mask": lower_right(3, 7)}),
        ("packed_one_key_more", 5, 7, {}),
        ("packed_one_key_more", 5, 7, {"attn_mask": lengths(7, 7, 1, 4)}),
        ("packed_as_one", 5, 5, {}),
        ("packed_as_one", 5, 5, {"is_causal": True}),
        ("paged_with_tail", 1, 70, {}),
        ("paged_in_order", 1, 70, {}),
        ("paged_without_table", 1, 70, {}),
        ("paged_next_page", 1, 70, {}),
        ("paged_last_key_lost", 1, 70, {}),
    ],
)
def test_a_wrong_kernel_is_not(name, L, S, options):
    assert not agrees(name, L, S, **options)


@pytest.mark.parametrize(
    ("name", "L", "S", "options", "said"),
    [
        ("flash", 3, 7, {"is_causal": True}, "layout blhd cannot express what this call hides"),
        ("flash", 5, 5, {"attn_mask": lengths(5, 5, 1, 4)}, "layout blhd cannot express what this call hides"),
        ("flash", 5, 5, {"attn_mask": torch.ones(5, 5)}, "a float mask that adds to the scores"),
        ("packed", 5, 5, {"attn_mask": lower_right(5, 5).T}, "layout varlen cannot express what this call hides"),
        ("packed", 5, 5, {"attn_mask": torch.rand(1, H, 1, 5) > 0.5}, "a mask that differs between heads"),
        ("paged", 2, 5, {}, "layout paged cannot express 2 queries"),
        ("paged", 1, 5, {"dropout_p": 0.5}, "layout paged cannot express dropout"),
        ("paged", 1, 5, {"attn_mask": torch.ones(1, 5)}, "a float mask that adds to the scores"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(name, L, S, options, said):
    with pytest.raises(Unsupported, match=said):
        function(name)(*qkv(L, S), enable_gqa=True, **options)


def test_a_mask_with_a_gradient_is_refused_even_if_it_only_hides():
    with pytest.raises(Unsupported, match="float mask"):
        function("flash")(*qkv(3, 3), attn_mask=torch.zeros(3, 3).requires_grad_(), enable_gqa=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flash_untransposed", f"kernel returned ({B}, {H}, 3, {D_v}) instead of ({B}, 3, {H}, {D_v})"),
        ("flash_with_lse", "kernel returned tuple instead of a tensor"),
    ],
)
def test_a_result_in_another_shape_is_not_taken_for_what_it_is_not(name, said):
    with pytest.raises(ContractBroken, match=re.escape(said)) as raised:
        function(name)(*qkv(3, 3), enable_gqa=True)
    assert failure_of(raised.value).kind == "contract"


@pytest.mark.parametrize(("name", "L"), [("flash", 5), ("packed", 5), ("paged", 1)])
@pytest.mark.parametrize("mode", ["no_grad", "inference", "compile", "thread"])
def test_a_kernel_is_asked_in_sdpas_terms_in_every_mode(name, L, mode):
    q, k, v = qkv(L, 5)
    examinee = InProcess(getattr(layout_kernels, name), name)
    reply = examinee.ask(Request(q, k, v, mode=mode))
    assert reply.failure is None and examinee.domain == domain_of(function(name))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(reply.out, expected, rtol=0, atol=1e-12)
    refused = examinee.ask(Request(q, k, v, mask=torch.ones(L, 5, dtype=torch.float64), mode=mode)).failure
    assert refused is not None and refused.kind == "refused" and "layout" in refused.message


# What the kernel gets


def prepared(layout: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return find_layout(layout).prepare(SdpaCall(q, k, v, **options))


def test_packed_sequences_have_their_own_lengths():
    q, k, v = qkv(4, 6)
    own = prepared("varlen", q, k, v, attn_mask=lengths(6, 6, 2, 3))
    packed_q, packed_k, _, starts_q, starts_k, longest_q, longest_k = own.args
    assert starts_q.tolist() == [0, 4, 8, 12] and starts_k.tolist() == [0, 6, 8, 11]
    assert starts_q.dtype == starts_k.dtype == torch.int32 and (longest_q, longest_k) == (4, 6)
    assert torch.equal(packed_q[4:8], q[1].transpose(0, 1)) and torch.equal(packed_k[8:11], k[2, :, :3].transpose(0, 1))


def test_padded_queries_are_not_the_kernels_under_a_causal_mask():
    q, k, v = qkv(6, 6)
    own = prepared("varlen", q, k, v, attn_mask=lengths(6, 6, 2, 3), is_causal=True)
    assert own.args[3].tolist() == own.args[4].tolist() == [0, 6, 8, 11] and own.kwargs["causal"] is True


def test_pages_are_shuffled_and_what_is_nobodys_is_poisoned():
    q, k, v = qkv(1, 70)
    own = prepared("paged", q, k, v, attn_mask=lengths(70, 70, 17, 1))
    _, k_pages, v_pages, table, seq_lens = own.args
    assert seq_lens.tolist() == [70, 17, 1] and table.shape == (3, 5) and table.dtype == torch.int32
    used = [table[0].tolist(), table[1, :2].tolist(), table[2, :1].tolist()]
    numbers = [*used[0], *used[1], *used[2]]
    assert len(set(numbers)) == 8 and numbers != sorted(numbers)
    unused = {*table[1, 2:].tolist(), *table[2, 1:].tolist()}
    assert len(unused) == 1 and not unused & set(numbers)
    for pages in (k_pages, v_pages):
        is_nan = pages.isnan().flatten(1).any(1)
        assert int(is_nan.sum()) == 3 and not is_nan[numbers].any() and not is_nan[list(unused)].any()
    assert torch.equal(k_pages[table[1, 1].item(), 0], k[1, :, 16])
    assert float(k_pages[table[1, 1].item(), 1:].abs().max()) > 50  # an earlier owner's


def test_packing_draws_none_of_torchs_random_numbers():
    state = torch.get_rng_state()
    prepared("paged", *qkv(1, 40))
    assert torch.equal(torch.get_rng_state(), state)


# In cells


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("flash", {"mask": "causal"}),
        ("flash", {"mask": "none", "variant": "gqa", "phase": "train"}),
        ("flash", {"mask": "causal", "variant": "mla", "phase": "decode"}),
        ("flash", {"mask": "causal", "dtype": "bfloat16"}),
        ("packed", {"mask": "padding", "seq_len": 20}),
        ("packed", {"mask": "causal_padding", "seq_len": 20, "phase": "train", "variant": "gqa"}),
        ("packed", {"mask": "causal", "phase": "decode"}),
        ("paged", {"mask": "causal", "phase": "decode", "seq_len": 40}),
        ("paged", {"mask": "padding", "phase": "decode", "seq_len": 40, "variant": "gqa"}),
        ("paged", {"mask": "sliding_window", "phase": "decode", "seq_len": 70, "variant": "mla"}),
        ("paged_masked", {"mask": "padding", "phase": "decode", "seq_len": 40}),
    ],
)
def test_right_kernels_are_ok_in_cells(name, axes):
    record = judged(name, **axes)
    assert record.status == "ok", record.error


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("flash_top_left", {"mask": "causal", "seq_len": 20}),  # the square call is right: seen where it comes in parts
        ("flash_untransposed", {"mask": "causal"}),
        ("packed_one_key_more", {"mask": "padding", "seq_len": 20}),
        ("packed_as_one", {"mask": "causal"}),
        ("paged_with_tail", {"mask": "causal", "phase": "decode", "seq_len": 40}),
        ("paged_in_order", {"mask": "causal", "phase": "decode", "seq_len": 70}),
        ("paged_without_table", {"mask": "causal", "phase": "decode", "seq_len": 40}),
        ("paged_next_page", {"mask": "causal", "phase": "decode", "seq_len": 40}),
        ("paged_last_key_lost", {"mask": "causal", "phase": "decode", "seq_len": 40}),
    ],
)
def test_wrong_kernels_are_not(name, axes):
    record = judged(name, **axes)
    assert record.status == "mismatch", record.error


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("flash", {"mask": "padding"}),
        ("packed", {"mask": "float_bias"}),
        ("paged", {"mask": "causal"}),
        ("paged", {"mask": "causal", "phase": "train"}),
    ],
)
def test_cells_that_a_layout_cannot_say_are_unsupported(name, axes):
    record = judged(name, **axes)
    assert record.status == "unsupported" and str(record.error).startswith("layout ")


# From the command line

CONFIG = """\
name: mine
timing: {enabled: false}
threads: 1
regimes: [plain]
battery: {enabled: false}
grid:
  {variant: [mha, gqa], embed_dim: 32, heads: 4, kv_heads: 2, seq_len: 20, mask: [causal, padding],
   phase: [prefill, decode]}
"""


def test_a_run_judges_each_kernel_as_it_is(tmp_path: Path, capsys):
    config, out = tmp_path / "c.yaml", tmp_path / "out"
    config.write_text(CONFIG)
    kernels = [f"{FILE}:{name}" for name in ("flash", "paged", "paged_with_tail")]
    result = called(capsys, "run", config, *(word for kernel in kernels for word in ("--kernel", kernel)), "--out", out)
    table = pd.read_csv(out / "results.csv")
    found = table.groupby(["kernel", "phase"])["status"].agg(lambda statuses: sorted(set(statuses)))
    assert [[found[kernel, phase] for phase in ("prefill", "decode")] for kernel in kernels] == [
        [["ok", "unsupported"], ["ok", "unsupported"]],  # no padding
        [["unsupported"], ["ok"]],
        [["unsupported"], ["mismatch"]],
    ]
    assert result.code == 1
