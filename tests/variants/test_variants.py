"""MHA, MQA, GQA and MLA: one function, however the tokens arrive."""

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import harness
from harness.kernels.call import Kernel, Unsupported
from harness.kernels.eager import eager
from harness.variants.mla import Rope
from tests.support.attention import as_torch, assert_same, differentiated, draw_tokens, filled

E, H, S, B = 24, 4, 13, 2
MLA: dict[str, Any] = {"kv_lora_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 5}
BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mha": lambda **o: harness.MultiHeadAttention(E, H, **o),
    "mqa": lambda **o: harness.MultiQueryAttention(E, H, **o),
    "gqa": lambda **o: harness.GroupedQueryAttention(E, H, 2, **o),
    "gqa_wide": lambda **o: harness.GroupedQueryAttention(E, H, 2, head_dim=10, **o),
    "mla_naive": lambda **o: harness.MultiHeadLatentAttention(E, H, mode="naive", **MLA, **o),
    "mla_absorbed": lambda **o: harness.MultiHeadLatentAttention(E, H, mode="absorbed", **MLA, **o),
    "mla_auto": lambda **o: harness.MultiHeadLatentAttention(E, H, mode="auto", q_lora_rank=7, **MLA, **o),
}
tokens = functools.partial(draw_tokens, batch=B, length=S, width=E)
every_variant = pytest.mark.parametrize("name", BUILDERS)


def make(name: str, *, dtype: torch.dtype = torch.float64, bias: bool = True, **options: Any) -> Any:
    return filled(BUILDERS[name](bias=bias, **options), dtype, seed=3)


def in_pieces(module: Any, x: Tensor, lengths: list[int], *, capacity: int = 0, **rules: Any) -> tuple[Tensor, Any]:
    """The tokens in pieces through one cache; a mask is cut to the rows and keys of each piece."""
    cache = module.new_cache(capacity)
    mask = rules.pop("mask", None)
    parts = []
    for piece in x.split(lengths, dim=1):
        start, end = cache.length, cache.length + piece.shape[1]
        if mask is not None:
            rules["mask"] = mask.expand(*mask.shape[:2], x.shape[1], x.shape[1])[:, :, start:end, :end]
        parts.append(module(piece, cache=cache, **rules))
    assert cache.length == x.shape[1]
    return torch.cat(parts, dim=1), cache


@every_variant
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("lengths", [[S], [5, 8], [4, 4, 5], [9, 1, 1, 1, 1], [1] * S], ids=str)
@torch.no_grad()
def test_chunked_prefill_and_decode_equal_the_full_forward(name: str, bias: bool, lengths: list[int]) -> None:
    module, x = make(name, bias=bias), tokens()
    assert_same(lambda x: in_pieces(module, x, lengths, causal=True)[0], lambda x: module(x, causal=True), x)


@every_variant
@given(data=st.data())
@settings(max_examples=12)
def test_any_split_under_any_mask_equals_the_full_forward(name: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, S), label="length")
    cuts = data.draw(st.sets(st.integers(1, max(1, length - 1))), label="cuts")
    inner = sorted(c for c in cuts if c < length)
    bounds = [0, *inner, length]
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    rules: dict[str, Any] = {"causal": True}
    kind = data.draw(st.sampled_from(["causal", "window", "padding", "bool", "float"]), label="kind")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    if kind == "window":
        rules = {"causal": True, "window": data.draw(st.integers(1, length), label="W")}
    elif kind == "padding":
        valid = torch.randint(1, length + 1, (B, 1, 1, 1), generator=generator)
        rules["mask"] = torch.arange(length) < valid
    elif kind == "bool":
        rules["mask"] = torch.rand(B, H, length, length, generator=generator) < 0.7  # dead rows included
    elif kind == "float":
        rules["mask"] = torch.randn(B, H, length, length, generator=generator).double()
    module, x = make(name), tokens(length=length)
    with torch.no_grad():
        capacity = data.draw(st.sampled_from([0, length, 2 * length]), label="capacity")
        _, cache = in_pieces(module, x, lengths, capacity=capacity, **rules)
        assert_same(
            lambda x: in_pieces(module, x, lengths, capacity=capacity, **rules)[0], lambda x: module(x, **rules), x
        )
    held = sum(t.numel() for t in cache.streams())
    assert held == B * length * module.kv_elements_per_token()


