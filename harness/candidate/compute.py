"""Request -> tensors by name: the call itself, in the mode that is asked for. Runs wherever the kernel lives."""

import functools
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.candidate.request import Failure, Request
from harness.kernels.call import ContractBroken
from harness.kernels.layouts.layout import Adapted
from harness.kernels.plugin import told

Function = Callable[..., Tensor]  # with SDPA's signature
OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory", "bad_alloc")
PACKAGE = str(Path(__file__).parents[1])


# Modes that are a setting of torch's: how to read and write it, and what it is during the call and else.
SWITCHED: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any, Any]] = {
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True, False),
    "float64": (torch.get_default_dtype, torch.set_default_dtype, torch.float64, torch.float32),
}


class NotATensor(Exception):
    """What the kernel returned cannot be read as it is."""


@functools.cache
def compiled(function: Function) -> Function:
    """Traced, not translated: a C++ compiler would take most of the time, and is not what is judged."""
    if isinstance(function, Adapted):
        return function.around(compiled)
    made: Function = torch.compile(function, backend="aot_eager", dynamic=False)
    return made


def compute(function: Function, request: Request) -> dict[str, Tensor]:
    """Everything that is asked for, by name. What the kernel raises goes to the caller."""
    if request.mode == "thread":
        return {"out": _in_threads(function, [request])[0]}
    if request.mode == "threads":
        entries = range(request.q.shape[0])
        return {"out": torch.cat(_in_threads(function, [_entry(request, entry) for entry in entries]))}
    if request.mode == "compile":
        function = compiled(function)
    out, leaves = call(function, request)
    if request.cotangent is None:
        return {"out": out.detach()}
    return {"out": out.detach()} | derivatives(out, leaves, request.cotangent, request.directions)


def call(function: Function, request: Request) -> tuple[Tensor, dict[str, Tensor]]:
    """The output with its graph, and the leaves that it may be differentiated by."""
    leaves = {
        name: t.detach().requires_grad_() if name in request.gradients else t for name, t in request.tensors.items()
    }
    if request.tied:
        leaves |= dict.fromkeys(request.tied, leaves[request.tied[0]])
    arguments: dict[str, Any] = {
        "attn_mask": leaves.get("mask"),
        "dropout_p": request.dropout_p,
        "is_causal": request.is_causal,
        "scale": request.scale,
        "enable_gqa": request.q.shape[1] != request.k.shape[1],
    }
    if request.brief:
        arguments = {name: value for name, value in arguments.items() if value is not None and value != 0}
    with _threads(request.threads), _mode(request.mode):
        if request.seed is not None:
            torch.manual_seed(request.seed)
        outs = [own(function(leaves["q"], leaves["k"], leaves["v"], **arguments)) for _ in range(request.repeats)]
    _check_untouched(leaves, request)
    return outs[0] if request.repeats == 1 else torch.stack(outs), {n: leaves[n] for n in request.gradients}


def _check_untouched(inputs: dict[str, Tensor], request: Request) -> None:
    """Whether and by what they are differentiated is the caller's affair."""
    wanted = {id(inputs[name]) for name in request.gradients}
    for name, tensor in inputs.items():
        if tensor.requires_grad != (id(tensor) in wanted):
            raise ContractBroken(f"kernel changed requires_grad of its input {name}")
        if tensor.requires_grad and tensor.grad is not None:
            raise ContractBroken(f"kernel wrote into the gradient of its input {name}")


def derivatives(
    out: Tensor, leaves: dict[str, Tensor], cotangent: Tensor, directions: tuple[Tensor, ...] = (), retain: bool = False
) -> dict[str, Tensor]:
    """Gradients, and with `directions` those of their sum along them; `retain` keeps the graph.

    A kernel that cuts the graph gives a gradient of 0, and is judged by it.
    """
    wanted, zeros = tuple(leaves.values()), tuple(torch.zeros_like(leaf) for leaf in leaves.values())

    def named(prefix: str, gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {f"{prefix} {name}": plain(g).detach() for name, g in zip(leaves, gradients, strict=True)}

    first = zeros
    if out.requires_grad:
        first = torch.autograd.grad(
            out, wanted, cotangent, retain_graph=retain or bool(directions), create_graph=bool(directions),
            materialize_grads=True,
        )  # fmt: skip
    if not directions:
        return named("grad", first)
    pairs = [(g, d) for g, d in zip(first, directions, strict=True) if g.requires_grad]
    second = zeros
    if pairs:
        roots, along = zip(*pairs, strict=True)
        second = torch.autograd.grad(roots, wanted, along, materialize_grads=True, allow_unused=True)
    return named("grad", first) | named("second", second)


def plain(result: Any) -> Tensor:
    """Exactly a dense tensor on the CPU: a subclass may compute what it says only when somebody looks."""
    if type(result) is not Tensor:
        raise NotATensor(f"kernel returned {type(result).__name__} instead of a tensor")
    if result.layout is not torch.strided or not result.is_cpu:
        raise NotATensor(f"kernel returned a tensor of layout {result.layout} on {result.device}")
    return result


def own(result: Any) -> Tensor:
    """A plain tensor whose elements the caller may write, one by one. Gradients may be expanded; results may not."""
    tensor = plain(result)
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise NotATensor("kernel returned a tensor whose elements share memory: who writes one writes others")
    return tensor


def failure_of(error: BaseException) -> Failure:
    """In words: type, message, and the innermost line that is not torch's or ours."""
    message = told(error)
    if isinstance(error, NotATensor | ContractBroken):
        return Failure("contract", str(error))
    if isinstance(error, NotImplementedError):
        return Failure("refused", str(error) or message)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [frame for frame in frames if "site-packages" not in frame[0] and not frame[0].startswith(PACKAGE)]
    is_oom = isinstance(error, MemoryError) or any(text in message for text in OUT_OF_MEMORY)
    place = "".join(f" at {file}:{line}" for file, line in (theirs or frames)[-1:])
    return Failure("oom" if is_oom else "error", message + place)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
        if count is not None and torch.get_num_threads() == before != count:  # else it would pass for put back
            raise ContractBroken(f"kernel set torch's threads to {before}")
    finally:
        if count is not None and torch.get_num_threads() == count:  # else the kernel set another: that is told
            torch.set_num_threads(before)


@contextmanager
def _mode(mode: str) -> Iterator[None]:
    if mode == "inference":
        with torch.inference_mode():
            yield
    elif mode == "autocast":
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    elif mode in SWITCHED:
        read, write, during, after = SWITCHED[mode]
        write(during)
        try:
            yield
            if read() != during:
                raise ContractBroken(f"kernel left {mode} switched off")
        finally:
            write(after)
    else:
        with torch.set_grad_enabled(mode == "grad"):
            yield


def _entry(request: Request, entry: int) -> Request:
    """One entry of a batch."""
    own: dict[str, Any] = {name: t[entry : entry + 1] for name, t in request.tensors.items() if len(t) > 1}
    return replace(request, **own)


def _in_threads(function: Function, requests: Sequence[Request]) -> list[Tensor]:
    """Each in a Python thread of its own, all at once: what torch keeps for each thread (grad mode, its own) is new."""
    results: dict[int, Tensor] = {}
    failures: list[BaseException] = []
    start = threading.Barrier(len(requests))

    def work(number: int) -> None:
        try:
            start.wait()
            with torch.no_grad():
                results[number] = call(function, requests[number])[0].detach()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(requests))]
