"""What a kernel is for: how it is declared, which calls lie outside, and what becomes of them in a cell."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from harness.candidate.request import Request
from harness.cell.measure import measure
from harness.kernels.call import Unsupported
from harness.kernels.domain import BadDomain, CallFacts, Domain, domain_of
from harness.kernels.domain_file import DomainFileError
from harness.kernels.front import find_kernel
from harness.kernels.plugin import PluginError, find_kernel_function, load
from harness.record import Record
from harness.suite.schema import Timing
from tests.support import python
from tests.support.attention import draw, make_case

FACTS = CallFacts("float32", B=2, H=4, H_kv=4, L=8, S=8, D=16, D_v=16)


def judged(function: Any, **axes: Any) -> Record:
    return measure(make_case(**axes), find_kernel(function), seed=0, regimes=["plain"], timing=Timing(enabled=False))


# Declaring


def test_the_default_has_no_limits():
    assert Domain() == Domain.of() and Domain().limits == {}
    assert Domain().refusal(replace(FACTS, mask="float", is_causal=True, dropout=True, gradients=True)) is None


def test_lists_sets_and_single_values_are_accepted():
    domain = Domain.of(dtypes=["bfloat16", "float16", "bfloat16"], head_dims=64, masks=("none",))
    assert domain == Domain(dtypes=("bfloat16", "float16"), head_dims=(64,), masks=("none",))
    assert hash(domain) == hash(Domain.of(**domain.limits))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"dtype": "float32"}, "dtype = 'float32': unknown limit; did you mean 'dtypes'? (known: layout, dtypes, "),
        ({"colour": 1}, "colour = 1: unknown limit (known: layout, dtypes, "),
        ({"dtypes": ["bf16"]}, "dtypes = 'bf16': unknown dtype; did you mean 'bfloat16'? (known: float64, float32, "),
        ({"dtypes": [torch.float32]}, "dtypes = torch.float32: unknown dtype (known: float64, "),
        ({"dtypes": []}, "dtypes = []: must not be an empty list"),
        ({"head_dims": [64, True]}, "head_dims = True: must be a positive whole number"),
        ({"head_dims": ["64"]}, "head_dims = '64': must be a positive whole number"),
        ({"max_keys": 0}, "max_keys = 0: must be a positive whole number"),
        ({"max_keys": 8.0}, "max_keys = 8.0: must be a positive whole number"),
        ({"dropout": 0}, "dropout = 0: must be true or false"),
        ({"decode_only": None}, "decode_only = None: must be true or false"),
        ({"masks": ["casual"]}, "masks = 'casual': unknown mask; did you mean 'causal'? (known: none, bool, "),
        ({"layout": "bldh"}, "layout = 'bldh': unknown layout; did you mean 'blhd'? (known: bhld, "),
        ({"layout": ["bhld"]}, "layout = ['bhld']: unknown layout (known: bhld, "),
    ],
)
def test_a_limit_that_cannot_be_is_named_with_its_rule(limits, message):
    with pytest.raises(BadDomain, match=re.escape(message)):
        Domain.of(**limits)
    with pytest.raises(BadDomain, match=re.escape(message)):
        harness.kernel(**limits)


def test_as_json_and_back():
    domain = Domain.of(dtypes=["float16"], max_keys=4096, masks=["none", "causal"], dropout=False, decode_only=True)
    sent = json.dumps(domain.as_json())
    assert json.loads(sent) == {
        "dtypes": ["float16"], "max_keys": 4096, "masks": ["none", "causal"], "dropout": False, "decode_only": True,
    }  # fmt: skip
    assert Domain.from_json(json.loads(sent)) == domain
    assert Domain.from_json(Domain().as_json()) == Domain()


def test_narrowed_is_what_lies_in_both():
    domain = Domain.of(masks=["none", "float"], max_keys=100, dropout=False)
    narrow = domain.narrowed(masks=["causal", "none"], max_keys=50, dtypes=["float16"], decode_only=True)
    assert narrow == Domain.of(masks=["none"], max_keys=50, dtypes=["float16"], dropout=False, decode_only=True)
    assert domain.narrowed() == domain and domain.narrowed(max_keys=500) == domain
    with pytest.raises(BadDomain, match="nothing of it is left"):
        domain.narrowed(masks=["bool"])


def test_the_decorator_leaves_the_function_as_it_is():
    @harness.kernel(dtypes=["float32"], gqa=False)
    def mine(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    assert mine.__name__ == "mine" and domain_of(mine) == Domain.of(dtypes=["float32"], gqa=False)
    assert find_kernel(mine).domain == domain_of(mine)
    assert domain_of(F.scaled_dot_product_attention) == Domain() == find_kernel("eager").domain


def test_declaring_needs_no_torch():
    code = "import sys, harness\nharness.kernel(layout='bhld')\nimport harness.kernels.domain_file\n"
    assert python("-c", f"{code}print('torch' in sys.modules)").out == "False\n"


# Outside


@pytest.mark.parametrize(
    ("limits", "changes", "said"),
    [
        ({"dtypes": ["float16", "bfloat16"]}, {}, "dtype float32, only float16, bfloat16"),
        ({"head_dims": [16]}, {"D": 20}, "head dim 20, only 16"),
        ({"head_dims": [16, 64]}, {"D_v": 20}, "head dim 20, only 16, 64"),
        ({"max_keys": 8}, {"S": 9}, "9 keys, at most 8"),
        ({"decode_only": True}, {}, "8 queries, only one (decode only)"),
        ({"square": True}, {"L": 1}, "1 queries over 8 keys, only as many as keys"),
        ({"masks": ["none", "bool"]}, {"mask": "float"}, "mask float, only none, bool"),
        ({"masks": ["none", "bool"]}, {"is_causal": True}, "mask causal, only none, bool"),
        ({"masks": ["none", "bool"]}, {"mask": "bool", "is_causal": True}, "mask causal, only none, bool"),
        ({"masks": ["causal"]}, {}, "mask none, only causal"),
        ({"gqa": False}, {"H_kv": 2}, "4 query heads over 2 key heads, no GQA"),
        ({"other_value_dim": False}, {"D_v": 8}, "values of 8 channels, only as many as keys"),
        ({"scale": False}, {"other_scale": True}, "a scale of its own, only D ** -0.5"),
        ({"dropout": False}, {"dropout": True}, "dropout"),
        ({"gradients": False}, {"gradients": True}, "gradients"),
        ({"mask_gradients": False}, {"gradients": True, "mask_gradients": True}, "a gradient of the mask"),
        ({"second_derivatives": False}, {"second_derivatives": True}, "second derivatives"),
        ({"compile": False}, {"compiled": True}, "torch.compile"),
    ],
)
def test_a_call_outside_is_told_and_the_same_call_inside_is_not(limits, changes, said):
    call = replace(FACTS, **changes)
    assert Domain.of(**limits).refusal(call) == said
    assert Domain().refusal(call) is None


def test_the_facts_of_a_request():
    q, k, v = draw((2, 4, 3, 16), (2, 2, 5, 16), (2, 2, 5, 8), dtype=torch.bfloat16)
    plain = Request(q, k, v)
    assert plain.facts == CallFacts("bfloat16", B=2, H=4, H_kv=2, L=3, S=5, D=16, D_v=8)
    assert Request(q, k, v, scale=0.25).facts == plain.facts  # D ** -0.5
    mask = torch.zeros(3, 5)
    asked = Request(q, k, v, mask=mask, is_causal=True, dropout_p=0.1, scale=0.3, mode="grad", gradients=("q", "mask"))
    expected: dict[str, Any] = {"mask": "float", "is_causal": True, "dropout": True, "other_scale": True}
    assert asked.facts == replace(plain.facts, **expected, gradients=True, mask_gradients=True)
    assert asked.facts.mask_kinds == ("float", "causal") and plain.facts.mask_kinds == ("none",)
    twice = Request(q, k, v, mask=mask > 0, mode="grad", gradients=("k",), directions=(k,))
    assert twice.facts == replace(plain.facts, mask="bool", gradients=True, second_derivatives=True)
    assert Request(q, k, v, mode="compile").facts == replace(plain.facts, compiled=True)


# A file beside the kernel

SOURCE = """
import torch.nn.functional as F
import harness

