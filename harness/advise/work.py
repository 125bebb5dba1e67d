"""What a decode step of one layer does, as parts that each read something once. No torch, no machine."""

from dataclasses import dataclass, replace

from harness.advise.candidates import Candidate
from harness.case import Case
from harness.specs.grouped import grouped_kv_elements, grouped_params
from harness.specs.latent import latent_params


@dataclass(frozen=True, slots=True)
class Shape:
    """What sets the pace of a product, its size left out: few rows times much data.

    linear     `rows` tokens times a weight matrix
    per_head   the same with `heads` small matrices (`width`, `value`): into latent space and back
    attention  `rows` queries for each of `heads` key/value heads, keys of `width` and values of `value` channels
    """

    kind: str
    rows: int
    heads: int = 1
    width: int = 0
    value: int = 0
    latent: bool = False  # values are the first channels of the keys


@dataclass(frozen=True, slots=True)
class Part:
    shape: Shape
    bytes: int  # held: what is read, each byte counted once


def decode_parts(candidate: Candidate, *, batch: int, keys: int) -> tuple[Part, ...]:
    """`batch` sequences, one new token each, over `keys` cached tokens."""
    case = replace(candidate.case, batch=batch, seq_len=keys)
    return _latent(case) if case.kv_lora_rank is not None else _grouped(case)


def _grouped(case: Case) -> tuple[Part, ...]:
    B, H, D = case.batch, case.heads, case.head_dim
    assert case.kv_heads is not None
    weights = grouped_params(case.embed_dim, H, case.kv_heads, D, bias=False)
    cached = B * case.kv_len * grouped_kv_elements(case.kv_heads, D)
    return (
        Part(Shape("linear", B), weights * case.item_bytes),
        Part(Shape("attention", H // case.kv_heads, B * case.kv_heads, D, D), cached * case.item_bytes),
    )


def _latent(case: Case) -> tuple[Part, ...]:
    B, H, N = case.batch, case.heads, case.head_dim
    assert case.kv_lora_rank is not None and case.rope_head_dim is not None and case.v_head_dim is not None
    r, R, V = case.kv_lora_rank, case.rope_head_dim, case.v_head_dim
    absorbed = r * H * (N + V)
    weights = latent_params(case.embed_dim, H, N, R, V, r, case.q_lora_rank) - absorbed
    return (
        Part(Shape("linear", B), weights * case.item_bytes),
        Part(Shape("per_head", B, H, N, r), absorbed * case.item_bytes),
        Part(Shape("attention", H, B, r + R, r, latent=True), B * case.kv_len * (r + R) * case.item_bytes),
    )
