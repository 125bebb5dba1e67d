"""The tiled kernel equals SDPA and eager in float64, gradients included, however its tiles fall."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import harness
from harness.cell.peak import peak_bytes
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.kernels.front import make_call
from harness.kernels.tiled import run_tiled
from harness.kernels.tiles import DEFAULT_CACHE, Tiling, cache_bytes, choose_tiling, tiles

INF = float("inf")


def forced(rows: int, heads: int) -> Kernel:
    """The kernel with tiles of this size: small ones have many borders."""
    tiling = Tiling(rows, heads)
    return Kernel(f"tiled {rows}x{heads}", lambda q, k, v, call: (run_tiled(q, k, v, call, tiling), None))


def problem(B: int = 2, H: int = 4, H_kv: int = 2, L: int = 37, S: int = 37, *, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((H, L, 8), (H_kv, S, 8), (H_kv, S, 6))
    return tuple(torch.randn(B, *size, generator=generator) for size in sizes)


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], dict[str, Any], Tiling]:
    B, H_kv, G = (draw(st.integers(1, top)) for top in (2, 3, 3))
    L, S = draw(st.sampled_from([0, 1, 4, 5, 16, 17, 33])), draw(st.sampled_from([0, 1, 7, 16, 33, 40]))
    H, seed = H_kv * G, draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    options["window"] = draw(st.sampled_from([None, 1, 3, (2, 3), (-1, 2), (4, -1), (0, 0)]))
    starts = torch.randint(-4, S + 3, (B,), generator=generator)
    options["q_start"] = draw(st.sampled_from([None, 0, -3, 5, starts]))
    options["softcap"] = draw(st.sampled_from([None, None, 1.5]))
    options["scale"] = draw(st.sampled_from([None, 0.3]))
    if draw(st.booleans()):
        options["sinks"] = torch.randn(H, generator=generator).double()
    kind = draw(st.sampled_from(["none", "bool", "float", "float with -inf"]))
    if kind != "none":
        shape = [draw(st.sampled_from([1, size])) for size in (B, H, L, S)][draw(st.integers(0, 3)) :]
        blocked = torch.rand(shape, generator=generator) < 0.4
        bias = torch.randn(shape, generator=generator).double()
        masks = {"bool": ~blocked, "float": bias, "float with -inf": bias.masked_fill(blocked, -INF)}
        options["mask"] = masks[kind]
    qkv = tuple(t.double() for t in problem(B, H, H_kv, L, S, seed=seed))
    if draw(st.booleans()):
        qkv = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv)  # as projections give them
    return qkv, options, Tiling(draw(st.sampled_from([1, 3, 8, 64])), draw(st.integers(1, 3)))


@given(calls())
@settings(max_examples=150)
def test_equals_eager_in_float64_with_every_gradient(drawn):
    qkv, options, tiling = drawn
    q, k, v = qkv
    mask, sinks = options.get("mask"), options.get("sinks")
    leaves = [t for t in (q, k, v, mask, sinks) if t is not None and t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    call = make_call(q, k, v, **options)
    expected, found = eager(q, k, v, call)[0], run_tiled(q, k, v, call, tiling)
    with torch.no_grad():
        alone = run_tiled(q, k, v, call, tiling)
    assert torch.equal(alone, found)
    for e, f in zip((expected, *gradients(expected, leaves)), (found, *gradients(found, leaves)), strict=True):
        torch.testing.assert_close(f, e, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bias"])
@pytest.mark.parametrize("tile", [(5, 1), (16, 2), (64, 4)], ids=str)
def test_obeys_the_rule_against_sdpa(dtype, mask, tile):
    q, k, v = (t.to(dtype) for t in problem(H_kv=4))
    generator = torch.Generator().manual_seed(3)
    inputs = {"q": 3 * q, "k": k, "v": v}
    seen = torch.rand(2, 1, 37, 37, generator=generator) > 0.3
    seen[:, :, 5] = False  # a dead row: SDPA gives 0, too
    if mask == "bias":
        inputs["bias"] = torch.randn(1, 4, 37, 37, generator=generator).to(dtype)

    def candidate(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = harness.attention(
            q, k, v, mask=seen if mask == "bool" else bias, causal=mask == "causal", kernel=forced(*tile)
        )
        return out

    def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, seen if mask == "bool" else bias, is_causal=mask == "causal")

    harness.assert_equivalent(candidate, reference, inputs, gradients=True)


@pytest.mark.parametrize("tile", [(4, 1), (64, 4)], ids=str)
def test_half_types_are_scored_in_float32(tile):
    """And summed: a gradient that several tiles add to is rounded once."""
    q, k, v = ((8 * t).bfloat16().requires_grad_() for t in problem(L=64, S=64))
    found = harness.attention(q, k, v, causal=True, kernel=forced(*tile))
    expected = harness.attention(q, k, v, causal=True, kernel="eager")
    pairs = zip((found, *gradients(found, [q, k, v])), (expected, *gradients(expected, [q, k, v])), strict=True)
    for f, e in ((f.detach(), e.detach()) for f, e in pairs):
        # Both round the same float32 number to bfloat16, once.
        assert float((f - e).float().abs().max()) <= 2**-8 * float(e.float().abs().max())
        assert float((f != e).float().mean()) < 0.02


def test_nan_in_a_query_does_not_reach_values_hidden_from_it():
    q, k, v = problem(B=1)
    q[0, 0, 10] = float("nan")
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    call = make_call(q, k, v, causal=True)
    _, _, dv = gradients(run_tiled(q, k, v, call, Tiling(16, 2)), [q, k, v])
    assert bool(dv[0, 0, :11].isnan().all())
    assert bool(dv[0, 0, 11:].isfinite().all())
    assert bool(dv[0, 1].isfinite().all())


@pytest.mark.parametrize("tile", [(3, 1), (64, 2)], ids=str)
def test_each_batch_row_has_its_own_start(tile):
    q, k, v = problem(L=5, S=20)
    both = run_tiled(q, k, v, make_call(q, k, v, causal=True, q_start=torch.tensor([2, 11])), Tiling(*tile))
    for b, start in enumerate((2, 11)):
        seen = torch.arange(20) <= torch.arange(5)[:, None] + start
        expected = F.scaled_dot_product_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], seen, enable_gqa=True)
        torch.testing.assert_close(both[b : b + 1], expected, rtol=0, atol=1e-6)


def test_powers_of_two_lose_nothing_of_large_scores():
    """Exact scores far from 0 stay exact up to the maximum's subtraction, as in a softmax by exp."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 96, 64, generator=generator) for _ in range(3))
    q, k = q.mul(8).round().div(8), k.mul(8).round().div(8) + 16
    golden = harness.attention(q.double(), k.double(), v.double(), kernel="eager")

    def error(kernel: str) -> float:
        return float((harness.attention(q, k, v, kernel=kernel) - golden).abs().mean())

    assert error("tiled") <= 1.5 * error("sdpa")  # 12 times as much when scores times log2(e) are rounded first


