"""Wrong kernels: the forward pass is right, the backward pass is not."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, Saved, default_factor, manual, right_rule, safe_softmax, score_grad, ste, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@wrong(exact=True, where="gradient of q")
def gradients_q_detached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The queries are detached: they get no gradient."""
    return textbook(q.detach(), k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="gradient of k")
def gradients_k_detached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The keys are detached: they get no gradient."""
    return textbook(q, k.detach(), v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="gradient of v")
def gradients_v_detached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The values are detached: they get no gradient."""
    return textbook(q, k, v.detach(), attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="gradient of q and k")
def gradients_weights_detached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights are detached: only the values get a gradient (q and k get zeros)."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_probs=lambda p: p.detach() + 0.0 * p
    )


@wrong(exact=True, where="gradient of k")
def gradients_k_unscaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of the keys lacks the scale."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        return dq, dk / saved.factor if saved.factor else dk, dv, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradient of q, scale given")
def gradients_given_scale_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward pass uses 1/sqrt(D) although a scale was given."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        p = saved.probs()
        ds = score_grad(p, grad @ saved.v.transpose(-2, -1))
        factor = default_factor(q, None)
        return ds @ saved.k * factor, ds.transpose(-2, -1) @ saved.q * factor, p.transpose(-2, -1) @ grad, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients of q and k")
def gradients_softmax_term_missing(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The term rowsum(P dP) is missing in the gradient of the softmax."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        p = saved.probs()
        ds = p * (grad @ saved.v.transpose(-2, -1))
        return ds @ saved.k * saved.factor, ds.transpose(-2, -1) @ saved.q * saved.factor, p.mT @ grad, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="only v requires grad")
def gradients_only_v_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When only v requires grad the backward pass returns early with a zero gradient."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        return dq, dk, dv if saved.needs[0] or saved.needs[1] else torch.zeros_like(dv), db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="v does not require grad, gradients of q and k")
def gradients_wrong_when_v_frozen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When v needs no gradient, rowsum(P dP), a by-product of its pass, is taken as zero."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        if saved.needs[2]:
            return right_rule(saved, grad)
        p = saved.probs()
        ds = p * (grad @ saved.v.transpose(-2, -1))
        return ds @ saved.k * saved.factor, ds.transpose(-2, -1) @ saved.q * saved.factor, None, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="only q requires grad")
def gradients_only_q_unscaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When k needs no gradient, the gradient of q lacks the scale, which the pass over k would apply."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        return dq if saved.needs[1] or not saved.factor else dq / saved.factor, dk, dv, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="float mask that requires grad")
def gradients_mask_missing(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float mask that requires grad gets none."""
    mask = None if attn_mask is None else attn_mask.detach()
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="float mask that requires grad and is broadcast over the batch")
def gradients_mask_of_first_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of a broadcast float mask comes from the first batch only, it is not summed."""
    spread = attn_mask is not None and (attn_mask.dim() < 4 or attn_mask.shape[0] == 1)

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        if spread and db.dim() == 4:
            db = torch.cat([db[:1], torch.zeros_like(db[1:])])
        return dq, dk, dv, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="float mask that requires grad")
def gradients_mask_scaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of the float mask is multiplied with the scale."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        return dq, dk, dv, db * saved.factor

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="second derivatives")
def gradients_second_incomplete(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In the backward pass the weights are taken as constants: second derivatives lack their part."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        p = saved.probs().detach()
        ds = score_grad(p, grad @ saved.v.transpose(-2, -1))
        return ds @ saved.k * saved.factor, ds.transpose(-2, -1) @ saved.q * saved.factor, p.mT @ grad, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="second derivatives")
