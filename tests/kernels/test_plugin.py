"""A user's own kernel: how it is found, what it is called with, and what it is never asked to do."""

import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import harness
from harness.kernels.call import Unsupported
from harness.kernels.plugin import PluginError, from_function, load
from harness.record import STATUSES, Record
from harness.suite.config import load_suite
from harness.suite.schema import Timing
from harness.workers.job import Job, perform

B, H, H_kv, L, D = 2, 4, 2, 5, 8
INF = float("inf")

SOURCE = """
import torch.nn.functional as F

SCALE = 3
_hidden = print

def fast(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

def slow(q, k, v, **options):
    return fast(q, k, v, **options)
"""


def qkv(queries: int = L, keys: int = L, kv_heads: int = H_kv) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, H, queries, D, generator=generator)
    k, v = (torch.randn(B, kv_heads, keys, D, generator=generator) for _ in range(2))
    return q, k, v


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


class Recorder:
    """Stands for a user's kernel and keeps what it was called with."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.options = options
        return F.scaled_dot_product_attention(q, k, v, **options)


def recorded(*tensors: Tensor, **options: Any) -> dict[str, Any]:
    """What the kernel got, once its result is right."""
    kernel = Recorder()
    torch.testing.assert_close(
        harness.attention(*tensors, kernel=kernel, **options), harness.attention(*tensors, **options)
    )
    return kernel.options


# Loading


@pytest.mark.parametrize("function", ["fast", "slow"])
def test_a_function_of_a_file(file, function):
    kernel = load(f"{file}:{function}")
    assert kernel.name == f"{file}:{function}" and not kernel.shielded and not kernel.gives_weights
    assert re.fullmatch(re.escape(str(file)) + r" sha256:[0-9a-f]{16}", kernel.origin)
    torch.testing.assert_close(
        harness.attention(*qkv(), causal=True, kernel=kernel.name), harness.attention(*qkv(), causal=True)
    )


def test_origin_follows_the_content_of_the_file(file):
    before = load(f"{file}:fast").origin
    assert load(f"{file}:fast").origin == before
    file.write_text(SOURCE + "\n# changed\n")
    assert load(f"{file}:fast").origin != before


def test_a_changed_file_is_read_again(file, monkeypatch):
    """Also within a second and with the same size, where Python's own bytecode cache would not notice."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    q, k, v = qkv()
    for factor in (2, 3, 4):
        file.write_text(f"def times(q, k, v, **options):\n    return q * {factor}\n")
        assert torch.equal(harness.attention(q, k, v, kernel=f"{file}:times"), q * factor)
    assert list(file.parent.iterdir()) == [file]  # nothing is left beside the user's file


def test_two_files_of_one_name_are_two_kernels(tmp_path):
    specs = []
    for factor in (2, 3):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / "same.py").write_text(f"def times(q, k, v, **options):\n    return q * {factor}\n")
        specs.append(f"{folder / 'same.py'}:times")
    q, k, v = qkv()
    kernels = [load(spec) for spec in specs]
    for kernel, factor in zip(kernels, (2, 3), strict=True):
        assert torch.equal(harness.attention(q, k, v, kernel=kernel), q * factor)


def test_a_file_may_define_a_dataclass(file):
    """dataclasses look their module up in sys.modules."""
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 1\n"
    file.write_text(text + SOURCE)
    assert load(f"{file}:fast").name.endswith(":fast")


def test_a_function_of_a_module():
    kernel = load("torch.nn.functional:scaled_dot_product_attention")
    assert kernel.origin.startswith(f"{F.__file__} sha256:") and not kernel.shielded
    torch.testing.assert_close(harness.attention(*qkv(), kernel=kernel), harness.attention(*qkv()))


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "nothing.py"
    with pytest.raises(PluginError, match=re.escape(f"{path}: cannot be read: No such file or directory")):
        load(f"{path}:fast")


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(PluginError, match=r"folder\.py: cannot be read: Is a directory"):
        load(f"{tmp_path / 'folder.py'}:fast")


def test_a_missing_function_lists_the_callables(file):
    message = f"{file}:quick: no function 'quick' in {file}; callables there: fast, slow"
    with pytest.raises(PluginError, match=re.escape(message) + "$"):
        load(f"{file}:quick")


