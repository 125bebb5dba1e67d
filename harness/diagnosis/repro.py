"""A failing call as a script that needs torch and the user's file alone, and is a test for pytest as well."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from harness.candidate.request import Request
from harness.diagnosis.shrink import seeded

MOST_NUMBERS = 4096  # that a script spells out
PATIENCE_S = 30.0
FAILED = 1
SDPA = "torch.nn.functional.scaled_dot_product_attention"


def script_of(kernel: str, requests: Sequence[Request], tensor: str, limit: float, headline: str) -> str | None:
    """Prints expected and got, and exits with 1; `pytest FILE` fails likewise. None where a script cannot show it.

    `tensor`: what is wrong: "out", or "grad k". `limit`: the error that rounding explains.
    """
    body = _body(requests, tensor)
    if body is None:
        return None
    name = "".join(c if c.isalnum() else "_" for c in kernel.rpartition(":")[2])
    return "\n".join(
        [
            f'"""{_one_line(headline)}"""',
            *_imports(kernel),
            "",
            "",
            f"def test_{name}():",
            *(f"    {line}" for line in body),
            '    print(f"expected {expected}\\ngot {got}")',
            "    assert got.shape == expected.shape",
            f"    assert (got.double() - expected).abs().max() <= {limit:.3g}  # rounding explains no more",
            "",
            "",
            f'if __name__ == "__main__":\n    test_{name}()',
            "",
        ]
    )


def fails_alone(script: str) -> bool:
    """Run by a clean interpreter: whether it ends with the exit code of a failure."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "repro.py"
        file.write_text(script)
        try:
            ended = subprocess.run(
                [sys.executable, str(file)], capture_output=True, timeout=PATIENCE_S, cwd=folder, check=False
            )
        except subprocess.TimeoutExpired:
            return True  # it hangs, as it did
        return ended.returncode < 0 or (ended.returncode == FAILED and b"SyntaxError" not in ended.stderr)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("\\", "/").replace('"', "'")


def _imports(kernel: str) -> list[str]:
    place, _, function = kernel.rpartition(":")
    lines = ["import sys", "", "import torch", ""]
    if not place.endswith(".py"):
        return [
            *lines,
            f"sys.path.insert(0, {str(Path.cwd())!r})",
            f"from {place} import {function} as kernel  # noqa: E402",
        ]
    path = Path(place).resolve()
    if path.stem.isidentifier():
        return [
            *lines,
            f"sys.path.insert(0, {str(path.parent)!r})",
            f"from {path.stem} import {function} as kernel  # noqa: E402",
        ]
    return [
        "import runpy",
        *lines,
        f"kernel = runpy.run_path({str(path)!r})[{function!r}]",
    ]


def _body(requests: Sequence[Request], tensor: str) -> list[str] | None:
    last = requests[-1]
    if last.mode not in ("no_grad", "grad", "inference", "autocast", "compile", "float64", "deterministic", "thread"):
        return None
    if last.dropout_p or last.directions or last.repeats > 1:
        return None
    lines: list[str] = []
    for number, request in enumerate(requests):
        made = _inputs(request)
        if made is None:
            return None
        lines += made
        if request is not last:
            lines.append(f"{_call(request)}  # call {number + 1} of {len(requests)}")
    if last.threads is not None:
        lines.append(f"torch.set_num_threads({last.threads})")
    if last.mode == "float64":
        lines.append("torch.set_default_dtype(torch.float64)")
    if last.mode == "deterministic":
        lines.append("torch.use_deterministic_algorithms(True)")
    if last.mode == "compile":
        lines.append('kernel = torch.compile(kernel, backend="aot_eager", dynamic=False)')
    return lines + (_forward(last) if not last.gradients else _backward(last, tensor))


def _forward(request: Request) -> list[str]:
    lines = [f"expected = {_expected(request)}.detach()"]
    around = {
        "inference": "torch.inference_mode()",
        "autocast": 'torch.autocast("cpu", dtype=torch.bfloat16)',
        "grad": "torch.enable_grad()",
    }.get(request.mode, "torch.no_grad()")
    if request.mode == "thread":
        return [
            *lines,
            "from concurrent.futures import ThreadPoolExecutor  # noqa: E402",
            f"got = ThreadPoolExecutor().submit(lambda: {_call(request)}).result()",
        ]
    return [*lines, f"with {around}:", f"    got = {_call(request)}"]