def fast(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)

@harness.kernel(dropout=False)
def slow(q, k, v, **options):
    return fast(q, k, v, **options)
"""


def beside(folder: Path, domains: str) -> Path:
    (folder / "mine.py").write_text(SOURCE)
    (folder / "mine.domain.yaml").write_text(domains)
    return folder / "mine.py"


def test_a_file_beside_the_kernels_declares_too(tmp_path):
    file = beside(tmp_path, "fast:\n  dtypes: [float32]\n  gradients: false\n")
    kernel = load(f"{file}:fast")
    assert kernel.domain == Domain.of(dtypes=["float32"], gradients=False)
    function, origin = find_kernel_function(f"{file}:fast")
    assert domain_of(function) == kernel.domain and origin == kernel.origin
    tensors = draw(*3 * [(1, 2, 3, 4)])
    torch.testing.assert_close(harness.attention(*tensors, kernel=kernel), harness.attention(*tensors))
    assert load(f"{file}:slow").domain == Domain.of(dropout=False)


def test_another_domain_is_another_kernel(tmp_path):
    file = beside(tmp_path, "fast: {dtypes: float32}\n")
    before = load(f"{file}:fast").origin
    assert load(f"{file}:fast").origin == before
    beside(tmp_path, "fast: {dtypes: float16}\n")
    assert load(f"{file}:fast").origin != before
    assert re.fullmatch(re.escape(str(file)) + " sha256:[0-9a-f]{16}", before)


def test_a_domain_is_declared_once(tmp_path):
    file = beside(tmp_path, "slow: {dtypes: float32}\n")
    with pytest.raises(
        PluginError, match=r"mine\.py:slow: its domain is declared twice, by its decorator and in .*yaml"
    ):
        load(f"{file}:slow")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast:\n  gqa: true\n  dtype: float32\n", ":3: fast.dtype: 'float32': unknown limit; did you mean 'dtypes'?"),
        (
            "fast:\n  dtypes:\n  - float32\n  - bf16\n",
            ":4: fast.dtypes: 'bf16': unknown dtype; did you mean 'bfloat16'?",
        ),
        ("fast:\n  dropout: 0\n", ":2: fast.dropout: 0: must be true or false"),
        ("\nfats: {}\n", ":2: fats: no such function; did you mean 'fast'? (known: fast, slow)"),
        ("fast: 3\n", ":1: fast: 3: must be a mapping of limits to values"),
        ("- fast\n", ":1: ['fast']: must be a mapping of function names to limits"),
        ("fast: {gqa: true, gqa: false}\n", ":1: fast.gqa: duplicate key, first given on line 1"),
        ("fast: [\n", ":2: is not valid YAML: "),
        ("", ": is empty"),
    ],
)
def test_a_wrong_file_is_told_with_line_key_value_and_rule(tmp_path, text, message):
    file = beside(tmp_path, text)
    with pytest.raises(DomainFileError, match=re.escape(f"{tmp_path / 'mine.domain.yaml'}{message}")):
        load(f"{file}:fast")


# In cells


def refusing(error: type[Exception], *words: str) -> Any:
    def mine(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise error(*words)

    return mine


@pytest.mark.parametrize(
    ("error", "words", "said"),
    [
        (NotImplementedError, ("no float32",), "no float32"),
        (NotImplementedError, (), "NotImplementedError: "),
        (Unsupported, ("no float32",), "no float32"),
        (type("NoKernel", (NotImplementedError,), {}), ("on this card",), "on this card"),
    ],
)
def test_a_refusal_in_whatever_words_is_unsupported(error, words, said):
    record = judged(refusing(error, *words))
    assert (record.status, record.error) == ("unsupported", said)
    with pytest.raises(Unsupported, match=said):
        harness.attention(*draw(*3 * [(1, 2, 3, 4)]), kernel=refusing(error, *words))


def test_any_other_exception_is_an_error():
    assert judged(refusing(RuntimeError, "no float32")).status == "error"


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("forward only")


@harness.kernel(gradients=False)
def forward_only(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, **options)
    return _ForwardOnly.apply(out)


def test_a_refusal_in_the_backward_pass_is_one_too():
    assert judged(forward_only).status == "ok"
    record = judged(forward_only, phase="train")
    assert record.status == "unsupported" and "forward only" in str(record.error)


@harness.kernel(dtypes=["bfloat16"])
def wrong_outside(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, **options)
    return out if q.dtype == torch.bfloat16 else 1.1 * out


def test_wrong_outside_its_domain_is_still_wrong():
    """It must refuse there; nobody refuses in its name."""
    assert judged(wrong_outside).status == "mismatch"


@harness.kernel(decode_only=True)
def one_query(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if q.shape[2] != 1:
        raise NotImplementedError("one query at a time")
    return F.scaled_dot_product_attention(q, k, v, **options)


@harness.kernel(decode_only=True)
def one_query_badly(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return 1.01 * one_query(q, k, v, **options)


@pytest.mark.parametrize("variant", ["mha", "gqa", "mla"])
@pytest.mark.parametrize("mask", ["causal", "padding", "float_bias"])
def test_a_decode_only_kernel_is_judged_in_decode_cells(variant, mask):
    record = judged(one_query, variant=variant, mask=mask, phase="decode")
    assert record.status == "ok", record.error
    # Four steps of one token in one regime; the prefill before them was not its own.
    assert record.calls == 4
    assert judged(one_query_badly, variant=variant, mask=mask, phase="decode").status == "mismatch"


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_and_refuses_in_all_others(phase):
    record = judged(one_query, phase=phase)
    assert (record.status, record.error) == ("unsupported", "one query at a time")


def test_a_kernel_that_only_claims_to_be_for_decoding_is_not_spared_elsewhere():
    @harness.kernel(decode_only=True)
    def wrong_in_prefill(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options) * (1.0 if q.shape[2] == 1 else 1.1)

    assert judged(wrong_in_prefill).status == "mismatch"
    # Nor in a decode cell: it answers several queries at once, wrongly, where it must refuse. Its own calls are right.
    record = judged(wrong_in_prefill, phase="decode")
    assert record.status == "mismatch" and "a decode_only kernel must refuse several queries" in str(record.error)
    wrong = {v["tensor"] for v in record.equivalence or () if v["status"] != "ok"}
    assert wrong == {"check: chunk", "check: more queries than keys"}


def test_the_checks_of_a_decode_only_kernel_ask_it_itself():
    """Not the kernel that did its prefill; and those that need more than one query are left out."""
    record = judged(one_query, phase="decode", dtype="bfloat16")
    checks = {v["tensor"]: v["status"] for v in record.equivalence or () if v["tensor"].startswith("check: ")}
    assert checks["check: repeated call"] == checks["check: dropout"] == "ok"
    assert "check: split prefill" not in checks and record.status == "ok"

    @harness.kernel(decode_only=True)
    def scaled_too_often(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
        return one_query(q, k, v, dropout_p=dropout_p, **options) / (1 - dropout_p) ** 4

    record = judged(scaled_too_often, phase="decode")
    assert record.status == "mismatch" and "weights sum to" in str(record.error)