def test_something_that_cannot_be_called_is_no_function(file):
    with pytest.raises(PluginError, match=r"no function 'SCALE' in .*; callables there: fast, slow$"):
        load(f"{file}:SCALE")


def test_a_file_without_callables_says_none(file):
    file.write_text("x = 1\n")
    with pytest.raises(PluginError, match=r"callables there: none$"):
        load(f"{file}:fast")


def test_a_missing_module_is_named():
    with pytest.raises(
        PluginError, match="no_such_module_anywhere: importing it raised ModuleNotFoundError: No module"
    ):
        load("no_such_module_anywhere:fast")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no gpu')", "RuntimeError: no gpu"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError: "),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_import_that_raises_is_reported_with_the_file(file, source, reason):
    file.write_text(source + "\n")
    with pytest.raises(PluginError, match=re.escape(f"{file}: importing it raised {reason}")):
        load(f"{file}:fast")


def test_a_plugin_error_is_a_value_error(file):
    with pytest.raises(ValueError, match="quick"):
        harness.attention(*qkv(), kernel=f"{file}:quick")


# What it is called with


def test_plain_attention_is_asked_for_plainly():
    got = recorded(*qkv())
    assert got == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": D**-0.5, "enable_gqa": True}


def test_full_heads_do_not_ask_for_gqa():
    assert recorded(*qkv(kv_heads=H))["enable_gqa"] is False


def test_scale_and_dropout_are_passed_on():
    assert recorded(*qkv(), scale=0.7)["scale"] == 0.7
    kernel = Recorder()
    harness.attention(*qkv(), dropout_p=0.2, kernel=kernel)
    assert kernel.options["dropout_p"] == 0.2


def test_is_causal_where_both_conventions_agree():
    got = recorded(*qkv(), causal=True)
    assert got["is_causal"] is True and got["attn_mask"] is None
    # SDPA aligns top-left: with the first query at the first key, that is what was asked for.
    assert recorded(*qkv(keys=9), causal=True, q_start=0)["is_causal"] is True


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (qkv(queries=3, keys=9), {}),
        (qkv(queries=9, keys=3), {}),
        (qkv(), {"q_start": 1}),
        (qkv(), {"q_start": torch.tensor([0, 1])}),
        (qkv(), {"window": 2}),
        (qkv(), {"mask": torch.ones(L, L, dtype=torch.bool).triu()}),
        (qkv(), {"mask": torch.ones(L, L)}),
    ],
    ids=["L < S", "L > S", "start", "starts", "window", "bool", "float"],
)
def test_causal_otherwise_comes_as_a_dense_mask(tensors, options):
    got = recorded(*tensors, causal=True, **options)
    assert got["is_causal"] is False
    queries, keys = tensors[0].shape[2], tensors[1].shape[2]
    assert got["attn_mask"].shape[-2:] == (queries, keys)


def test_a_lower_right_causal_mask_is_spelled_out():
    got = recorded(*qkv(queries=2, keys=5), causal=True)
    assert got["attn_mask"].tolist() == [[True, True, True, True, False], [True] * 5]


def test_a_decode_step_needs_neither_mask_nor_hint():
    got = recorded(*qkv(queries=1, keys=9), causal=True)
    assert got["attn_mask"] is None and got["is_causal"] is False


def test_a_bool_mask_arrives_as_it_is():
    mask = torch.rand(B, 1, L, L, generator=torch.Generator().manual_seed(0)) > 0.3
    assert torch.equal(recorded(*qkv(), mask=mask)["attn_mask"], mask)


def test_a_float_mask_carries_what_causal_and_window_hide():
    bias = torch.arange(25.0).view(L, L)
    got = recorded(*qkv(), mask=bias, causal=True, window=2)["attn_mask"]
    hidden = torch.ones(L, L).triu(1).bool() | torch.ones(L, L).tril(-2).bool()
    assert torch.equal(got, bias.masked_fill(hidden, -INF))


@pytest.mark.parametrize("shape", [(), (1,), (L,)])
def test_a_mask_has_at_least_the_two_dimensions_that_sdpa_wants(shape):
    for mask in (torch.ones(shape, dtype=torch.bool), torch.ones(shape)):
        assert recorded(*qkv(), mask=mask)["attn_mask"].shape == (L, L)


