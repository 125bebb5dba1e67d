"""The references agree with each other, with transformers, and with plain formulas: what judges must be right."""

import functools
import importlib
import itertools
import math
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness.references
from harness.case import Case
from harness.cell.build import build_pair, steps_of
from harness.cell.draws import fast_path_off
from harness.cell.side import Side, run_steps
from harness.kernels.front import find_kernel
from harness.references import Reference, sdpa, torch_mha
from harness.references.sdpa import StaticKV
from harness.references.sdpa_mla import ExpandedMLA, rotate_pairs
from harness.variants.masks import MASKS, dense, positions
from harness.variants.specs import VARIANTS
from tests.support.attention import as_torch, assert_same, draw_tokens, filled, make_case

E, H, S, B = 24, 4, 9, 2
EPS = torch.finfo(torch.float64).eps
case_of = functools.partial(make_case, embed_dim=E, heads=H, seq_len=S, batch=B, mask="none", dtype="float64")
tokens = functools.partial(draw_tokens, batch=B, length=S, width=E)
every_mask = pytest.mark.parametrize("mask", list(MASKS))


def dense_of(case: Case, queries: range = range(S), keys: range = range(S)) -> Tensor | None:
    at = positions(case.batch, case.heads, queries, keys, case.seq_len)
    return dense(MASKS[case.mask], at, torch.float64)


def is_plain_causal(case: Case) -> bool:
    return case.mask == "causal"


# Each other.


@every_mask
@torch.no_grad()
def test_sdpa_module_equals_torch_mha_with_the_same_weights(mask: str) -> None:
    """Two independent ways, two mask conventions, one result: once torch's fast path, which misreads masks, is off."""
    case = case_of("mha", mask=mask)
    module, x = filled(sdpa.build(case)), tokens()
    theirs = as_torch(module.wq, module.wk, module.wv, module.wo, heads=H)
    mask_tensor, plain = dense_of(case), is_plain_causal(case)
    view, their_view = sdpa.view(case, mask_tensor, plain), torch_mha.view(case, mask_tensor, plain)

    def expected(x: Tensor) -> Tensor:
        with fast_path_off():
            return torch_mha.REFERENCE.run(theirs, x, their_view, None, False)[0]

    assert_same(lambda x: sdpa.REFERENCE.run(module, x, view, None, False)[0], expected, x)
    assert bool(expected(x).isfinite().all())