def _backward(request: Request, tensor: str) -> list[str]:
    wanted = tensor.removeprefix("grad ")
    name = wanted if wanted in request.gradients else request.gradients[0]
    cotangent = _tensor("cotangent", request.cotangent)
    leaves = ", ".join(request.gradients)
    lines = [*(cotangent or []), f"for leaf in ({leaves},):", "    leaf.requires_grad_()"]
    if tensor == "out":
        return [*lines, f"expected = {_expected(request)}.detach()", f"got = {_call(request)}.detach()"]
    return [
        *lines,
        f"expected = torch.autograd.grad({_expected(request)}, {name}, cotangent.double())[0].double()",
        f"got = torch.autograd.grad({_call(request)}, {name}, cotangent)[0]",
    ]


def _expected(request: Request) -> str:
    """torch's own, in float64; a causal flag as a mask where torch's fused kernel is not to be trusted with it."""
    arguments = [f"{name}.double()" for name in ("q", "k", "v")]
    mask = "" if request.mask is None else "mask" if request.mask.dtype == torch.bool else "mask.double()"
    is_causal = request.is_causal
    if is_causal and (mask or (request.scale or 0) < 0):
        below = f"torch.ones({request.q.shape[2]}, {request.k.shape[2]}, dtype=torch.bool).tril()"
        is_bool = request.mask is None or request.mask.dtype == torch.bool
        mask = below if not mask else f"{mask} & {below}" if is_bool else f"{mask}.masked_fill(~{below}, float('-inf'))"
        is_causal = False
    return f"{SDPA}({', '.join([*arguments, *_options(request, mask, is_causal)])})"


def _call(request: Request) -> str:
    mask = "mask" if request.mask is not None else ""
    return f"kernel({', '.join(['q', 'k', 'v', *_options(request, mask, request.is_causal)])})"


def _options(request: Request, mask: str, is_causal: bool) -> list[str]:
    options = [f"attn_mask={mask}"] if mask else []
    options += ["is_causal=True"] if is_causal else []
    options += [f"scale={request.scale!r}"] if request.scale is not None else []
    return options + (["enable_gqa=True"] if request.q.shape[1] != request.k.shape[1] else [])


def _inputs(request: Request) -> list[str] | None:
    lines: list[str] = []
    for name, tensor in request.tensors.items():
        if name in request.tied[1:]:
            lines.append(f"{name} = {request.tied[0]}")
            continue
        made = _tensor(name, tensor)
        if made is None:
            return None
        lines += made
    return lines


def _tensor(name: str, tensor: Tensor | None) -> list[str] | None:
    """As few characters as its numbers allow; strides only where they are not the usual ones."""
    assert tensor is not None
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)
    flat = tensor.detach().contiguous().flatten()
    typed = "" if tensor.dtype == torch.float32 else f", dtype={dtype}"
    if tensor.numel() and bool((flat == flat[0]).all()):
        value = flat[0].item()
        plain = {0.0: "zeros", 1.0: "ones"}.get(float(value)) if tensor.dtype != torch.bool else None
        number = _number(value, tensor.dtype)
        lines = [
            f"{name} = torch.{plain}({shape}{typed})" if plain else f"{name} = torch.full({shape}, {number}{typed})"
        ]
    elif tensor.is_floating_point() and torch.equal(tensor, seeded(shape, tensor.dtype)):
        to = "" if tensor.dtype == torch.float32 else f".to({dtype})"
        lines = [f"{name} = torch.randn({shape}, generator=torch.Generator().manual_seed(0)){to}"]
    elif tensor.numel() <= MOST_NUMBERS:
        numbers = ", ".join(_number(value, tensor.dtype) for value in flat.tolist())
        lines = [f"{name} = torch.tensor([{numbers}]{typed}).view{shape}"]
    else:
        return None
    usual = torch.empty(shape, dtype=tensor.dtype).stride()
    if tensor.stride() != usual or tensor.storage_offset():
        size = max(tensor.untyped_storage().nbytes() // tensor.element_size(), 1)
        fill = "False" if tensor.dtype == torch.bool else 'float("nan")'
        strides = f"as_strided({shape}, {tensor.stride()}, {tensor.storage_offset()})"
        lines.append(f"{name} = torch.full(({size},), {fill}, dtype={dtype}).{strides}.copy_({name})")
    return lines


def _number(value: float | bool, dtype: torch.dtype) -> str:
    """With as many digits as the dtype has; 9 bring every float32 back."""
    if isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return f'float("{value}")'
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}."
    return repr(value) if dtype == torch.float64 else f"{value:.9g}"