def test_a_user_kernel_is_not_shielded():
    """It is judged as it is: its own NaN is a finding."""
    q, k, v = qkv()
    v[:, :, 2] = float("nan")
    mask = torch.arange(L) != 2
    assert bool(harness.attention(q, k, v, mask=mask, kernel="sdpa").isfinite().all())
    assert not bool(harness.attention(q, k, v, mask=mask, kernel=F.scaled_dot_product_attention).isfinite().all())


# What SDPA's signature cannot say


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 5.0}, "SDPA's signature has no softcap"),
        ({"sinks": torch.zeros(H)}, "SDPA's signature has no sinks"),
        ({"return_weights": True}, "SDPA's signature returns no attention weights"),
    ],
)
@pytest.mark.parametrize("kernel", ["sdpa", Recorder()], ids=["sdpa", "mine"])
def test_unsupported_is_said_never_guessed(kernel, options, message):
    with pytest.raises(Unsupported, match=message):
        harness.attention(*qkv(), kernel=kernel, **options)


def test_a_callable_keeps_its_name():
    assert from_function(F.scaled_dot_product_attention, "mine").name == "mine"
    assert harness.kernels.front.find_kernel(Recorder()).name == "Recorder"


# Whatever a file does: it is refused by its name or has a row, and leaves nothing changed

HEADER = "import os, random, sys, warnings\nimport numpy as np\nimport torch\nimport torch.nn.functional as F\n"
DISTURBANCES = (
    *("pass", "print('hello')", "print('x', file=sys.stderr)", "sys.stdout.write('y' * 5000)", "warnings.warn('old')"),
    *("torch.set_default_dtype(torch.float64)", "torch.set_grad_enabled(False)", "torch.set_num_threads(3)"),
    *("torch.manual_seed(1)", "torch.rand(1)", "np.random.seed(1)", "random.seed(1)", "os.chdir('/')"),
    *("torch.set_default_device('meta')", "torch.use_deterministic_algorithms(True)", "os.environ['LEFT'] = '1'"),
    *("torch.backends.mha.set_fastpath_enabled(False)", "sys.stdout = None", "sys.setrecursionlimit(5000)"),
    *("raise RuntimeError('no gpu')", "raise MemoryError", "sys.exit(3)", "sys.exit()", "exit('bye')", "1 / 0"),
    *(
        "raise StopIteration",
        "assert False",
        "raise UnicodeError('\\ud800')",
        "raise Exception",
        "import no_such_module",
    ),
    *("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "raise type('Skip', (BaseException,), {})"),
    *("raise SyntaxError('odd')", "raise ValueError('\\x1b[31m' * 999)", "raise KeyError(torch.ones(2))"),
)
CHANGES_TO_INPUTS = (
    "pass",
    "q.zero_()",
    "k.add_(1)",
    "v.mul_(2)",
    "q.requires_grad_()",
    "v.resize_(0)",
    "del q",
    "q = None",
)
SIGNATURES = (
    "(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, **options)",
    "(q, k, v, attn_mask=None, *, is_causal=False, scale=None, enable_gqa=False, **options)",
    *(
        "(q, k, v)",
        "()",
        "(*tensors)",
        "(**options)",
        "(q, k, v, mask)",
        "(query, key, value, **options)",
        "(q, k, v, /)",
    ),
)
RETURNS = (
    *(
        "out",
        "None",
        "(out, None)",
        "[out]",
        "{'out': out}",
        "out.tolist()",
        "3.0",
        "'text'",
        "torch",
        "F",
        "(yield out)",
    ),
    *(
        "out.double()",
        "out.half()",
        "out.long()",
        "out > 0",
        "torch.complex(out, out)",
        "out.to('meta')",
        "out.detach()",
    ),
    *(
        "out.flatten()",
        "out[..., :1]",
        "out[:0]",
        "out[None]",
        "out.transpose(1, 2)",
        "torch.empty(0)",
        "out.to_sparse()",
    ),
    *(
        "out * float('nan')",
        "out + 1",
        "out * 1.5",
        "q",
        "v",
        "out.detach().numpy()",
        "np.ones(3)",
        "torch.nn.Linear(2, 2)",
    ),
)
WRONG_FILES = (
    "",
    "x = 1",
    "kernel = 3",
    "def other(): pass",
    "kernel = None",
    "kernel = (",
    "\tkernel",
    "return",
    "\x00",
)
CORE = "F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)"
# What a file sets for its own later imports stays, so this one is only done by the function.
AT_IMPORT = [disturbance for disturbance in DISTURBANCES if "environ" not in disturbance]


def mostly(usual: str, others: Sequence[str], times: int) -> st.SearchStrategy[str]:
    """With every part odd, hardly a file would get as far as the comparison."""
    return st.sampled_from([usual] * times + list(others))


def kernel_file(
    *,
    at_import: str = "pass",
    signature: str = SIGNATURES[0],
    effect: str = "pass",
    change: str = "pass",
    result: str = "out",
) -> str:
    lines = [effect, f"out = {CORE}", change, f"return {result}"]
    return f"{HEADER}{at_import}\ndef kernel{signature}:\n" + "".join(f"    {line}\n" for line in lines)


FILES = st.sampled_from(WRONG_FILES) | st.builds(
    kernel_file,
    at_import=mostly("pass", AT_IMPORT, 60),
    signature=mostly(SIGNATURES[0], SIGNATURES, 15),
    effect=mostly("pass", DISTURBANCES, 15),
    change=mostly("pass", CHANGES_TO_INPUTS, 15),
    result=mostly("out", RETURNS, 15),
)
CELLS = load_suite(
    {
        "name": "x",
        "include": [
            {"variant": ["mha", "gqa"], "embed_dim": 8, "heads": 2, "kv_heads": 1, "seq_len": 4, "mask": "causal",
             "phase": ["prefill", "decode", "train"]},
        ],
    }
).cases  # fmt: skip


def global_state() -> tuple[Any, ...]:
    """Asked of torch, numpy and Python, not of the code that puts it back."""
    return (
        *(torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), torch.is_grad_enabled()),
        *(torch.get_rng_state().tolist(), torch.are_deterministic_algorithms_enabled()),
        *(torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(1).device),
        *(np.random.get_state()[1].tolist(), random.getstate(), os.getcwd(), sys.stdout, sys.stderr),  # type: ignore[index]
        os.environ.get("LEFT"),
    )


