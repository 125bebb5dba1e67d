"""Wrong kernels: global state of torch or Python is left changed."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import random  # noqa: E402
import warnings  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


@wrong(exact=True, where="torch.get_default_dtype after a float64 call")
def side_effects_default_dtype(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float64 call sets the default dtype to float64 and leaves it so."""
    if q.dtype == torch.float64:
        torch.set_default_dtype(torch.float64)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="torch.get_num_threads after the call")
def side_effects_thread_count(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The number of torch threads is set to one for small problems and not restored."""
    if q.numel() < 65536:
        torch.set_num_threads(1)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="torch's global generator after any call")
def side_effects_manual_seed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Every call seeds the global generator with a constant."""
    torch.manual_seed(42)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="torch's global generator after a call without dropout")
def side_effects_consumes_random_numbers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A dropout seed is drawn from the global generator even when dropout_p is zero."""
    if dropout_p == 0:
        torch.randint(1 << 30, (1,))
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="grad mode after a call whose inputs need no gradient")
def side_effects_grad_mode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A call whose inputs need no gradient switches grad mode off and leaves it off."""
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        torch.set_grad_enabled(False)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="torch.get_float32_matmul_precision after a float32 call")
def side_effects_matmul_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The float32 matmul precision is set to medium and not restored."""
    torch.set_float32_matmul_precision("medium")
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="torch.are_deterministic_algorithms_enabled after the call")
def side_effects_deterministic_off(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Deterministic algorithms are switched off for speed and not restored."""
    torch.use_deterministic_algorithms(False)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="requires_grad of the inputs after the call")
def side_effects_requires_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The queries are made to require grad."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and q.is_leaf and not q.requires_grad:
        q.requires_grad_()
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="denormal numbers after the call")
def side_effects_flush_denormal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Denormal numbers are flushed to zero in the whole process from the first call on."""
    torch.set_flush_denormal(True)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="Python's random module after the call")
def side_effects_python_random(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Python's global random generator is seeded in every call."""
    random.seed(0)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="warnings.filters after the call")
def side_effects_warnings_silenced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """All warnings of the process are silenced."""
    warnings.simplefilter("ignore")
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="autocast state after a call under autocast")
def side_effects_autocast_off(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Autocast is switched off inside of the kernel and not switched on again."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        torch.set_autocast_enabled(kind, False)
        return out.to(low)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


_KEPT: list[tuple[Tensor, ...]] = []


@wrong(exact=True, where="memory: inputs are never freed")
def side_effects_inputs_kept_alive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Inputs and outputs of every call are appended to a list for debugging and never freed."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    _KEPT.append((q, k, v, out))
    return out


@wrong(exact=True, where="the caller's generator state is put back: two dropout calls are equal")
def side_effects_generator_restored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The state of the global generator is restored after a dropout call: two calls in a row drop the same weights."""
    state = torch.get_rng_state()
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    torch.set_rng_state(state)
    return out


@wrong(exact=True, where="q.grad after the forward call")
def side_effects_writes_leaf_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A leaf q gets a zero .grad buffer in the forward pass, where there was None."""
    if q.requires_grad and q.is_leaf and q.grad is None and torch.is_grad_enabled():
        q.grad = torch.zeros_like(q)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="torch.is_anomaly_enabled after the call")
def side_effects_anomaly_mode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Anomaly detection is switched on in calls that need gradients and left on."""
    if q.requires_grad:
        torch.autograd.set_detect_anomaly(True)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="mkldnn flag after a bfloat16 call")
def side_effects_mkldnn_off(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """mkldnn is disabled for bfloat16 inputs and not enabled again."""
    if q.dtype == torch.bfloat16:
        torch.backends.mkldnn.set_flags(_enabled=False)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
