"""From a wrong kernel to a sentence: bugs are named, two at once are, right kernels never are; scripts fail alone."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import harness
from harness.battery.axes import point
from harness.battery.call import make_call
from harness.battery.plan import first_calls
from harness.battery.result import Finding, Judgement
from harness.candidate.examinee import InProcess
from harness.diagnosis import repro
from harness.diagnosis.evidence import Witness
from harness.diagnosis.guesses import all_guesses
from harness.diagnosis.naming import answer_of, names_of, usable
from tests.support import python

SEED = 3


def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)


def diagnosed(kernel, **options) -> harness.Diagnosis:
    examinee = InProcess(kernel, "wrong")
    found = harness.judge(examinee, minutes=0.3, seed=SEED)
    assert not found.passed
    diagnosis = harness.diagnose(examinee, found, scripts=False, **options)
    assert diagnosis is not None
    return diagnosis


def scaled(by):
    return lambda q, k, v, scale=None, **o: sdpa(
        q, k, v, scale=by * (q.shape[-1] ** -0.5 if scale is None else scale), **o
    )


def below_the_corner(q, k, v, attn_mask=None, is_causal=False, **o):
    corner = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return sdpa(q, k, v, attn_mask=corner if is_causal else attn_mask, **o)


def scale_and_mask(q, k, v, attn_mask=None, scale=None, **o):
    return scaled(1.05)(q, k, v, scale=scale, **o)


def without_the_last_tile(q, k, v, attn_mask=None, is_causal=False, **o):
    S = k.shape[2]
    kept = (torch.arange(S) < S // 16 * 16) | (S < 16)
    seen = torch.ones(q.shape[2], S, dtype=torch.bool).tril() if is_causal else torch.ones(1, S, dtype=torch.bool)
    seen = seen & kept
    if attn_mask is not None:
        seen = attn_mask & seen if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~seen, -math.inf)
    return sdpa(q, k, v, attn_mask=seen, **o)


NAMED = {
    "scale": (scaled(1.002), "a scale that is 1.002 (+-"),
    "mask ignored": (lambda q, k, v, attn_mask=None, **o: sdpa(q, k, v, **o), "the mask ignored"),
    "another corner": (below_the_corner, "causal aligned at the lower right corner"),
    "two at once": (scale_and_mask, "both the mask ignored and a scale that is 1.05"),
    "v in bfloat16": (lambda q, k, v, **o: sdpa(q, k, v.bfloat16().to(v.dtype), **o), "v rounded to bfloat16"),
    "last tile": (without_the_last_tile, "the keys of the last, partial tile of 16 left out"),
}


@pytest.mark.parametrize("name", list(NAMED))
def test_a_bug_is_named(name):
    kernel, words = NAMED[name]
    diagnosis = diagnosed(kernel)
    assert diagnosis.headline.startswith(f"computes what you get with {words}"), diagnosis
    (named,) = diagnosis.named
    assert named.residual <= 0.01 < named.next_residual
    if name == "scale":
        assert named.parameter is not None and named.uncertainty is not None
        assert abs(named.parameter - 1.002) <= 1e-6 and 0 <= named.uncertainty < 1e-6
    assert diagnosis.shrunk is not None and diagnosis.shrunk.numbers_of_q <= 64


def test_where_nothing_fits_nothing_is_named_and_the_place_is_told():
    def odd(q, k, v, **o):
        out = sdpa(q, k, v, **o)
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        return out + 0.3 * noise * (torch.arange(out.shape[2]) % 4 == 1)[:, None]

    diagnosis = diagnosed(odd)
    assert diagnosis.named == ()
    assert diagnosis.place is not None and "every 4th row, from 1 on" in diagnosis.place.sentence


def test_no_guess_fits_what_a_right_kernel_gives():
    """Its answers lie within rounding of the golden: there is nothing to explain, so nothing is named."""
    witness = Witness(InProcess(sdpa, "right"), math.inf)
    evidences = [witness.evidence(make_call(each, SEED).request) for each in list(first_calls())[:12]]
    assert not any(evidence.is_plain_mismatch for evidence in evidences if usable(evidence))
    passed = Judgement("right", SEED, "", (Finding("", "", "", "ok"),), 1, 0.0, 1.0)
    assert harness.diagnose(InProcess(sdpa, "right"), passed) is None


def test_a_name_must_also_tell_the_right_calls():
    """A guess that fits a wrong call, and is wrong where the kernel is right, does not speak for all calls."""

    def only_beyond_30(q, k, v, attn_mask=None, **o):
        return sdpa(q, k, v, attn_mask=attn_mask if k.shape[2] < 30 else None, **o)

    witness = Witness(InProcess(only_beyond_30, "wrong"), math.inf)
    points = [point(20, S, 16, mask="bool", batch="2", kv_heads="2") for S in (40, 20)]
    wrong, right = (witness.evidence(make_call(each, SEED).request) for each in points)
    (named,) = names_of([wrong], [right], math.inf)
    assert named.names[0] in ("mask ignored", "bool_mask_ignored") and not named.everywhere
    assert names_of([wrong], [], math.inf)[0].everywhere


def test_every_guess_is_a_whole_attention():
    """It answers a plain call with the right shape, and leaves its inputs alone."""
    request = make_call(point(16, 24, 16, batch="2", kv_heads="2", groups="2"), SEED).request
    evidence = Witness(InProcess(sdpa, "right"), math.inf).evidence(request)
    before = {name: t.clone() for name, t in request.tensors.items()}
    for guess in all_guesses():
        answer = answer_of(guess, evidence)
        assert answer is None or answer["out"].shape == (2, 4, 16, 16), guess.name
    assert all(torch.equal(t, before[name]) for name, t in request.tensors.items())
    assert sum(answer_of(guess, evidence) is not None for guess in all_guesses()) >= 0.95 * len(all_guesses())


def test_wrong_gradients_are_told_from_a_wrong_output():
    def detached(q, k, v, **o):
        return sdpa(q, k.detach(), v, **o)

    own = diagnosed(detached)
    assert "grad k is wrong" in " ".join(own.notes)
    assert "the output is right: the fault is the backward pass' own" in own.notes
    where = point(7, 19, 16, gradients="qkv", batch="2", kv_heads="2")
    call = make_call(where, SEED)
    failure = Finding("", "", call.words, "mismatch", "x", "out", requests=(call.request,))
    found = Judgement("wrong", SEED, "", (failure,), 1, 0.0, 1.0)
    follows = harness.diagnose(InProcess(scaled(1.1), "wrong"), found, scripts=False)
    assert follows is not None
    assert "the gradients are those of the output that it gives: it is the forward pass' fault" in follows.notes


def test_crash_shape_and_nan_have_their_place():
    def raises(q, k, v, **o):
        return sdpa(q, k, v, **o) if k.shape[2] < 20 else {}[k.shape[2]]

    def nan(q, k, v, attn_mask=None, **o):
        out = sdpa(q, k, v, attn_mask=attn_mask, **o)
        is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
        return out.masked_fill(~attn_mask.any(-1, keepdim=True), math.nan) if is_bool else out

    told = diagnosed(raises)
    assert told.headline.startswith("it raises: KeyError: ") and told.headline.endswith("only with 20 keys")
    told = diagnosed(lambda q, k, v, **o: sdpa(q, k, v, **o).transpose(1, 2))
    assert "dimensions 1 and 2 have changed places" in told.headline
    told = diagnosed(nan)
    assert told.place is not None and "NaN there" in told.place.sentence
    assert "dead rows nan" in told.headline


KERNELS = '''
import torch
from torch.nn.functional import scaled_dot_product_attention

kept = {}


def stale(q, k, v, **options):
    """The first answer to each shape."""
    key = (q.shape, k.shape, v.shape)
    if any(t.requires_grad for t in (q, k, v)):
        return scaled_dot_product_attention(q, k, v, **options)
    if key not in kept:
        kept[key] = scaled_dot_product_attention(q, k, v, **options).detach()
    return kept[key].clone()


def dies(q, k, v, **options):
    if k.shape[2] > 8 and options.get("is_causal"):
        import os
        os._exit(9)
    return scaled_dot_product_attention(q, k, v, **options)


def writes(q, k, v, **options):
    out = scaled_dot_product_attention(q, k, v, **options)
    q.data.mul_(2)
    return out
'''


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "mine.py"
    path.write_text(KERNELS)
    return path


def test_on_the_command_line(kernels, tmp_path):
    """A kernel that remembers: after which calls it fails is found, and the script fails in a clean interpreter."""
    options = ("--seed", "1", "--json", str(tmp_path / "found.json"), "--repro", str(tmp_path))
    judged = python("-m", "harness", "judge", f"{kernels}:stale", *options)
    assert judged.code == 1, judged.err
    told = json.loads((tmp_path / "found.json").read_text())["diagnosis"]
    assert " ".join(told["headline"].split()) in " ".join(judged.out.split())
    assert "cached by shape" in told["headline"] or "last output again" in told["headline"]
    script = tmp_path / "repro_stale.py"
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stdout.startswith("expected"), ended.stderr
    assert "harness" not in script.read_text()
    script.write_text(script.read_text().replace("import stale as", "import plain as"))
    kernels.write_text(
        KERNELS + "\n\ndef plain(q, k, v, **o):\n    return scaled_dot_product_attention(q, k, v, **o)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr  # a right kernel passes the same script


def test_a_process_that_dies_loses_nothing(kernels):
    with pytest.raises(AssertionError) as told:
        harness.assert_kernel(f"{kernels}:dies", minutes=1, seed=1)
    first = str(told.value).splitlines()[0]
    assert "its process dies: the kernel's process left with exit code 9" in first


def test_a_script_that_passes_is_no_script(tmp_path):
    (tmp_path / "fine.py").write_text("import torch.nn.functional as F\n\nright = F.scaled_dot_product_attention\n")
    request = make_call(point(3, 5, 8), SEED).request
    script = repro.script_of(f"{tmp_path}/fine.py:right", (request,), "out", 1e-5, "nothing")
    assert script is not None and not repro.fails_alone(script)
    wrong = script.replace("import right as kernel", "import right as kernel; kernel = lambda q, k, v: q")
    assert repro.fails_alone(wrong)