class InPieces(nn.Module):
    """A variant fed through its cache, as a module that harness.check can copy and round."""

    def __init__(self, inner: Any, lengths: list[int]) -> None:
        super().__init__()
        self.inner, self.lengths = inner, lengths

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self.inner, x, self.lengths, causal=True)[0]


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decode_equals_the_full_forward_by_the_acceptance_rule(name: str, dtype: torch.dtype) -> None:
    module, x = make(name, dtype=dtype), tokens(dtype=dtype)
    whole = InPieces(make(name, dtype=dtype), [S])
    harness.assert_equivalent(InPieces(module, [6] + [1] * (S - 6)), whole, x)


@every_variant
@torch.no_grad()
def test_right_padding_leaves_the_valid_tokens_alone(name: str) -> None:
    module, x = make(name), tokens()
    valid = torch.tensor([S, 8])
    mask = torch.arange(S) < valid[:, None, None, None]  # (B, 1, 1, S)
    out = module(x, mask=mask, causal=True)
    for row, length in enumerate(valid.tolist()):
        part = (slice(row, row + 1), slice(length))
        assert_same(
            lambda x, part=part: module(x, mask=mask, causal=True)[part],
            lambda x, part=part: module(x[part], causal=True),
            x,
        )
    spoilt = x.clone()
    spoilt[1, 8:] = 1e3
    assert torch.equal(module(spoilt, mask=mask, causal=True)[1, :8], out[1, :8])


@every_variant
@torch.no_grad()
def test_left_padding_with_decode_leaves_the_valid_tokens_alone(name: str) -> None:
    """MLA's rotation is relative, so a shifted row gives what it gives unshifted."""
    module, x = make(name), tokens()
    skip = torch.tensor([0, 5])
    mask = torch.arange(S) >= skip[:, None, None, None]  # (B, 1, 1, S)

    def pieces(x: Tensor) -> Tensor:
        return in_pieces(module, x, [9, 1, 1, 1, 1], causal=True, mask=mask)[0]

    assert_same(pieces, lambda x: module(x, mask=mask, causal=True), x)
    for row, start in enumerate(skip.tolist()):
        part = (slice(row, row + 1), slice(start, None))
        assert_same(lambda x, part=part: pieces(x)[part], lambda x, part=part: module(x[part], causal=True), x)


@every_variant
@torch.no_grad()
def test_a_padded_query_that_sees_nothing_gives_the_output_bias(name: str) -> None:
    module, x = make(name), tokens()
    mask = torch.arange(S) >= torch.tensor([0, 5])[:, None, None, None]
    out = module(x, mask=mask, causal=True)
    assert torch.equal(out[1, :5], module.out_proj.bias.expand(5, E))


@every_variant
@torch.no_grad()
def test_batch_rows_are_independent(name: str) -> None:
    module, x = make(name), tokens(batch=3)
    out = module(x, causal=True)
    for row in range(3):
        part = slice(row, row + 1)
        assert_same(
            lambda x, part=part: module(x, causal=True)[part], lambda x, part=part: module(x[part], causal=True), x
        )
    other = x.clone()
    other[1] = float("nan")
    spoilt = module(other, causal=True)
    assert torch.equal(spoilt[0], out[0])
    assert torch.equal(spoilt[2], out[2])
    assert bool(spoilt[1].isnan().all())


@every_variant
@torch.no_grad()
def test_causal_hides_the_future_even_if_it_is_nan(name: str) -> None:
    module = make(name)
    nan = torch.full((B, S - 7, E), float("nan"), dtype=torch.float64)
    assert_same(
        lambda x: module(torch.cat((x[:, :7], nan), dim=1), causal=True)[:, :7],
        lambda x: module(x, causal=True)[:, :7],
        tokens(),
    )


@every_variant
def test_gradients_of_a_decode_equal_those_of_the_full_forward(name: str) -> None:
    module, x = make(name), tokens()
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole, pieces = (
        differentiated(InPieces(module, lengths), dict(module.named_parameters()), cotangent)
        for lengths in ([S], [5, 4, 1, 1, 2])
    )
    assert_same(pieces, whole, x)