@pytest.mark.parametrize("hiding", ["mask", "window", "start"])
def test_dead_rows_give_zero_with_gradient_zero(hiding):
    q, k, v = (t.requires_grad_() for t in problem(B=1, L=20, S=20))
    rows = torch.arange(20)
    hidings: dict[str, dict[str, Any]] = {
        "start": {"causal": True, "q_start": -7},
        "window": {"window": (2, 0), "q_start": 9},
        "mask": {"mask": (rows[:, None] % 3 != 1).expand(20, 20)},
    }
    options = hidings[hiding]
    dead = {"start": rows < 7, "window": rows + 9 > 21, "mask": rows % 3 == 1}[hiding]
    for tile in ((3, 1), (64, 2)):
        out = run_tiled(q, k, v, make_call(q, k, v, **options), Tiling(*tile))
        assert bool((out[:, :, dead] == 0).all())
        assert bool((out[:, :, ~dead] != 0).all())
        for g in torch.autograd.grad(out[:, :, dead].sum(), (q, k, v)):
            assert bool((g == 0).all())


def test_nothing_that_nobody_sees_is_computed():
    q, k, _ = problem(B=1, L=64, S=64)
    document = torch.arange(64) // 16

    def work(**options: Any) -> tuple[int, int]:
        found = list(tiles(q, k, make_call(q, k, k, **options), Tiling(16, 2)))
        area = sum((t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in found)
        return area, sum(z.hidden.numel() for t in found for z in t.zones)

    assert work() == (64 * 64, 0)
    assert work(causal=True) == (16 * 16 * (1 + 2 + 3 + 4), 4 * 16 * 15)  # only diagonal blocks need a mask
    assert work(mask=document[:, None] == document) == (4 * 16 * 16, 0)
    assert work(mask=(torch.arange(64) < 40)) == (64 * 40, 0)  # padding is cut off
    assert work(window=16, causal=True)[0] == 16 * 16 + 3 * 16 * 31


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_dropout_drops_the_same_weights_in_the_backward_pass(p):
    """Values that are the identity show the weights, and a product with the cotangent their gradient."""
    q, k = (torch.randn(1, 2, 48, 8, generator=torch.Generator().manual_seed(s)).double() for s in (1, 2))
    v = torch.eye(48, dtype=torch.float64).expand(1, 2, 48, 48).clone().requires_grad_()
    q, k = q.requires_grad_(), k.requires_grad_()
    torch.manual_seed(5)
    dropped = run_tiled(q, k, v, make_call(q, k, v, dropout_p=p), Tiling(7, 1))
    whole = eager(q, k, v, make_call(q, k, v))[0]
    kept = (dropped != 0).double()
    assert abs(float(1 - kept.mean()) - p) < 0.03  # 4,608 draws: five sigma
    expected = whole * kept / (1 - p) if p < 1 else whole * 0
    torch.testing.assert_close(dropped, expected, rtol=0, atol=1e-12)
    # By hand: the same weights through autograd.
    by_hand = (torch.softmax(q @ k.mT * 8**-0.5, -1) * kept * (1 / (1 - p) if p < 1 else 0.0)) @ v
    for f, e in zip(gradients(dropped, [q, k, v]), gradients(by_hand, [q, k, v]), strict=True):
        torch.testing.assert_close(f, e, rtol=0, atol=1e-12)
    torch.manual_seed(5)
    again = run_tiled(q, k, v, make_call(q, k, v, dropout_p=p), Tiling(7, 1))
    assert torch.equal(again, dropped)
    if p < 1:
        assert not torch.equal(run_tiled(q, k, v, make_call(q, k, v, dropout_p=p), Tiling(7, 1)), dropped)


def test_weights_are_eagers():
    q, k, v = problem()
    out, weights = harness.attention(q, k, v, causal=True, return_weights=True, kernel="tiled")
    expected = harness.attention(q, k, v, causal=True, return_weights=True, kernel="eager")
    assert torch.equal(out, expected[0])
    assert torch.equal(weights, expected[1])
    torch.testing.assert_close(harness.attention(q, k, v, causal=True, kernel="tiled"), out, rtol=0, atol=1e-6)


def test_meta_tensors_have_the_right_shape():
    q, k, v = (t.to("meta") for t in problem())
    assert harness.attention(q, k, v, causal=True, kernel="tiled").shape == (2, 4, 37, 6)


def test_a_mask_changed_before_the_backward_pass_is_noticed():
    q, k, v = (t.requires_grad_() for t in problem())
    mask = torch.ones(37, 37, dtype=torch.bool)
    out = harness.attention(q, k, v, mask=mask, kernel="tiled")
    mask[3] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- memory and tile sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_a_twentieth_of_all_scores(causal, monkeypatch):
    monkeypatch.setattr("harness.kernels.tiles.cache_bytes", lambda: 1 << 20)  # whatever this machine has
    q, k, v = (torch.randn(1, 8, 1024, 16) for _ in range(3))
    scores = 4 * 8 * 1024 * 1024
    with torch.no_grad():
        assert peak_bytes(lambda: harness.attention(q, k, v, causal=causal, kernel="tiled")) <= scores / 20
        assert peak_bytes(lambda: harness.attention(q, k, v, causal=causal, kernel="eager")) >= scores

    leaves = [t.requires_grad_() for t in (q, k, v)]

    def train() -> None:
        torch.autograd.grad(harness.attention(q, k, v, causal=causal, kernel="tiled").sum(), leaves)

    assert peak_bytes(train) <= scores / 10


def cache_folder(tmp_path, *caches: tuple[str, str, str]):
    for number, (level, kind, size) in enumerate(caches):
        index = tmp_path / f"index{number}"
        index.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (index / name).write_text(text + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        (
            [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "512K"), ("3", "Unified", "32M")],
            32 << 20,
        ),
        ([("1", "Data", "48K"), ("2", "Unified", "2048K")], 2 << 20),
        ([("1", "Instruction", "64K")], DEFAULT_CACHE),
        ([("3", "Unified", "")], DEFAULT_CACHE),
        ([], DEFAULT_CACHE),
    ],
)
def test_the_last_level_cache_is_read_from_the_system(tmp_path, caches, expected):
    assert cache_bytes(cache_folder(tmp_path, *caches)) == expected


