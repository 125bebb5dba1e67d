"""`auto` picks by its rule, really runs what it picks, and what it picks gives the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import harness
from harness.kernels import auto
from harness.kernels import names as choice
from harness.kernels.front import find_kernel
from tests.support import ROOT


@pytest.mark.parametrize(
    ("rows", "queries", "keys", "options", "name"),
    [
        (4, 1, 4096, {}, "grouped"),
        (4, 1, 64, {}, "eager"),
        (4, 1, 4096, {"need_weights": True}, "eager"),
        (256, 64, 4096, {}, "eager"),
        (1024, 1024, 1024, {}, "tiled"),
        (512, 512, 512, {}, "eager"),  # all scores stay in the cache
        (512, 512, 512, {"products": 32}, "tiled"),
        (512, 512, 512, {"slanted": True}, "tiled"),
        (511, 511, 4096, {"products": 8}, "eager"),
        (256, 256, 131072, {"products": 32}, "tiled"),  # a piece of a long prompt: its scores would be 4 GiB
        (1024, 1024, 1024, {"need_weights": True}, "eager"),
        (1024, 1024, 1024, {"trains": True}, "eager"),
        (1024, 1024, 1024, {"trains": True, "slanted": True}, "tiled"),
        (4096, 4096, 4096, {"trains": True}, "tiled"),
    ],
)
def test_the_rule(rows, queries, keys, options, name):
    asked = {"products": 8, "slanted": False, "trains": False, "need_weights": False} | options
    assert choice.pick(rows, queries, keys, **asked) == name


@pytest.mark.parametrize(
    ("L", "S", "options", "requires_grad", "name"),
    [
        (1, 2048, {}, False, "grouped"),
        (1, 2047, {}, False, "eager"),
        (512, 512, {"causal": True}, False, "tiled"),
        (512, 512, {"causal": True}, True, "tiled"),
        (512, 512, {"window": 9}, False, "tiled"),
        (512, 512, {}, False, "eager"),
        (512, 4096, {}, False, "tiled"),
        (512, 512, {}, True, "eager"),
        (512, 512, {"return_weights": True}, False, "eager"),
    ],
)
def test_what_is_picked_runs_and_is_right(monkeypatch, L, S, options, requires_grad, name):
    ran = []

    def noted(each: str) -> Callable[..., Any]:
        def run(*call: Any) -> Any:
            ran.append(each)
            return find_kernel(each).run(*call)

        return run

    for each in ("eager", "grouped", "tiled"):
        monkeypatch.setitem(auto.KERNELS, each, noted(each))
    q, k, v = (torch.randn(1, heads, length, 8) for heads, length in ((4, L), (2, S), (2, S)))
    q.requires_grad_(requires_grad)
    out = harness.attention(q, k, v, **options)
    assert ran == [name]
    i, j = torch.arange(S - L, S)[:, None], torch.arange(S)
    seen = (j <= i if options.get("causal") or "window" in options else j >= 0) & (i - j < options.get("window", S + 1))
    golden = [t.double() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(golden[0], golden[1], golden[2], attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close((out[0] if isinstance(out, tuple) else out).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["tiled", "grouped", "auto"])
def test_every_kernel_obeys_the_acceptance_rule_over_a_grid(kernel: str, tmp_path):
    """The smoke grid, and cells long enough for each of them to take its own way."""
    suite = yaml.safe_load((ROOT / "configs" / "smoke.yaml").read_text())
    small = {"embed_dim": 32, "heads": 4, "kv_heads": 2}
    suite["include"] += [
        {"variant": ["mha", "gqa"], **small, "seq_len": 520, "mask": "causal", "phase": ["prefill", "train"]},
        {"variant": ["mha", "gqa"], **small, "seq_len": 2100, "mask": "causal", "phase": "decode"},
        # MLA's reference takes 20 s at 2100; `auto` alone needs that many keys, and then runs `grouped`.
        {"variant": "mla", **small, "seq_len": 2100 if kernel == "auto" else 520, "mask": "causal", "phase": "decode"},
    ]
    suite["timing"] = {"enabled": False}
    table = harness.run(suite, out=tmp_path / "run", kernels=[kernel])
    assert len(table) >= 38
    assert set(table["status"]) == {"ok"}, table.loc[table["status"] != "ok", ["case_id", "status", "error"]]


@pytest.mark.parametrize("kernel", ["eager", "grouped", "tiled", "auto"])
def test_vectorised_calls_without_gradients(kernel: str):
    q, k, v = torch.randn(3, 3, 1, 2, 5, 8)
    with torch.no_grad():
        found = torch.vmap(lambda q, k, v: harness.attention(q, k, v, kernel=kernel))(q, k, v)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))