@every_variant
@torch.no_grad()
def test_cropping_the_cache_takes_tokens_back(name: str) -> None:
    module = make(name)

    def rest(x: Tensor) -> Any:
        cache = module.new_cache(S)
        module(x[:, :6], causal=True, cache=cache)
        module(x[:, 6:9] + 1, causal=True, cache=cache)  # a draft that is rejected
        cache.crop(6)
        return module(x[:, 6:], causal=True, cache=cache)

    assert_same(rest, lambda x: module(x, causal=True)[:, 6:], tokens())


# Against torch, and against each other.


@torch.no_grad()
def test_mha_equals_torch_with_the_same_weights() -> None:
    ours, x = make("mha"), tokens()
    theirs = as_torch(ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj, heads=H)
    blocked = torch.ones(S, S, dtype=torch.bool).triu(1)  # torch: True = blocked
    padding = torch.arange(S) >= torch.tensor([[S], [9]])
    pairs: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {}),
        ({"attn_mask": blocked}, {"causal": True}),
        ({"attn_mask": blocked}, {"mask": ~blocked}),
        ({"key_padding_mask": padding}, {"mask": ~padding[:, None, None]}),
        ({"key_padding_mask": padding, "attn_mask": blocked}, {"mask": ~padding[:, None, None], "causal": True}),
    )
    for torch_rules, rules in pairs:
        assert_same(
            functools.partial(ours, need_weights=True, **rules),
            lambda x, rules=torch_rules: theirs(x, x, x, average_attn_weights=False, **rules),
            x,
        )


@torch.no_grad()
def test_gqa_with_as_many_kv_heads_as_heads_is_mha() -> None:
    mha, x = make("mha"), tokens()
    gqa = harness.GroupedQueryAttention(E, H, H, bias=True, dtype=torch.float64)
    gqa.load_state_dict(mha.state_dict())
    assert torch.equal(gqa(x, causal=True), mha(x, causal=True))


