"""Kernels, drop-ins and variants under torch's transforms, beside torch's own; `bench/transforms.py` has the table."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import harness
from bench.transforms import TRANSFORMS, subjects
from harness.kernels.call import Unsupported

SLOW = ("compile", "fullgraph", "export", "dynamic", "make_fx")  # seconds each: a few rows of them below
ROWS = {f"{row.name}-{row.mask}": row for row in subjects()}


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of each size that it keeps
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name not in SLOW])
@pytest.mark.parametrize("row", ROWS)
def test_gives_what_torch_gives(row, transform):
    TRANSFORMS[transform](ROWS[row])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "transform"), [("gqa-causal", "dynamic"), ("mla-causal", "dynamic"), ("auto-bool", "make_fx")]
)
def test_records_any_length_and_no_branch_on_data(row, transform):
    TRANSFORMS[transform](ROWS[row])


FIRST = """
import torch, harness
q, k, v = (torch.randn(1, heads, length, 8) for heads, length in ((8, 1), (2, 4096), (2, 4096)))
one = torch.compile(lambda *qkv: harness.attention(*qkv, causal=True), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(one(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
"""


def test_one_graph_of_a_process_first_call_over_a_long_cache():
    subprocess.run([sys.executable, "-c", FIRST], check=True, timeout=300)


def hidden_nan():
    q, k, v = torch.randn(3, 3, 2, 2, 6, 8).unbind(0)
    k[:, :, :, 4:], v[:, :, :, 5] = torch.nan, torch.inf
    return q, k, v, torch.arange(6) < 4


@pytest.mark.parametrize("kernel", ["eager", "tiled", "grouped", "auto"])
def test_what_is_not_finite_behind_a_mask_stays_there_in_a_vmap_and_in_a_graph(kernel):
    q, k, v, mask = hidden_nan()
    expected = F.scaled_dot_product_attention(q, k[..., :4, :], v[..., :4, :])

    def attend(q, k, v):
        return harness.attention(q, k, v, mask=mask, kernel=kernel)

    torch.testing.assert_close(torch.vmap(attend)(q, k, v), expected)
    recorded = torch.fx.experimental.proxy_tensor.make_fx(attend)(*torch.randn(3, 2, 2, 6, 8).unbind(0))
    torch.testing.assert_close(recorded(q[0], k[0], v[0]), expected[0])


def test_a_position_may_be_a_number_of_a_graph():
    q, k, v = torch.randn(3, 2, 2, 6, 8).unbind(0)

    def attend(start):
        return harness.attention(q[:, :, :2], k, v, causal=True, q_start=start)

    starts = torch.tensor([0, 3, 4])
    torch.testing.assert_close(torch.vmap(attend)(starts), torch.stack([attend(int(start)) for start in starts]))


def test_a_graph_of_torch_fx_holds_a_kernel_by_its_name_alone():
    def attend(q, k, v):
        return harness.attention(q, k, v, kernel=F.scaled_dot_product_attention)

    with pytest.raises(Unsupported, match="by its name"):
        torch.fx.symbolic_trace(attend)


def test_what_a_graph_was_made_with_is_not_kept_in_the_module():
    from harness.variants.mla import MultiHeadLatentAttention

    module = MultiHeadLatentAttention(16, 2, kv_lora_rank=8, nope_head_dim=8, rope_head_dim=4, v_head_dim=8)
    x = torch.randn(1, 5, 16)
    torch.export.export(module, (x,))
    assert type(module(x)) is torch.Tensor
    assert module.rope is not None and module.rope._table is not None
    assert all(type(table) is torch.Tensor for table in module.rope._table)
