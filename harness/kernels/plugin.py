"""Any callable with SDPA's signature as a kernel, and the loading of a user's own from `file.py:function`."""

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.errors import BadInput
from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.domain import ATTRIBUTE, domain_of
from harness.kernels.domain_file import domain_file, read_domains
from harness.kernels.layouts.layout import adapt
from harness.kernels.sources import digest_of, sources_of
from harness.text import plain

MOST_TOLD = 2000  # characters


class PluginError(BadInput):
    """A user's kernel or model that cannot be loaded; the message names the file and the reason."""


def run_sdpa_signature(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> tuple[Tensor, None]:
    arguments = sdpa_arguments(q, k, v, call)
    try:
        return function(q, k, v, **arguments), None
    except NotImplementedError as refusal:  # however a kernel says that it does not do this call
        if isinstance(refusal, Unsupported):
            raise
        raise Unsupported(str(refusal) or told(refusal)) from refusal


def sdpa_arguments(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> dict[str, Any]:
    """A call in SDPA's words, all but q, k and v; Unsupported for what those cannot say."""
    for name, asked in (("softcap", call.softcap), ("sinks", call.sinks)):
        if asked is not None:
            raise Unsupported(f"SDPA's signature has no {name}")
    if call.need_weights:
        raise Unsupported("SDPA's signature returns no attention weights")
    # SDPA's is_causal is aligned top-left, ours to q_start: they agree only where query 0 stands at key 0.
    bare = call.mask is None and call.left is None and call.right is None
    is_causal = call.causal and bare and isinstance(call.q_start, int) and call.q_start == 0
    return {
        "attn_mask": None if is_causal else dense_mask(q, k, call),
        "dropout_p": call.dropout_p,
        "is_causal": is_causal,
        "scale": None if call.is_default_scale else call.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }


def dense_mask(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor | None:
    """Mask, causal and window as one tensor in SDPA's convention, which wants at least (L, S)."""
    allowed = call.allowed(q, k)
    if allowed is None:
        return None
    mask = allowed if call.bias is None else call.bias.masked_fill(~allowed, float("-inf"))
    return mask.expand(q.shape[2], k.shape[2]) if mask.ndim < 2 else mask


def from_function(function: Callable[..., Any], name: str, **options: Any) -> Kernel:
    """The function, in whatever layout its domain says, as a kernel."""
    function = adapt(function)
    return Kernel(name, functools.partial(run_sdpa_signature, function), domain=domain_of(function), **options)


def load(spec: str) -> Kernel:
    """`my_kernels.py:fast` or `package.module:fast`. Not shielded: a user's kernel is judged as it is."""
    function, origin = find_kernel_function(spec)
    return from_function(function, spec, shielded=False, origin=origin)


def find_kernel_function(spec: str) -> tuple[Callable[..., Any], str]:
    """A user's kernel with SDPA's signature and its domain, and where it came from.

    Whatever its own layout is, and wherever its domain is declared: at the function, or in a file beside its own.
    """
    function, origin = find_function(spec)
    path, _, _ = origin.rpartition(" sha256:")
    sources = sources_of(spec)
    if len(sources) > 1:  # an edited helper, or another domain, is another kernel: a run is not resumed with it
        origin = f"{path} sha256:{digest_of(sources)[:16]}"
    file = domain_file(Path(path))
    if not path or not file.is_file():
        return adapt(function), origin
    attribute = spec.rpartition(":")[2]
    domain = read_domains(file, _callables(_import(spec)[0])).get(attribute)
    if domain is not None and hasattr(function, ATTRIBUTE):
        raise PluginError(f"{spec}: its domain is declared twice, by its decorator and in {file}")
    return adapt(function, domain), origin


def find_function(spec: str) -> tuple[Callable[..., Any], str]:
    """A user's function by `file.py:name` or `package.module:name`, and the file it came from."""
    place, _, attribute = spec.rpartition(":")
    module, origin = _import(spec)
    function = getattr(module, attribute, None)
    if not callable(function):
        found = ", ".join(_callables(module)) or "none"
        raise PluginError(f"{spec}: no function {attribute!r} in {place}; callables there: {found}")
    return function, origin


def file_digest(spec: str) -> str | None:
    """Of the files that the kernel is made of, as they are now; None where none of them is the user's own."""
    if spec.rpartition(":")[0].endswith(".py"):
        _source(Path(spec.rpartition(":")[0]))  # told, where it cannot be read
    sources = sources_of(spec)
    return digest_of(sources) if sources else None


def _callables(module: Any) -> list[str]:
    return [name for name in vars(module) if callable(vars(module)[name]) and not name.startswith("_")]


def _import(spec: str) -> tuple[Any, str]:
    place = spec.rpartition(":")[0]
    return _import_file(Path(place)) if place.endswith(".py") else _import_module(place)


def _source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PluginError(f"{path}: cannot be read: {error.strerror}") from error


def _import_file(path: Path) -> tuple[Any, str]:
    source = _source(path)
    digest = hashlib.sha256(source).hexdigest()
    origin = f"{path} sha256:{digest[:16]}"
    # Once a process for each file and content: it may compile for minutes, and dozens of cases ask for it.
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    name = f"harness_plugin_{place[:8]}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name], origin
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        # Not by the loader: its bytecode cache misses an edit within a second that keeps the size.
        _execute(lambda: exec(compile(source, str(path), "exec"), vars(module)), str(path))
    except BaseException:
        del sys.modules[name]  # half a module is none
        raise
    return module, origin


def _import_module(name: str) -> tuple[Any, str]:
    module = _execute(lambda: importlib.import_module(name), name)
    file = getattr(module, "__file__", None)
    if file is None:
        return module, name
    return module, f"{file} sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"


def told(error: BaseException) -> str:
    """Type and message of what foreign code raised; its own way to say it may raise too, or say megabytes."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]}… ({len(text)} characters)"


def _execute(importing: Callable[[], Any], place: str) -> Any:
    try:
        return importing()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's file raises while it is imported
        raise PluginError(f"{place}: importing it raised {plain(told(error))}") from error