@pytest.mark.parametrize(("name", "kv_heads"), [("mqa", 1), ("gqa", 2)])
@torch.no_grad()
def test_gqa_equals_mha_with_each_kv_head_repeated(name: str, kv_heads: int) -> None:
    """repeat_interleave, not tile: query heads 0..G-1 share key/value head 0."""
    grouped, x = make(name), tokens()
    mha = make("mha")
    mha.q_proj.load_state_dict(grouped.q_proj.state_dict())
    mha.out_proj.load_state_dict(grouped.out_proj.state_dict())
    for part in ("k_proj", "v_proj"):
        for key, value in getattr(grouped, part).state_dict().items():
            heads = value.unflatten(0, (kv_heads, -1))
            getattr(getattr(mha, part), key).copy_(heads.repeat_interleave(H // kv_heads, 0).flatten(0, 1))
    assert_same(lambda x: grouped(x, causal=True), lambda x: mha(x, causal=True), x)
    if kv_heads == 2:
        wrong = grouped.k_proj.weight.unflatten(0, (2, -1)).repeat(2, 1, 1).flatten(0, 1)  # tiled
        mha.k_proj.weight.copy_(wrong)
        assert float((grouped(x, causal=True) - mha(x, causal=True)).abs().max()) > 1e-3


# Weights, dropout, kernels, copies.


@every_variant
@torch.no_grad()
def test_weights_are_probabilities_that_make_the_output(name: str) -> None:
    module, x = make(name), tokens()
    out, weights = module(x, causal=True, need_weights=True)
    assert weights.shape == (B, H, S, S)
    assert torch.equal(out, module(x, causal=True))
    # S quotients of one sum of S terms, summed again: at most S - 1 half roundings a sum, and one of each quotient.
    assert float((weights.sum(-1) - 1).abs().max()) <= S * torch.finfo(torch.float64).eps
    assert float(weights.triu(1).abs().max()) == 0.0

    def last(x: Tensor) -> Any:
        cache = module.new_cache()
        module(x[:, :-1], causal=True, cache=cache)
        return module(x[:, -1:], causal=True, cache=cache, need_weights=True)[1]

    assert_same(last, lambda x: module(x, causal=True, need_weights=True)[1][:, :, -1:], x)


@every_variant
@torch.no_grad()
def test_dropout_works_in_training_alone(name: str) -> None:
    p, x = 0.5, tokens()
    module, plain = make(name, dropout=p), make(name)
    assert torch.equal(module(x, causal=True), plain(x, causal=True))
    module.train()
    torch.manual_seed(0)
    dropped, weights = module(x, causal=True, need_weights=True)
    assert float((dropped - plain(x, causal=True)).abs().max()) > 1e-3
    torch.manual_seed(0)
    assert torch.equal(module(x, causal=True), dropped)
    # A weight is gone, or scaled up by 1 / (1 - p).
    _, kept = plain(x, causal=True, need_weights=True)
    gone = weights == 0

    def training_weights(x: Tensor) -> Any:
        torch.manual_seed(0)
        return module(x, causal=True, need_weights=True)[1]

    assert_same(
        training_weights, lambda x: plain(x, causal=True, need_weights=True)[1].masked_fill(gone, 0.0) / (1 - p), x
    )
    share = float((gone & (kept > 0)).sum() / (kept > 0).sum())
    assert 0.4 < share < 0.6


@torch.no_grad()
def test_mla_does_not_absorb_under_dropout() -> None:
    """Dropped weights do not sum to 1, so the value bias could not be restored: all modes take the naive way."""
    x, outs = tokens(), []
    naive = make("mla_naive", dropout=0.3)
    for name in ("mla_naive", "mla_absorbed"):
        module = make(name, dropout=0.3).train()
        module.load_state_dict(naive.state_dict())
        torch.manual_seed(0)
        outs.append(module(x, causal=True))
    assert torch.equal(*outs)


@every_variant
@torch.no_grad()
def test_sdpa_kernel_gives_the_same(name: str) -> None:
    eager_module, fused, x = make(name), make(name, kernel="sdpa"), tokens()
    for candidate in (InPieces(fused, [S]), InPieces(fused, [5, 7, 1])):
        assert_same(candidate, lambda x: eager_module(x, causal=True), x)
    with pytest.raises(Unsupported, match="no attention weights"):
        fused(x, need_weights=True)


@every_variant
def test_the_kernel_given_is_the_kernel_run(name: str) -> None:
    calls = []

    def counting(q: Tensor, k: Tensor, v: Tensor, call: Any) -> tuple[Tensor, Tensor | None]:
        calls.append(call)
        return eager(q, k, v, call)

    module = make(name, kernel=Kernel("counting", counting, gives_weights=True))
    module(tokens(), causal=True)
    assert len(calls) == 1
    assert calls[0].causal
    assert "counting" in repr(module)


@every_variant
@torch.no_grad()
def test_pickle_and_deepcopy_give_the_same_module(name: str) -> None:
    module, x = make(name), tokens()
    expected = module(x, causal=True)  # also fills what the module keeps between calls
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x, causal=True), expected)
        twin.out_proj.weight.zero_()
    assert torch.equal(module(x, causal=True), expected)
    fresh = make(name)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(x, causal=True), expected)


@every_variant
def test_trains_after_inference_mode(name: str) -> None:
    """What a module keeps between calls must not be an inference tensor."""
    module, x = make(name), tokens()
    with torch.inference_mode():
        expected = module(x, causal=True)
    out = module(x, causal=True)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())


