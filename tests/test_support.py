"""What tests lean on: "the same" can fail, and by less than they once allowed; a forked process is like a fresh one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from tests.support import ROOT, nursery
from tests.support.attention import as_torch, assert_same, by_sources, differentiated, draw_tokens, filled

EPS = torch.finfo(torch.float64).eps
E, H = 24, 4
LATENT: dict[str, Any] = {"kv_lora_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 5}


def gqa() -> tuple[Any, Any]:
    module = filled(harness.GroupedQueryAttention(E, H, 2, bias=True))

    def decoded(x: Tensor) -> Tensor:
        cache = module.new_cache()
        return torch.cat([module(piece, causal=True, cache=cache) for piece in x.split([6, 1, 2], dim=1)], dim=1)

    return decoded, lambda x: module(x, causal=True)


def mla() -> tuple[Any, Any]:
    absorbed, naive = (
        filled(harness.MultiHeadLatentAttention(E, H, mode=mode, **LATENT)) for mode in ("absorbed", "naive")
    )
    return absorbed, naive


def torch_mha() -> tuple[Any, Any]:
    ours = filled(harness.MultiHeadAttention(E, H, bias=True))
    theirs = as_torch(ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj, heads=H)
    return ours, lambda x: theirs(x, x, x, need_weights=False)[0]


def encoder_layer() -> tuple[Any, Any]:
    theirs = filled(nn.TransformerEncoderLayer(E, H, 40, batch_first=True))
    return harness.swap(theirs, to="variant")[0], theirs


# Eps of the largest value that each kind of test once allowed.
problems = pytest.mark.parametrize(
    ("build", "allowed"), [(gqa, 200), (torch_mha, 300), (mla, 300), (encoder_layer, 500)]
)


@problems
def test_the_same_passes(build: Any, allowed: int) -> None:
    candidate, reference = build()
    assert_same(candidate, reference, draw_tokens(batch=2, length=9, width=E))


@problems
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 8, E - 1)])
def test_one_value_off_by_what_was_allowed_once_fails(
    build: Any, allowed: int, share: float, place: tuple[int, ...]
) -> None:
    candidate, reference = build()
    x = draw_tokens(batch=2, length=9, width=E)
    largest = float(reference(x).detach().abs().max())

    def off(x: Tensor) -> Any:
        out = candidate(x).clone()
        out[place] += 0.99 * share * allowed * EPS * max(1.0, largest)
        return out

    with torch.no_grad():
        assert float((off(x) - reference(x)).abs().max()) <= allowed * EPS * max(1.0, largest)  # it would have passed
    with pytest.raises(AssertionError, match="error is"):
        assert_same(off, reference, x)


def test_a_gradient_off_by_what_was_allowed_once_fails() -> None:
    theirs, x, cotangent = filled(nn.TransformerEncoderLayer(E, H, 40, batch_first=True)), *draw_pair()
    ours, report = harness.swap(theirs, to="variant")
    expected = differentiated(theirs, dict(theirs.named_parameters()), cotangent)
    actual = differentiated(ours, dict(ours.named_parameters()), cotangent)
    assert_same(actual, lambda x: by_sources(expected(x), report.sources()), x)

    def off(x: Tensor) -> dict[str, Tensor]:
        found = actual(x)
        weight = found["d linear1.weight"].clone()
        weight[3, 5] += 900 * EPS * max(1.0, float(weight.abs().max()))  # of 1000
        return found | {"d linear1.weight": weight}

    with pytest.raises(AssertionError, match=r"d linear1\.weight: error is"):
        assert_same(off, lambda x: by_sources(expected(x), report.sources()), x)


def draw_pair() -> tuple[Tensor, Tensor]:
    """Tokens, and what an output of theirs is differentiated with."""
    x, cotangent = (draw_tokens(batch=2, length=9, width=E, seed=seed) for seed in (1, 2))
    return x, cotangent


@pytest.mark.parametrize("wrong", [lambda out: out[:, :-1], lambda out: out.float(), lambda out: out / 0])
def test_another_shape_or_dtype_or_a_nan_fails(wrong: Any) -> None:
    candidate, reference = gqa()
    with pytest.raises(AssertionError):
        assert_same(lambda x: wrong(candidate(x)), reference, draw_tokens(batch=2, length=9, width=E))


# What a process can see of how it was started; it leaves with the exit code that it is asked for.
TELLS = """\
import json, os, signal, sys
handle, parent = map(int, sys.argv[1:])
opened = [number for number in range(60) if os.path.exists(f"/proc/self/fd/{number}")]
told = {
    "name": __name__, "file": __file__, "words": sys.argv, "path": sys.path, "folder": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "child": os.getppid() == parent, "leads": os.getsid(0) == os.getpid(), "opened": opened,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "input": sys.stdin.read(),
    "buffered": [stream.line_buffering for stream in (sys.stdout, sys.stderr)],
}
os.write(handle, json.dumps(told).encode())
print("said")
sys.stderr.write("and said")
sys.exit(7)
"""


def told_by(popen: Callable[..., Any], words: list[str], environment: dict[str, str]) -> tuple[Any, ...]:
    (told, answers), (output, printed) = os.pipe(), os.pipe()
    process = popen(
        [sys.executable, "-P", *words, str(answers), str(os.getpid())], stdin=subprocess.DEVNULL, stdout=printed,
        stderr=printed, pass_fds=(answers,), env=environment, start_new_session=True,
    )  # fmt: skip
    for handle in (answers, printed):
        os.close(handle)
    with open(told) as first, open(output) as second:
        story, said = json.load(first), second.read()
    number = str(answers)
    story["words"] = ["HANDLE" if word == number else word for word in story["words"]]
    story["opened"] = ["HANDLE" if each == answers else each for each in story["opened"]]
    return story, sorted(said.split("\n")), process.wait(), process.poll(), isinstance(process, subprocess.Popen)


@pytest.mark.parametrize("kind", ["module", "script"])
def test_a_forked_process_is_like_a_fresh_one(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ["-m", "tells"] if kind == "module" else [str(tmp_path / "tells.py")]
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "ADDED": "1"}
    *fresh, _ = told_by(subprocess.Popen, words, environment)
    *forked, is_fresh = told_by(nursery.popen, words, environment)
    assert fresh == forked and not is_fresh
    assert fresh[2] == 7 and fresh[0]["child"] and fresh[0]["folder"] == str(tmp_path)
    *_, is_fresh = told_by(nursery.popen, words, environment | {"OMP_NUM_THREADS": "17"})
    assert is_fresh, "this is read when torch is imported"


def test_a_forked_process_that_is_killed_says_so():
    command = [sys.executable, "-P", "-m", "timeit", "-s", "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"]
    process = nursery.popen(
        command, stdin=subprocess.DEVNULL, stdout=1, stderr=2, pass_fds=(), env=dict(os.environ), start_new_session=True
    )
    assert process.wait(30) == -9
