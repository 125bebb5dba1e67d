"""The block-sparse engine against SDPA under the expanded mask, and its selectors against textbook loops."""

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import harness
from harness.cell.approximate import Metrics
from harness.cell.regimes import SHAPES
from harness.kernels.blocksparse import engine
from harness.kernels.blocksparse.blocks import Blocks, batches, block_sight, covered, row_sight
from harness.kernels.blocksparse.engine import block_sparse
from harness.kernels.blocksparse.kernel import Sparge, TopBlocks, Window, choose
from harness.kernels.call import AttentionCall, Unsupported
from harness.kernels.front import find_kernel, make_call
from harness.kernels.names import BadOption

SMALL = Blocks(queries=16, keys=8)


def draw(L: int, S: int, *, heads: int = 4, kv_heads: int = 2, batch: int = 2, D: int = 16, D_v: int = 12,
         seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    q = scale * torch.randn(batch, heads, L, D, generator=g)
    k, v = torch.randn(batch, kv_heads, S, D, generator=g), torch.randn(batch, kv_heads, S, D_v, generator=g)
    return q, k, v


def element_mask(q: Tensor, k: Tensor, call: AttentionCall, keep: Tensor, blocks: Blocks) -> Tensor:
    """Written element by element: query i sees key j if the call allows it and their block is kept."""
    (B, H, L, _), S = q.shape, k.shape[2]
    rows = torch.tensor([i // blocks.queries for i in range(L)])
    columns = torch.tensor([j // blocks.keys for j in range(S)])
    shown = keep.expand(B, H, *keep.shape[2:])[:, :, rows][..., columns]
    allowed = call.allowed(q, k)
    return shown if allowed is None else shown & allowed


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: AttentionCall) -> Tensor:
    """SDPA; in float32 its dead rows may be anything, so they are put to 0 here."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=True)
    return torch.where(mask.any(-1, keepdim=True), out, 0.0)


CALLS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (10, 3)},
    "causal window": {"causal": True, "window": 20},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("L", "S"), [(48, 48), (37, 37), (5, 70), (61, 90)])
def test_the_engine_is_attention_under_the_expanded_map(name, L, S):
    q, k, v = draw(L, S)
    call = make_call(q, k, v, **CALLS[name])
    keep = torch.rand(2, 4, -(-L // 16), -(-S // 8), generator=torch.Generator().manual_seed(1)) < 0.5
    mask = element_mask(q, k, call, keep, SMALL)

    def candidate(q, k, v):
        return block_sparse(q, k, v, call, keep, blocks=SMALL)[0]

    found = harness.check(candidate, lambda q, k, v: dense(q, k, v, mask, call), (q, k, v))
    assert found.passed, found.table()


def test_the_engine_honours_masks_of_every_form():
    q, k, v = draw(37, 50)
    g = torch.Generator().manual_seed(2)
    padding = torch.rand(2, 1, 1, 50, generator=g) < 0.7
    per_head = torch.rand(2, 4, 37, 50, generator=g) < 0.5
    bias = torch.randn(37, 50, generator=g).masked_fill(torch.rand(37, 50, generator=g) < 0.2, -math.inf)
    keep = torch.rand(2, 4, 3, 7, generator=g) < 0.6
    for mask in (padding, per_head, bias):
        call = make_call(q, k, v, mask=mask, causal=True)
        shown = element_mask(q, k, call, keep, SMALL)
        full = shown if call.bias is None else call.bias.expand(2, 4, 37, 50).masked_fill(~shown, -math.inf)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=full, scale=call.scale, enable_gqa=True)
        expected = torch.where(shown.any(-1, keepdim=True), expected, 0.0)
        torch.testing.assert_close(block_sparse(q, k, v, call, keep, blocks=SMALL)[0], expected)


def test_the_engine_honours_starts_softcap_and_sinks():
    q, k, v = draw(20, 60)
    keep = torch.rand(2, 4, 2, 8, generator=torch.Generator().manual_seed(3)) < 0.7
    sinks = torch.tensor([0.5, -1, 2, 0])
    options: dict[str, Any] = {"causal": True, "q_start": torch.tensor([3, 31]), "softcap": 2.0, "sinks": sinks}
    call = make_call(q, k, v, **options)
    expected = harness.attention(q, k, v, mask=element_mask(q, k, call, keep, SMALL), kernel="eager", **options)
    torch.testing.assert_close(block_sparse(q, k, v, call, keep, blocks=SMALL)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_scored_wide(dtype):
    q, k, v = (t.to(dtype) for t in draw(40, 40, scale=8.0))
    out = harness.attention(q, k, v, causal=True, kernel="sparse?topk=1&block_q=16&block_k=8")
    expected = harness.attention(q.double(), k.double(), v.double(), causal=True, kernel="eager").to(dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)


def test_blocks_out_of_the_map_are_not_read():
    q, k, v = draw(32, 64)
    keep = torch.ones(1, 1, 2, 8, dtype=torch.bool)
    keep[..., 3] = False
    k[:, :, 24:32], v[:, :, 24:32] = math.nan, math.nan
    call = make_call(q, k, v)
    assert bool(block_sparse(q, k, v, call, keep, blocks=SMALL)[0].isfinite().all())


def test_dead_rows_are_0_without_a_second_computation(monkeypatch):
    q, k, v = draw(32, 32)
    mask = torch.ones(32, 32, dtype=torch.bool)
    mask[5] = False
    keep = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    monkeypatch.setattr(engine, "_by_eager", lambda *_: pytest.fail("computed again"))
    out = block_sparse(q, k, v, make_call(q, k, v, mask=mask), keep, blocks=SMALL)[0]
    assert bool((out[:, :, 5] == 0).all()) and bool((out[:, :, 6] != 0).all())


def test_an_overflow_of_the_sums_is_computed_again():
    q, k, v = draw(32, 32, D_v=16)
    v = v * (3e38 / v.abs().max())
    call = make_call(q, k, v)
    keep = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    expected = harness.attention(q, k, v, kernel="eager")
    torch.testing.assert_close(block_sparse(q, k, v, call, keep, blocks=SMALL)[0], expected)


# ---- exact at sparsity 0 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sparse?topk=1", "sparse?cdf=1", "sparse?topk=1&block_q=16&block_k=8"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("L", "S", "kv_heads"), [(200, 200, 4), (131, 131, 2), (1, 77, 1), (129, 200, 2)])
def test_keeping_all_is_dense_attention(kernel, causal, L, S, kv_heads):
    inputs = draw(L, S, kv_heads=kv_heads)
    mask = torch.ones(L, S, dtype=torch.bool).tril(S - L) if causal else None
    found = harness.check(
        lambda q, k, v: harness.attention(q, k, v, causal=causal, kernel=kernel),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        inputs,
    )
    assert found.passed, found.table()
    assert not find_kernel(kernel).approximate


@pytest.mark.parametrize("tau", [1.0, 0.9999999])
def test_a_cdf_near_one_loses_no_block_to_rounding(tau):
    q, k, _ = draw(64, 4096, heads=1, kv_heads=1, batch=1, scale=0.01)
    call = make_call(q, k, k)
    keep = Sparge(Blocks(16, 8), topk=None, cdf=tau)(q, k, call)
    assert int((~keep).sum(-1).max()) <= (0 if tau == 1.0 else 1)


# ---- no row is left with nothing -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    L=st.integers(1, 70), extra=st.integers(0, 40), causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    window=st.none() | st.integers(1, 40), padding=st.booleans(), seed=st.integers(0, 5),
    by=st.sampled_from(["topk", "cdf"]), threshold=st.floats(0, 1), sim=st.floats(-1, 1), sink=st.booleans(),
    smooth=st.booleans(), pv=st.none() | st.floats(0.001, 60),
)  # fmt: skip
def test_every_row_that_sees_a_key_gets_some(
    L, extra, causal, heads, window, padding, seed, by, threshold, sim, sink, smooth, pv
):
    options = f"{by}={threshold!r}&sim={sim!r}&sink={sink:d}&smooth={smooth:d}" + (f"&pv={pv!r}" if pv else "")
    q, k, v = draw(L, L + extra, heads=heads[0], kv_heads=heads[1], seed=seed, scale=4.0)
    mask = torch.rand(2, 1, 1, L + extra, generator=torch.Generator().manual_seed(seed)) < 0.5 if padding else None
    call = make_call(q, k, v, mask=mask, causal=causal, window=window)
    blocks = Blocks(8, 4)
    kernel = find_kernel(f"sparse?{options}&block_q=8&block_k=4")
    out = kernel.run(q, k, v, call)[0]
    assert bool(out.isfinite().all())
    chosen = {"topk": None, "cdf": None, by: threshold}
    selector = Sparge(blocks, sim=sim, sink=sink, smooth=smooth, **chosen)
    keep = choose(selector, q, k, call, blocks=blocks)
    sees = row_sight(q, k, call, blocks).expand(2, heads[0], L, -1)
    shown = element_mask(q, k, call, keep, blocks)
    assert torch.equal(shown.any(-1), sees.any(-1))
    if pv is None:  # where values are skipped a row may be 0 by choice
        assert torch.equal((out != 0).any(-1), sees.any(-1))


@pytest.mark.parametrize("selector", [Sparge(SMALL, topk=0.01), Sparge(SMALL, topk=None, cdf=0.1), TopBlocks(SMALL, 1)])
def test_the_own_block_is_kept_however_causality_is_spelt(selector):
    q, k, v = draw(40, 40, scale=3.0)
    causal = selector(q, k, make_call(q, k, v, causal=True))
    spelt = torch.ones(40, 40, dtype=torch.bool).tril()
    for mask in (spelt, spelt.expand(2, 1, 40, 40), torch.zeros(40, 40).masked_fill(~spelt, -torch.inf)):
        assert torch.equal(selector(q, k, make_call(q, k, v, mask=mask)).expand_as(causal), causal)
    own = block_sight(q, k, AttentionCall(scale=1.0, q_start=0, left=0, right=0), SMALL)
    assert bool((causal | ~own).all())
    step = selector(q[:, :, -1:], k, make_call(q[:, :, -1:], k, v, causal=True))
    assert bool(step[..., -1].all())  # a decode step sees all keys, and its own is the last


def test_as_many_blocks_are_kept_as_asked_for_where_one_takes_all_of_the_softmax():
    q, k, v = draw(16, 64, heads=1, kv_heads=1, scale=1.0)
    keep = Sparge(SMALL, topk=0.5)(q, k, make_call(q, k, v, scale=1e4))
    assert keep.sum(-1).unique().tolist() == [keep.shape[-1] // 2]


def test_locally_smooth_tokens_let_half_of_the_blocks_go():
    """What bench/sparse_study.py shows at 4096 tokens, without its clock."""
    generator = torch.Generator().manual_seed(0)
    make = SHAPES["locally_smooth"]
    q, k, v = (
        make(torch.randn(1, 2048, 128, generator=generator), generator).unflatten(-1, (2, 64)).transpose(1, 2)
        for _ in range(3)
    )
    kernel = find_kernel("sparse?topk=0.5")
    close = Metrics.of(harness.attention(q, k, v, kernel=kernel), harness.attention(q.double(), k.double(), v.double()))
    assert kernel.tally is not None and kernel.tally.take().sparsity >= 0.5
    assert close.rel_l1 <= 0.07


def test_covering_adds_only_what_orphans_need():
    q, k, _ = draw(32, 32, heads=1, kv_heads=1, batch=1)
    call = make_call(q, k, k, causal=True)
    nothing = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
    expected = [[True, True, False, False], [False, False, True, True]]
    assert covered(nothing, q, k, call, SMALL)[0, 0].tolist() == expected
    everything = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    assert covered(everything, q, k, call, SMALL)[0, 0].tolist() == [[True, True, False, False], [True] * 4]
    for_some = everything.clone()
    for_some[0, 0, 0, 0] = False  # queries 0 to 7 see no other block
    assert covered(for_some, q, k, call, SMALL)[0, 0].tolist() == [[True, True, False, False], [True] * 4]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    L=st.integers(1, 40), S=st.integers(1, 40), start=st.integers(0, 60) | st.just(torch.tensor([2, 50])),
    causal=st.booleans(), left=st.none() | st.integers(0, 20), right=st.none() | st.integers(0, 20),
)  # fmt: skip
def test_sight_is_what_the_call_allows(L, S, start, causal, left, right):
    q, k, _ = draw(L, S)
    call = AttentionCall(scale=1.0, q_start=start, causal=causal, left=left, right=right)
    allowed = call.allowed(q, k)
    seen = torch.ones(2, 1, L, S, dtype=torch.bool) if allowed is None else allowed.expand(2, 1, L, S)
    found = block_sight(q, k, call, SMALL).expand(2, 1, -1, -1)
    for a, b in itertools.product(range(found.shape[2]), range(found.shape[3])):
        block = seen[:, 0, 16 * a : 16 * a + 16, 8 * b : 8 * b + 8].flatten(1).any(1)
        assert torch.equal(found[:, 0, a, b], block)
    rows = row_sight(q, k, call, SMALL).expand(2, 1, -1, -1)
    for b in range(found.shape[3]):
        assert torch.equal(rows[:, 0, :, b], seen[:, 0, :, 8 * b : 8 * b + 8].any(-1))


@pytest.mark.parametrize("options", ["topk=0.1", "cdf=0.1&sim=0.3"])
def test_what_is_not_a_number_is_not_skipped(options):
    q, k, v = draw(32, 64)
    k[:, :, 41] = math.nan
    out = harness.attention(q, k, v, kernel=f"sparse?{options}&block_q=16&block_k=8")
    assert bool(out.isnan().all())  # as dense attention: every query sees that key


@pytest.mark.parametrize("kernel", ["sparse?topk=0.9", "sparse?topk=0.1", "sparse?cdf=0.99&sim=-0.1",
                                    "sparse_topk?count=4", "sparse_topk?count=1"])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_an_infinite_key_is_not_skipped(kernel, causal):
    q, k, v = draw(64, 64)
    q = q.abs()
    k[0, 0, 3, 0] = math.inf
    options: dict[str, Any] = {"causal": causal, "kernel": f"{kernel}&block_q=8&block_k=8"}
    out = harness.attention(q, k, v, **options)
    expected = harness.attention(q, k, v, causal=causal, kernel="eager")
    assert bool(expected[0, :2, 3:].isnan().all())
    assert torch.equal(out.isnan(), expected.isnan())
    finite = k.clone()
    finite[0, 0, 3, 0] = 0.0
    # Where nothing infinite is in play, the same blocks are chosen as ever.
    torch.testing.assert_close(out[1], harness.attention(q, finite, v, **options)[1])


# ---- what is hidden does not choose ----------------------------------------------------------------------------------

HIDDEN = ["sparse?topk=0.5", "sparse?topk=0.4&sim=0.1", "sparse?cdf=0.7&sim=0.1", "sparse?cdf=0.7&sim=0.1&smooth=0",
          "sparse_topk?count=3"]  # fmt: skip


@pytest.mark.parametrize("kernel", HIDDEN)
@pytest.mark.parametrize("filled", [0.0, 1e4, math.nan])
@pytest.mark.parametrize("form", ["padding", "per head", "bias"])
def test_what_is_behind_a_mask_chooses_nothing(kernel, filled, form):
    q, k, v = draw(70, 70, scale=3.0)
    mask = torch.ones(2, 4, 1, 70, dtype=torch.bool)
    mask[1, :, :, 41:] = False
    if form == "per head":  # which the other head of its group sees
        mask[0, 0, :, 11:14] = False
    given = mask[:, :1] if form == "padding" else mask
    given = torch.zeros(given.shape).masked_fill(~given, -math.inf) if form == "bias" else given
    options: dict[str, Any] = {"mask": given, "kernel": f"{kernel}&block_q=8&block_k=8"}
    expected = harness.attention(q, k, v, **options)
    k[1, :, 41:], v[1, :, 41:] = filled, filled
    assert torch.equal(harness.attention(q, k, v, **options), expected)
    if form == "per head" and "sparse?" in kernel:  # with sparse_topk a group's heads choose together
        k[0, 0, 11:14] = 1e4
        assert torch.equal(harness.attention(q, k, v, **options)[0, 0], expected[0, 0])


@pytest.mark.parametrize("kernel", HIDDEN[:-1])
def test_padding_is_as_if_it_were_not_there(kernel):
    """Also in how many blocks a share of them is."""
    q, k, v = (t.double() for t in draw(70, 70, scale=3.0))
    mask = torch.arange(70) < 41
    whole = find_kernel(f"{kernel}&block_q=8&block_k=8")
    short = find_kernel(f"{kernel}&block_q=8&block_k=8")
    padded = harness.attention(q, k, v, mask=mask, kernel=whole)
    torch.testing.assert_close(padded, harness.attention(q, k[:, :, :41], v[:, :, :41], kernel=short))
    assert whole.tally is not None and short.tally is not None
    found = whole.tally.take()
    assert found.skipped > 0
    assert (found.kept, found.visible) == dataclasses.astuple(short.tally.take())[:2]


def test_threads_and_batches_change_nothing(monkeypatch):
    """One block of queries at a time, or many, in one thread or two."""
    q, k, v = draw(100, 100, heads=6, kv_heads=3)
    keep = torch.rand(2, 6, 7, 13, generator=torch.Generator().manual_seed(5)) < 0.5
    keep[:, :, 2:5] = keep[:, :1, 2:3]  # neighbours and heads that keep the same keys
    call = make_call(q, k, v, causal=True)
    together = block_sparse(q, k, v, call, keep, blocks=SMALL)
    torch.testing.assert_close(together[0], dense(q, k, v, element_mask(q, k, call, keep, SMALL), call))
    monkeypatch.setattr(engine, "cache_bytes", lambda: 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        apart = block_sparse(q, k, v, call, keep, blocks=SMALL)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(apart[0], together[0])
    assert apart[1] == together[1]


# ---- selectors, as loops ---------------------------------------------------------------------------------------------


def textbook_sparge(q: Tensor, k: Tensor, *, causal: bool, topk: str | None, tau: float | None, sim: float, bq: int,
                    bk: int, sink: bool) -> list:  # fmt: skip
    """SpargeAttn's map for one head, in plain Python on float64 numbers."""
    L, S, D = q.shape[0], k.shape[0], q.shape[1]
    start = S - L
    k = k - k.mean(0)
    q_blocks = [q[a : a + bq] for a in range(0, L, bq)]
    k_blocks = [k[a : a + bk] for a in range(0, S, bk)]

    def alike(block):
        units = [row / row.norm() for row in block]
        pairs = [float(a @ b) for a in units for b in units]
        return sum(pairs) / len(pairs) > sim

    rows = []
    for a, q_block in enumerate(q_blocks):
        last = start + a * bq + len(q_block) - 1
        first = start + a * bq
        seen = [not causal or b * bk <= last for b in range(len(k_blocks))]
        k_alike = [alike(block) for block in k_blocks]
        scores = [float(q_block.mean(0) @ block.mean(0)) / math.sqrt(D) for block in k_blocks]
        usable = [b for b in range(len(k_blocks)) if seen[b] and k_alike[b]]
        kept = set()
        if usable:
            top = max(scores[b] for b in usable)
            weight = {b: math.exp(scores[b] - top) for b in usable}
            total = sum(weight.values())
            order = sorted(usable, key=lambda b: -weight[b])
            if tau is not None:
                running = 0.0
                for b in order:
                    running += weight[b] / total
                    if running > tau:
                        break
                    kept.add(b)
            else:
                assert topk is not None
                kept |= set(order[: int(Fraction(topk) * len(k_blocks))])
            kept.add(order[0])
        for b in range(len(k_blocks)):
            on_diagonal = causal and b * bk <= last and (b + 1) * bk > first
            if not k_alike[b] or not alike(q_block) or on_diagonal or (sink and b == 0):
                kept.add(b)
        rows.append([seen[b] and b in kept for b in range(len(k_blocks))])
    return rows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("topk", "tau", "sim", "sink"), [
    ("0.5", None, -0.1, False), ("0.29", None, 0.2, True), (None, 0.9, 0.15, False), (None, 0.6, -0.1, True),
])  # fmt: skip
@pytest.mark.parametrize(("L", "S"), [(64, 64), (45, 61)])
def test_sparge_chooses_as_the_textbook_says(causal, topk, tau, sim, sink, L, S):
    q, k, v = (t.double() for t in draw(L, S, D=4, scale=3.0))
    call = make_call(q, k, v, causal=causal)
    selector = Sparge(Blocks(8, 4), topk=None if topk is None else float(topk), cdf=tau, sim=sim, sink=sink)
    found = selector(q, k, call)
    for b in range(2):
        for h in range(4):
            expected = textbook_sparge(q[b, h], k[b, h // 2], causal=causal, topk=topk, tau=tau, sim=sim, bq=8, bk=4,
                                       sink=sink)  # fmt: skip
            assert found[b, h].tolist() == expected
    assert 0 < float(found.float().mean()) < 1


def test_a_share_of_the_blocks_is_not_rounded_down_by_its_binary_digits():
    q, k, v = draw(8, 400)
    keep = Sparge(Blocks(8, 4), topk=0.29)(q, k, make_call(q, k, v))  # 0.29 * 100 is 28.999…
    assert set(keep.sum(-1).flatten().tolist()) == {29}


@pytest.mark.parametrize("sink", [0, 10])
def test_the_window_keeps_blocks_within_reach(sink):
    q, k, v = draw(50, 50)
    call = make_call(q, k, v)
    found = Window(SMALL, window=9, sink=sink)(q, k, call)[0, 0]
    for a in range(found.shape[0]):
        for b in range(found.shape[1]):
            queries, keys = range(16 * a, min(16 * a + 16, 50)), range(8 * b, min(8 * b + 8, 50))
            near = any(abs(i - j) <= 9 for i in queries for j in keys) or any(j < sink for j in keys)
            assert bool(found[a, b]) == near


def test_top_blocks_are_the_group_s_best():
    q, k, v = draw(48, 64, scale=3.0)
    call = make_call(q, k, v)
    found = TopBlocks(SMALL, count=3)(q, k, call)
    for b in range(2):
        for h in range(2):
            for a in range(3):
                shares = torch.zeros(8)
                for head in (2 * h, 2 * h + 1):
                    mean = q[b, head, 16 * a : 16 * a + 16].mean(0)
                    scores = torch.stack([mean @ k[b, h, 8 * n : 8 * n + 8].mean(0) / 4 for n in range(8)])
                    shares += scores.softmax(0)
                best = set(shares.topk(3).indices.tolist())
                assert {n for n in range(8) if found[b, 2 * h, a, n]} == best
                assert torch.equal(found[b, 2 * h], found[b, 2 * h + 1])


# ---- values are skipped by the online softmax ------------------------------------------------------------------------


def textbook_pv(q: Tensor, k: Tensor, v: Tensor, threshold: float, bk: int) -> tuple[Tensor, int]:
    """Block after block with a running maximum, as a fused kernel does it."""
    high = torch.full((q.shape[0],), -math.inf, dtype=q.dtype)
    total, out, skipped = torch.zeros_like(high), torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype), 0
    for a in range(0, k.shape[0], bk):
        scores = q @ k[a : a + bk].T / math.sqrt(q.shape[1])
        local = scores.amax(1)
        new = torch.maximum(high, local)
        weights, fade = torch.exp(scores - new[:, None]), torch.exp(high - new)
        total, out = total * fade + weights.sum(1), out * fade[:, None]
        if float((local - new).max()) + threshold <= 0:
            skipped += 1
        else:
            out = out + weights @ v[a : a + bk]
        high = new
    return out / total[:, None], skipped


@pytest.mark.parametrize("threshold", [0.5, 3.0, 500.0])
def test_pv_skip_follows_the_online_softmax(threshold):
    q, k, v = (t.double() for t in draw(4, 64, heads=4, kv_heads=2, batch=1, scale=25.0))
    keep = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    out, count = block_sparse(q, k, v, make_call(q, k, v), keep, blocks=SMALL, pv=threshold)
    skipped = 0
    for h in range(4):
        expected, of_head = textbook_pv(q[0, h], k[0, h // 2], v[0, h // 2], threshold, 8)
        torch.testing.assert_close(out[0, h], expected)
        skipped += of_head
    assert count.pv_skipped == skipped
    assert (skipped > 0) == (threshold < 500)


def test_what_is_computed_again_skips_no_values():
    q, k, v = draw(4, 64, D_v=16, scale=25.0)
    keep = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    call = make_call(q, k, v)
    assert block_sparse(q, k, v, call, keep, blocks=SMALL, pv=0.5)[1].pv_skipped > 0
    v = v * (3e38 / v.abs().max())  # a sum overflows
    assert block_sparse(q, k, v, call, keep, blocks=SMALL, pv=0.5)[1].pv_skipped == 0


# ---- counting, options, refusals -------------------------------------------------------------------------------------


def test_blocks_are_counted():
    q, k, v = draw(64, 64, heads=2, kv_heads=2, batch=1)
    kernel = find_kernel("sparse?topk=0.25&block_q=16&block_k=16")
    harness.attention(q, k, v, kernel=kernel)
    tally = kernel.tally
    assert tally is not None
    count = tally.take()
    assert (count.kept, count.visible, count.total, count.skipped) == (2 * 4 * 1, 2 * 16, 2 * 16, 2 * 12)
    assert count.sparsity == 0.75
    harness.attention(q, k, v, causal=True, kernel=kernel)
    assert tally.calls == 1
    count = tally.take()
    assert (count.visible, count.total, tally.calls) == (2 * 10, 2 * 16, 0)
    assert count.sparsity == pytest.approx(1 - count.kept / 20)


@pytest.mark.parametrize("taken", [False, True])
def test_a_call_that_the_shield_repeats_is_counted_once(taken):
    """Also by who takes the count after each run of the kernel."""
    q, k, v = draw(64, 64, heads=2, kv_heads=2, batch=1)
    v[:, :, 40:] = math.nan
    mask = torch.arange(64) < 40
    kernel = find_kernel("sparse?topk=0.5&block_q=16&block_k=16")
    tally, runs, counts = kernel.tally, [], []
    assert tally is not None

    def run(*given):
        runs.append(kernel.run(*given))
        counts.extend([tally.take()] if taken else [])
        return runs[-1]

    for _ in range(2):
        harness.attention(q, k, v, mask=mask, kernel=dataclasses.replace(kernel, run=run))
    assert len(runs) == 4  # or nothing is tested here
    count = sum(counts, start=tally.take())
    assert (count.visible, count.total) == (2 * 2 * 4 * 3, 2 * 2 * 16)
    if not taken:
        harness.attention(q, k, v.nan_to_num(), mask=mask, kernel=kernel)
        assert (tally.calls, tally.take().visible) == (1, 2 * 4 * 3)


def test_each_look_up_counts_for_itself():
    one, other = find_kernel("sparse"), find_kernel("sparse")
    harness.attention(*draw(8, 8), kernel=one)
    assert one.tally is not None and other.tally is not None
    assert (one.tally.calls, other.tally.calls) == (1, 0)
    assert (one.name, find_kernel("sparse?topk=0.3").name) == ("sparse", "sparse?topk=0.3")
    assert find_kernel("eager").tally is None


@pytest.mark.parametrize(("name", "said"), [
    ("sparse?top=0.5", "no option 'top' (known: topk, cdf, sim"),
    ("sparse?topk=2", "topk = '2' must be a number from 0 to 1"),
    ("sparse?topk=nan", "topk = 'nan' must be a number"),
    ("sparse?topk=half", "topk = 'half' must be a number"),
    ("sparse?block_q=1.5", "block_q = '1.5' must be a whole number"),
    ("sparse?sink=maybe", "must be 0 or 1"),
    ("sparse?topk=0.5&pv=0", "pv = '0' must be a number above 0"),
    ("sparse_window?window=-1", "window = '-1' must be a whole number of at least 0"),
    ("sparse?topk=0.5&topk=0.6", "given twice"),
    ("sparse?topk=0.5&cdf=0.9", "either topk or cdf"),
    ("sparse?topk", "name?option=value"),
    ("sparse?", "name?option=value"),
    ("eager?topk=0.5", "no option 'topk' (known: none)"),
])  # fmt: skip
def test_bad_options_are_refused(name, said):
    with pytest.raises(BadOption) as refusal:
        find_kernel(name)
    assert said in str(refusal.value)
    assert name in str(refusal.value)


def test_what_is_not_supported_is_refused():
    q, k, v = draw(16, 16)
    for options in ({"dropout_p": 0.1}, {"return_weights": True}):
        with pytest.raises(Unsupported):
            harness.attention(q, k, v, kernel="sparse", **options)
    with pytest.raises(Unsupported, match="gradients"):
        harness.attention(q.requires_grad_(), k, v, kernel="sparse")
    with torch.no_grad():
        assert harness.attention(q, k, v, kernel="sparse").shape == (2, 4, 16, 12)


# ---- wrong engines are seen ------------------------------------------------------------------------------------------


def wrong_outputs(spoil: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    q, k, v = draw(48, 48, seed=7)
    call = make_call(q, k, v, causal=True)
    keep = torch.ones(2, 4, 3, 6, dtype=torch.bool)
    expected = dense(q, k, v, element_mask(q, k, call, keep, SMALL), call)
    if spoil == "drops a block":
        whole = batches
        monkeypatch.setattr(engine, "batches", lambda *given, **named: whole(*given, **named)[:-1])
    elif spoil == "ignores causal":
        call = dataclasses.replace(call, causal=False)
    elif spoil == "forgets the diagonal":
        keep = keep & ~torch.eye(3, dtype=torch.bool).repeat_interleave(2, 1)
    return block_sparse(q, k, v, call, keep, blocks=SMALL)[0], expected


@pytest.mark.parametrize("spoil", ["nothing", "drops a block", "ignores causal", "forgets the diagonal"])
def test_wrong_engines_are_caught(spoil, monkeypatch):
    out, expected = wrong_outputs(spoil, monkeypatch)
    assert torch.allclose(out, expected, atol=1e-5) == (spoil == "nothing")