@every_mask
@torch.no_grad()
def test_torch_mha_gets_true_for_blocked(mask: str) -> None:
    """Its weights, by loops over plain numbers: 0 exactly where the mask blocks, biased where it has a bias."""
    case = case_of("mha", mask=mask)
    module, x = filled(torch_mha.build(case)), tokens()
    table = dense_of(case)
    view = torch_mha.view(case, table, is_plain_causal(case))
    _, weights = torch_mha.REFERENCE.run(module, x, view, None, True)
    assert weights is not None
    assert weights.shape == (B, H, S, S)
    scale = (E // H) ** -0.5
    entries = None if table is None else table.expand(B, H, S, S).tolist()

    def by_loops(x: Tensor) -> Tensor:
        q, k, _ = (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, dim=-1)
        expected = torch.full((B, H, S, S), math.nan, dtype=torch.float64)  # torch's own policy: which is why 0 is ours
        for b, h, i in itertools.product(range(B), range(H), range(S)):
            channels = slice(h * E // H, (h + 1) * E // H)
            scores = []
            for j in range(S):
                score = float(q[b, i, channels] @ k[b, j, channels]) * scale
                entry = 0.0 if entries is None else entries[b][h][i][j]
                if isinstance(entry, bool):
                    score = score if entry else -math.inf
                else:
                    score += entry
                scores.append(score)
            top = max(scores)
            if top > -math.inf:
                exponentials = [math.exp(score - top) for score in scores]
                expected[b, h, i] = torch.tensor([e / sum(exponentials) for e in exponentials], dtype=torch.float64)
        return expected

    assert_same(lambda x: torch_mha.REFERENCE.run(module, x, view, None, True)[1], by_loops, x)
    expected = by_loops(x)
    assert torch.equal(weights == 0, expected == 0)
    assert torch.equal(weights.isnan(), expected.isnan())


@pytest.mark.parametrize("variant", ["mqa", "gqa"])
@every_mask
@torch.no_grad()
def test_grouped_reference_equals_a_loop_over_heads(variant: str, mask: str) -> None:
    case = case_of(variant, mask=mask, head_dim=5)
    assert case.kv_heads is not None
    module, x = filled(sdpa.build(case)), tokens()
    table = dense_of(case)
    group = H // case.kv_heads

    def by_heads(x: Tensor) -> Tensor:
        heads = []
        for h in range(H):
            mine, theirs = slice(5 * h, 5 * h + 5), slice(5 * (h // group), 5 * (h // group) + 5)
            scores = module.wq(x)[..., mine] @ module.wk(x)[..., theirs].mT * 5**-0.5
            if table is not None:
                entry = table.expand(B, H, S, S)[:, h]
                scores = scores.masked_fill(~entry, -math.inf) if entry.dtype == torch.bool else scores + entry
            heads.append(torch.softmax(scores, dim=-1).nan_to_num(0.0) @ module.wv(x)[..., theirs])
        return module.wo(torch.cat(heads, dim=-1))

    view = sdpa.view(case, table, is_plain_causal(case))
    assert_same(lambda x: sdpa.REFERENCE.run(module, x, view, None, False)[0], by_heads, x)


# The masks as each reference takes them.


@every_mask
def test_views_mean_the_dense_mask(mask: str) -> None:
    case = case_of("mha", mask=mask)
    table, plain = dense_of(case), is_plain_causal(case)
    view = torch_mha.view(case, table, plain)
    given = view["attn_mask"]
    if table is None:
        assert given is None
        assert view["is_causal"] is False
        return
    assert view["is_causal"] is plain
    assert given.dtype == table.dtype
    assert given.is_contiguous()
    full = table.expand(B, H, S, S)
    blocked = ~full if table.dtype == torch.bool else full
    if given.ndim == 2:
        assert torch.equal(given.expand(B, H, S, S), blocked)
    else:
        assert given.shape == (B * H, S, S)
        for b in range(B):
            for h in range(H):
                assert torch.equal(given[b * H + h], blocked[b, h])  # batch is the slow axis
    seen = sdpa.view(case, table, plain)
    if plain:
        assert seen == {"attn_mask": None, "is_causal": True}
        assert torch.equal(full, torch.ones(S, S, dtype=torch.bool).tril().expand(B, H, S, S))
    else:
        assert seen["attn_mask"] is table
        assert seen["is_causal"] is False


@pytest.mark.parametrize("variant", ["mha", "gqa", "mla", "block_post_ln", "block_mla"])
@every_mask
@torch.no_grad()
def test_reference_and_candidate_get_the_same_mask(variant: str, mask: str) -> None:
    """The dense form on one side, structure and remainder on the other: the outputs say whether they mean the same."""
    pair = build_pair(case_of(variant, mask=mask), find_kernel("eager"), seed=0)

    def run(side: Side, x: Tensor) -> Tensor:
        with fast_path_off():
            return side.forward(side.module, x, side.views[0], None, False)[0]

    assert_same(functools.partial(run, pair.candidate), functools.partial(run, pair.reference), tokens())


# Decode.


@pytest.mark.parametrize("variant", ["mha", "mqa", "gqa", "mla"])
@every_mask
@torch.no_grad()
def test_static_cache_decode_equals_the_full_forward(variant: str, mask: str) -> None:
    case = case_of(variant, mask=mask, phase="decode")
    pair = build_pair(case, find_kernel("eager"), seed=0)
    x = tokens()
    steps = steps_of(case)
    assert [len(queries) for queries, _ in steps] == [5, 1, 1, 1, 1]
    assert steps[-1] == (range(S - 1, S), range(S))
    _, cache = run_steps(pair.reference, pair.steps, x)
    assert isinstance(cache, StaticKV)
    assert cache.length == S
    # A mask that is not causal cannot show a step the tokens that have not come yet.
    arrived = torch.cat([(torch.arange(S) < keys.stop).expand(len(queries), S) for queries, keys in steps])
    table = dense_of(case)
    if table is None or table.dtype == torch.bool:
        whole = arrived if table is None else arrived & table
    else:
        whole = table.masked_fill(~arrived, -math.inf)

    def stepwise(x: Tensor) -> Tensor:
        return run_steps(pair.reference, pair.steps, x)[0]

    assert_same(stepwise, lambda x: pair.reference.module(x, attn_mask=whole), x)
    assert_same(lambda x: run_steps(pair.candidate, pair.steps, x)[0], stepwise, x)


def test_static_cache_holds_crops_and_refuses_what_does_not_fit() -> None:
    cache = StaticKV(4)
    k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6)
    cache.update(k[:, :, :3], v[:, :, :3])
    with pytest.raises(ValueError, match="5 tokens: the capacity is 4"):
        cache.update(k[:, :, :2], v[:, :, :2])
    cache.crop(2)
    held_k, held_v = cache.update(k[:, :, 2:], v[:, :, 2:])
    assert torch.equal(held_k, k)
    assert torch.equal(held_v, v)
    with pytest.raises(ValueError, match="5 tokens: the capacity is 4"):
        cache.update(k[:, :, :1], v[:, :, :1])  # one token would fit an empty slice without an error
    assert cache.length == 4


def test_torch_mha_refuses_a_cache() -> None:
    module = filled(torch_mha.build(case_of("mha")))
    with pytest.raises(AssertionError, match="no KV cache"):
        torch_mha.REFERENCE.run(module, tokens(), {"attn_mask": None, "is_causal": False}, StaticKV(S), False)


# MLA.


@pytest.mark.parametrize("start", [0, 3, 1000])
def test_reference_rope_turns_pairs(start: int) -> None:
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate_pairs(x, torch.arange(start, start + 3))
    for token in range(3):
        for pair in range(3):
            angle = (start + token) / 10_000 ** (2 * pair / 6)
            a, b = x[0, 1, token, 2 * pair].item(), x[0, 1, token, 2 * pair + 1].item()
            expected = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
            found = turned[0, 1, token, 2 * pair : 2 * pair + 2]
            # An angle of t radians is itself known to t eps.
            assert float((found - torch.tensor(expected, dtype=torch.float64)).abs().max()) <= 8 * (1 + start) * EPS
    assert rotate_pairs(x.to(torch.bfloat16), torch.arange(start, start + 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("q_rank", [None, 7], ids=["q", "q_lora"])
@torch.no_grad()
def test_expanded_mla_equals_transformers(q_rank: int | None) -> None:
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    case = case_of("mla", q_lora_rank=q_rank, bias=False, kv_lora_rank=10, rope_head_dim=4, v_head_dim=5)
    ours: Any = filled(ExpandedMLA(case))
    config = DeepseekV3Config(
        hidden_size=E,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=q_rank,
        kv_lora_rank=10,
        qk_nope_head_dim=case.head_dim,
        qk_rope_head_dim=4,
        v_head_dim=5,
        num_hidden_layers=1,
        vocab_size=8,
    )
    config._attn_implementation = "sdpa"
    theirs = DeepseekV3Attention(config, layer_idx=0).double().eval()
    names = {"wq": "q_proj", "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj", "wo": "o_proj"}
    names |= {"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj"}
    theirs.load_state_dict({f"{names[k.partition('.')[0]]}.weight": v for k, v in ours.state_dict().items()})
    for name in ("q_a_layernorm", "kv_a_layernorm"):  # transformers norms in float32, whatever the dtype
        if (norm := getattr(theirs, name)) is not None:
            exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
            exact.load_state_dict(norm.state_dict())
            setattr(theirs, name, exact)
    angles = torch.outer(torch.arange(S).double(), 10_000.0 ** (-torch.arange(0, 4, 2).double() / 4))
    both = torch.cat((angles, angles), dim=-1)[None]
    causal, x = torch.ones(S, S, dtype=torch.bool).tril()[None, None], tokens()

    def expected(x: Tensor) -> Tensor:
        return theirs(x, (both.cos(), both.sin()), causal)[0]

    def their_steps(x: Tensor) -> tuple[Tensor, ...]:
        cache = DynamicCache()
        return tuple(
            theirs(
                x[:, rows],
                (both.cos()[:, rows], both.sin()[:, rows]),
                causal[:, :, rows, : rows.stop],
                past_key_values=cache,
            )[0]
            for rows in steps
        )

    def our_steps(x: Tensor) -> tuple[Tensor, ...]:
        cache = StaticKV(S)
        return tuple(ours(x[:, rows], attn_mask=causal[:, :, rows, : rows.stop], past=cache) for rows in steps)

    steps = [slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 9)]
    assert_same(lambda x: ours(x, is_causal=True), expected, x)
    assert_same(our_steps, their_steps, x)
    assert_same(our_steps, lambda x: tuple(expected(x)[:, rows] for rows in steps), x)


# The registry of references.


def test_every_reference_is_named_for_its_file_and_needs_nothing_of_the_candidates() -> None:
    files = [m.name for m in pkgutil.iter_modules(harness.references.__path__)]
    assert {"sdpa", "sdpa_mla", "torch_mha", "torch_encoder_layer", "mla_block"} <= set(files)
    for name in files:
        module = importlib.import_module(f"harness.references.{name}")
        reference: Reference = module.REFERENCE
        assert reference.name == name
        origins = {getattr(value, "__module__", "") or "" for value in vars(module).values()}
        shared = [o for o in origins if o.startswith(("harness.kernels", "harness.variants", "harness.variants.cache"))]
        assert shared == []  # sharing code is sharing bugs


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_has_a_reference_in_every_phase(variant: str) -> None:
    spec = VARIANTS[variant]
    for phase in spec.phases:
        case = case_of(variant, phase=phase)
        pair = build_pair(case, find_kernel("eager"), seed=0)
        assert pair.reference_name == spec.reference(case)
        assert (phase != "decode") or pair.reference.new_cache is not None
        golden = pair.reference.in_float64()
        assert {p.dtype for p in golden.module.parameters()} == {torch.float64}
        # Random everywhere: zero biases and unit norms would hide what they should reveal.
        for name, parameter in pair.reference.module.named_parameters():
            assert float(parameter.detach().std()) > 0.05, name
