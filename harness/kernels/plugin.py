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

MOST_TOLD = 2000  # characters


class PluginError(BadInput):
    """A user's kernel or model that cannot be loaded; the message names the file and the reason."""


def run_sdpa_signature(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> tuple[Tensor, None]:
    for name, asked in (("softcap", call.softcap), ("sinks", call.sinks)):
        if asked is not None:
            raise Unsupported(f"SDPA's signature has no {name}")
    if call.need_weights:
        raise Unsupported("SDPA's signature returns no attention weights")
    # SDPA's is_causal is aligned top-left, ours to q_start: they agree only where query 0 stands at key 0.
    bare = call.mask is None and call.left is None and call.right is None
    is_causal = call.causal and bare and isinstance(call.q_start, int) and call.q_start == 0
    out = function(
        q,
        k,
        v,
        attn_mask=None if is_causal else dense_mask(q, k, call),
        dropout_p=call.dropout_p,
        is_causal=is_causal,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out, None


def dense_mask(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor | None:
    """Mask, causal and window as one tensor in SDPA's convention, which wants at least (L, S)."""
    allowed = call.allowed(q, k)
    if allowed is None:
        return None
    mask = allowed if call.bias is None else call.bias.masked_fill(~allowed, float("-inf"))
    return mask.expand(q.shape[2], k.shape[2]) if mask.ndim < 2 else mask


def from_function(function: Callable[..., Tensor], name: str, **options: Any) -> Kernel:
    return Kernel(name, functools.partial(run_sdpa_signature, function), **options)


def load(spec: str) -> Kernel:
    """`my_kernels.py:fast` or `package.module:fast`. Not shielded: a user's kernel is judged as it is."""
    function, origin = find_function(spec)
    return from_function(function, spec, shielded=False, origin=origin)


def find_function(spec: str) -> tuple[Callable[..., Any], str]:
    """A user's function by `file.py:name` or `package.module:name`, and the file it came from."""
    place, _, attribute = spec.rpartition(":")
    module, origin = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        found = ", ".join(n for n in vars(module) if callable(vars(module)[n]) and not n.startswith("_")) or "none"
        raise PluginError(f"{spec}: no function {attribute!r} in {place}; callables there: {found}")
    return function, origin


def _import_file(path: Path) -> tuple[Any, str]:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PluginError(f"{path}: cannot be read: {error.strerror}") from error
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
        raise PluginError(f"{place}: importing it raised {told(error)}") from error