@every_variant
def test_device_dtype_and_parameter_names(name: str) -> None:
    module: Any = BUILDERS[name](bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    out = module(torch.empty(2, 3, E, device="meta", dtype=torch.bfloat16), causal=True)
    assert out.shape == (2, 3, E)
    assert {"q_proj", "q_a_proj"} & {n.split(".")[0] for n, _ in module.named_parameters()}
    assert module.out_proj.out_features == E


@every_variant
@torch.no_grad()
def test_no_tokens_and_no_rows(name: str) -> None:
    module = make(name)
    assert module(tokens(batch=0), causal=True).shape == (0, S, E)
    assert_same(lambda x: module(x, causal=True), module, tokens(length=1))


# RoPE.


def test_rope_turns_interleaved_pairs() -> None:
    x = torch.randn(1, 1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def by_hand(x: Tensor) -> Tensor:
        turned = torch.empty_like(x)
        for token in range(6):
            for pair in range(2):
                angle = torch.tensor((token + 3) * 100.0 ** (-2 * pair / 4), dtype=torch.float64)
                a, b = x[0, 0, token, 2 * pair], x[0, 0, token, 2 * pair + 1]
                turned[0, 0, token, 2 * pair] = a * angle.cos() - b * angle.sin()
                turned[0, 0, token, 2 * pair + 1] = a * angle.sin() + b * angle.cos()
        return turned

    rope = Rope(4, theta=100.0)
    assert_same(lambda x: rope(x, start=3), by_hand, x)


def test_rope_scores_depend_on_distance_alone() -> None:
    rope = Rope(8)
    q, k = torch.randn(2, 1, 1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    near = rope(q, 0) @ rope(k, 0).mT
    far = rope(q, 1000) @ rope(k, 1000).mT
    # Angles of about 1000 are themselves rounded at 1000 eps.
    assert float((near - far).abs().max()) <= 1000 * 64 * torch.finfo(torch.float64).eps
    assert_same(lambda q: rope(q, 7).norm(dim=-1), lambda q: q.norm(dim=-1), q)


def test_rope_table_grows_with_positions_and_not_with_dtypes() -> None:
    rope = Rope(4)
    for step in range(20):  # a module moved between dtypes must not double its table each time
        dtype = torch.float64 if step % 2 else torch.float32
        assert rope(torch.zeros(1, 1, 16, 4, dtype=dtype), 0).dtype == dtype
    assert rope._table is not None
    assert rope._table[0].shape[0] == 16
    rope(torch.zeros(1, 1, 1, 4), 16)
    assert rope._table[0].shape[0] == 32
    far = rope(torch.ones(1, 1, 1, 4), 5000)
    assert torch.equal(far, Rope(4)(torch.ones(1, 1, 1, 4), 5000))


# Errors.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: harness.GroupedQueryAttention(32, 4, 3), r"num_kv_heads \(3\) must divide num_heads \(4\)"),
        (lambda: harness.GroupedQueryAttention(32, 4, 0), r"num_kv_heads \(0\) must divide num_heads \(4\)"),
        (lambda: harness.GroupedQueryAttention(32, 4, 8), r"num_kv_heads \(8\) must divide num_heads \(4\)"),
        (lambda: harness.GroupedQueryAttention(32, 0, 1), r"num_heads \(0\) must be at least 1"),
        (lambda: harness.MultiHeadAttention(30, 4), r"num_heads \(4\) must divide embed_dim \(30\)"),
        (lambda: harness.MultiHeadAttention(32, -4), r"num_heads \(-4\) must be at least 1"),
        (
            lambda: harness.MultiQueryAttention(32, 4, kernel="fast"),
            "unknown kernel 'fast'; known: auto, compiled",
        ),
        (lambda: BUILDERS["mla_auto"](kernel="fast"), "unknown kernel 'fast'"),
        (
            lambda: harness.MultiHeadLatentAttention(32, 4, **{**MLA, "rope_head_dim": 3}),
            "dim = 3: must be even",
        ),
        (
            lambda: harness.MultiHeadLatentAttention(32, 4, **{**MLA, "kv_lora_rank": 0}),
            "kv_lora_rank = 0: must be at least 1",
        ),
        (lambda: harness.MultiHeadLatentAttention(32, 0, **MLA), "num_heads = 0: must be at least 1"),
        (
            lambda: harness.MultiHeadLatentAttention(32, 4, q_lora_rank=0, **MLA),
            "q_lora_rank = 0: must be at least 1",
        ),
        (
            lambda: harness.MultiHeadLatentAttention(32, 4, **{**MLA, "mode": "fast"}),
            "mode = 'fast': must be auto, naive or absorbed",
        ),
    ],
)
def test_constructors_name_value_and_rule(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@every_variant
@torch.no_grad()
def test_calls_that_cannot_be_meant_are_refused(name: str) -> None:
    module, x = make(name), tokens()
    with pytest.raises(ValueError, match=r"mask \(3, 3\): must broadcast"):
        module(x, mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask torch.int64: must be bool"):
        module(x, mask=torch.ones(S, S, dtype=torch.int64))
    with pytest.raises(ValueError, match="window = 0: must be at least 1"):
        module(x, window=0)
    cache = module.new_cache()
    module(x, causal=True, cache=cache)
    with pytest.raises(ValueError, match="must be"):
        module(x[:1], causal=True, cache=cache)  # another batch than the cache's
    assert cache.length == S
    with pytest.raises(ValueError, match=f"length = {S + 1}: must be within"):
        cache.crop(S + 1)