@pytest.mark.parametrize("cache", [1 << 20, 8 << 20, 256 << 20])
@pytest.mark.parametrize(("H", "H_kv"), [(8, 8), (32, 8), (8, 1), (200, 1)])
@pytest.mark.parametrize("L", [1, 100, 512, 8192])
def test_tiles_fit_the_cache_or_have_the_fewest_rows(monkeypatch, cache, H, H_kv, L):
    monkeypatch.setattr("harness.kernels.tiles.cache_bytes", lambda: cache)
    q, k = (torch.empty(1, heads, L, 64, device="meta") for heads in (H, H_kv))
    for call in (AttentionCall(scale=1.0), AttentionCall(scale=1.0, causal=True)):
        tiling = choose_tiling(q, k, call)
        product_rows = tiling.rows * H // H_kv
        assert 1 <= tiling.heads <= H_kv and tiling.rows >= 1
        scores = 4 * tiling.heads * product_rows * L
        assert scores <= cache // 4 or (tiling.heads == 1 and product_rows <= max(64, H // H_kv))


# ---- what must see plain operations ----------------------------------------------------------------------------------


def test_transforms_of_torch_get_eager_s_lines():
    q, k, v = torch.randn(3, 1, 2, 600, 8)

    def attend(q: Tensor, kernel: str = "tiled") -> Tensor:
        return harness.attention(q, k, v, kernel=kernel)

    tangent = torch.ones_like(q)
    ours = torch.func.jvp(attend, (q,), (tangent,))[1]
    expected = torch.func.jvp(lambda q: attend(q, "eager"), (q,), (tangent,))[1]
    assert expected.norm() > 1
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.vmap(attend)(torch.stack([q, 2 * q]))[1], attend(2 * q, "eager"))
    torch.testing.assert_close(
        torch.func.grad(lambda q: attend(q).sum())(q), torch.func.grad(lambda q: attend(q, "eager").sum())(q)
    )