def gradients_second_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradients are detached from the graph: second derivatives are zero, without an error."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        anchor = 0.0 * (saved.q.sum() + saved.k.sum() + saved.v.sum() + grad.sum())
        return tuple(g.detach() + anchor for g in right_rule(saved, grad))

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients, B > 1")
def gradients_divided_by_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradients of q, k and v are divided by the batch size."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        return dq / q.shape[0], dk / q.shape[0], dv / q.shape[0], db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients with is_causal")
def gradients_causal_forgotten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward pass computes the weights again without the causal mask."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        bias = None if is_causal and attn_mask is None else saved.bias
        return right_rule(Saved(saved.q, saved.k, saved.v, bias, saved.factor, saved.needs), grad)

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="backward twice (retain_graph)")
def gradients_second_backward_wrong(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward pass overwrites the saved weights: a second backward with retain_graph is wrong."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        p = saved.memo["probs"] if saved.memo["probs"].shape == saved.probs().shape else saved.probs()
        used = "used" in saved.memo
        weights = p if used else saved.probs()
        dp = grad @ saved.v.transpose(-2, -1)
        ds = score_grad(weights, dp)
        saved.memo["probs"], saved.memo["used"] = ds.detach(), ds.detach()
        dv = weights.transpose(-2, -1) @ grad
        return ds @ saved.k * saved.factor, ds.transpose(-2, -1) @ saved.q * saved.factor, dv, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradient of the output that is not contiguous")
def gradients_output_gradient_assumed_contiguous(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of the output is read as if contiguous; a transposed one is scrambled."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        if not grad.is_contiguous() and grad.untyped_storage().nbytes() >= grad.numel() * grad.element_size():
            grad = grad.as_strided(grad.shape, torch.empty(grad.shape, device="meta").stride(), 0)
        return right_rule(saved, grad)

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients with dead rows")
def gradients_dead_rows_nan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Dead rows are set to zero after a NaN softmax: the forward pass is right, the gradients are NaN."""

    def softmax(s: Tensor) -> Tensor:
        return torch.softmax(s, -1).masked_fill((s == -INF).all(-1, keepdim=True), 0.0) if s.shape[-1] else s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=False, where="gradients of k and v, half precision inputs, many queries")
def gradients_key_accumulated_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradients of k and v are accumulated over tiles of 8 queries in bfloat16 (half precision inputs)."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        if q.dtype not in (torch.float16, torch.bfloat16):
            return dq, dk, dv, db
        p = saved.probs()
        dk, dv = torch.zeros_like(dk), torch.zeros_like(dv)
        for r in range(0, grad.shape[-2], 8):
            rows = slice(r, r + 8)
            dk = (dk + db[..., rows, :].mT @ saved.q[..., rows, :] * saved.factor).bfloat16().to(dk.dtype)
            dv = (dv + p[..., rows, :].mT @ grad[..., rows, :]).bfloat16().to(dv.dtype)
        return dq, dk, dv, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients of k and v, S > 512")
def gradients_keys_beyond_512_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys and values past 512 get no gradient."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        live = (torch.arange(dk.shape[-2]) < 512).to(dk.dtype)[:, None]
        return dq, dk * live, dv * live, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients of k and v, S > 32 and S % 32 != 0")
def gradients_last_key_tile_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last partial tile of 32 keys gets no gradient."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        keys = dk.shape[-2]
        live = (torch.arange(keys) < (keys // 32 * 32 if keys > 32 else keys)).to(dk.dtype)[:, None]
        return dq, dk * live, dv * live, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradient of q, S > 64")
def gradients_query_tail_overwritten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of q is written, not added, per tile of 64 keys: only the last tile counts."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        _, dk, dv, db = right_rule(saved, grad)
        last = (saved.k.shape[-2] - 1) // 64 * 64
        return db[..., last:] @ saved.k[..., last:, :] * saved.factor, dk, dv, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="the gradient tensor handed to backward")
def gradients_output_gradient_overwritten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward pass scales the gradient of the output in place and does not restore it."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        grads = right_rule(saved, grad.clone())
        with torch.no_grad():
            grad.mul_(saved.factor)
        return grads

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="k and v are the same tensor")
def gradients_shared_key_value_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When k and v are one tensor (latent attention) only the gradient through v is kept."""
    keys = k.detach() if k is v else k
    return textbook(q, keys, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="gradients, S > 1024")
def gradients_missing_for_long_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Above 1024 keys the kernel runs under no_grad to save memory: the output has no gradient."""
    if k.shape[-2] > 1024:
        with torch.no_grad():
            return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=False, where="gradients of float64 inputs")
def gradients_double_in_float(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For float64 inputs the backward pass runs in float32."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        if grad.dtype != torch.float64:
            return right_rule(saved, grad)
        bias = None if saved.bias is None else saved.bias.float()
        low = Saved(saved.q.float(), saved.k.float(), saved.v.float(), bias, saved.factor, saved.needs)
        return tuple(g.double() for g in right_rule(low, grad.float()))

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=False, where="gradients, every dtype but double")
def gradients_from_rounded_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward pass uses weights that were saved as bfloat16."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        p = saved.probs()
        p = ste(p, p.bfloat16()) if grad.dtype != torch.float64 else p
        ds = score_grad(p, grad @ saved.v.transpose(-2, -1))
        return ds @ saved.k * saved.factor, ds.transpose(-2, -1) @ saved.q * saved.factor, p.mT @ grad, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradient of v with a mask or causal")
def gradients_v_ignores_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of v is computed with weights that ignore mask and causal."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, _, db = right_rule(saved, grad)
        p = safe_softmax(saved.q @ saved.k.transpose(-2, -1) * saved.factor)
        return dq, dk, p.transpose(-2, -1) @ grad, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients of q and k, D_v != D")
def gradients_value_dim_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward pass takes its default scale from D_v."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        p = saved.probs()
        ds = score_grad(p, grad @ saved.v.transpose(-2, -1))
        factor = default_factor(v, scale)
        return ds @ saved.k * factor, ds.transpose(-2, -1) @ saved.q * factor, p.transpose(-2, -1) @ grad, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradient of k, L < S (decode, chunked prefill)")
def gradients_k_cut_at_query_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys past position L get no gradient."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        dq, dk, dv, db = right_rule(saved, grad)
        live = (torch.arange(dk.shape[-2]) < q.shape[-2]).to(dk.dtype)[:, None]
        return dq, dk * live, dv, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)


@wrong(exact=True, where="gradients of q and k, large output gradients")
def gradients_clipped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradients of the scores are clipped to [-0.1, 0.1] for stability."""

    def rule(saved: Saved, grad: Tensor) -> Grads:
        p = saved.probs()
        ds = score_grad(p, grad @ saved.v.transpose(-2, -1)).clamp(-0.1, 0.1)
        return ds @ saved.k * saved.factor, ds.transpose(-2, -1) @ saved.q * saved.factor, p.mT @ grad, ds

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule)