def judged(source: str, path: Path, cell: int) -> Record | PluginError:
    path.write_text(source)
    case = replace(CELLS[cell % len(CELLS)], kernel=f"{path}:kernel")
    job = Job(case=case, seed=0, regimes=("plain",), timing=Timing(enabled=False), threads=torch.get_num_threads())
    before = global_state()
    try:
        return perform(job)
    except PluginError as refused:
        return refused
    finally:
        assert global_state() == before


@given(source=FILES, cell=st.integers(0, 5))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)  # each starts a process: 2 seconds
def test_any_file_is_refused_or_has_a_row(tmp_path_factory, source, cell):
    path = tmp_path_factory.getbasetemp() / "fuzzed_kernel.py"
    found = judged(source, path, cell)
    if isinstance(found, PluginError):
        assert str(path) in str(found)
    else:
        assert found.status in STATUSES
        assert (found.error is None) == (found.status == "ok"), found
        assert found.error is None or found.error.strip()


@pytest.mark.parametrize("result", [result for result in RETURNS if result not in ("out", "out.detach()")])
def test_no_wrong_result_is_ok(tmp_path, result):
    found = judged(kernel_file(result=result), tmp_path / "mine.py", cell=0)
    assert isinstance(found, Record) and found.status in ("mismatch", "error"), found


@pytest.mark.parametrize("effect", DISTURBANCES)
def test_what_a_kernel_does_beside_its_work_is_undone_or_named(tmp_path, effect):
    found = judged(kernel_file(effect=effect), tmp_path / "mine.py", cell=0)
    assert isinstance(found, Record)
    stops = effect.startswith(("raise", "sys.exit", "exit", "1 /", "assert", "import"))
    allowed = {"error", "oom", "mismatch"} if stops else {"ok", "error"}
    assert found.status in allowed, found
    assert (found.status == "oom") == ("MemoryError" in effect)


@pytest.mark.parametrize("change", ["q.zero_()", "k.add_(1)", "v.mul_(2)"])
def test_a_kernel_that_changes_its_inputs_is_not_ok(tmp_path, change):
    found = judged(kernel_file(change=change), tmp_path / "mine.py", cell=0)
    assert isinstance(found, Record) and found.status == "mismatch" and found.error