def test_scores_and_sums_near_the_largest_number():
    q, k = torch.full((1, 1, 600, 1), 1.7e19), torch.ones(1, 1, 600, 1)
    k[:, :, 0] = 1.7e19
    out = harness.attention(q, k, torch.ones(1, 1, 600, 1), scale=1.0, kernel="tiled")
    assert torch.equal(out, torch.ones_like(out))
    out = harness.attention(torch.zeros_like(q), k, torch.full((1, 1, 600, 1), 3e38), kernel="tiled")
    torch.testing.assert_close(out, torch.full_like(out, 3e38))


def test_dropout_is_drawn_alike_whatever_the_threads_and_the_cache(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 300, 8)

    def drawn(cache: int) -> Tensor:
        monkeypatch.setattr("harness.kernels.tiles.cache_bytes", lambda: cache)
        torch.manual_seed(3)
        return harness.attention(q, k, v, causal=True, dropout_p=0.3, kernel="tiled")

    assert torch.equal(drawn(1 << 16), drawn(1 << 26))


@pytest.mark.parametrize(("H", "D"), [(0, 8), (4, 0)])
def test_empty_shapes(H, D):
    q, k = torch.ones(1, H, 5, D), torch.ones(1, max(H // 2, 1), 5, D)
    out = harness.attention(q, k, torch.ones(1, max(H // 2, 1), 5, 3), scale=1.0, kernel="tiled")
    assert torch.equal(out, torch.ones(1, H, 5, 3))


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 3], indirect=True)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 9)}])
def test_threads_that_share_the_tiles_give_what_sdpa_gives(threads: int, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, heads, 700, 16) for heads in (6, 3, 3))
    out = harness.attention(q, k, v, kernel="tiled", **options)
    allowed = make_call(q, k, v, **options).allowed(q, k)
    golden = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=allowed, enable_gqa=True)
    torch.testing.assert_close(out.double(), golden, rtol=1e-5, atol=1e-6)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_two_callers_at_once_get_their_own_answers(threads: int) -> None:
    inputs = [torch.randn(1, 4, 600, 16) for _ in range(6)]
    expected = [F.scaled_dot_product_attention(x, x, x) for x in inputs]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda x: harness.attention(x, x, x, kernel="tiled"), inputs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_positions_that_go_on_before_the_backward_pass_do_not_change_it() -> None:
    q, k, v = (torch.randn(2, 2, 12, 8, requires_grad=True) for _ in range(3))
    wanted = torch.autograd.grad(harness.attention(q, k, v, causal=True, q_start=torch.tensor([0, 3])).sum(), (q, k, v))
    start = torch.tensor([0, 3])
    out = run_tiled(q, k, v, make_call(q, k, v, causal=True, q_start=start), Tiling(4, 1))
    start += 5
    for found, expected in zip(torch.autograd.grad(out.sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(found, expected)
