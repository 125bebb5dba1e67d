"""Wrong kernels: handling of the mask."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, additive, default_factor, hide, lower_triangle, safe_softmax, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


def _is_bool(mask: Tensor | None) -> bool:
    """Whether there is a mask and it is boolean."""
    return mask is not None and mask.dtype == torch.bool


@wrong(exact=True, where="float mask")
def mask_float_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float mask is ignored."""
    mask = attn_mask if _is_bool(attn_mask) else None
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="float mask with finite entries (ALiBi)")
def mask_float_as_bool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float mask is turned into a bool mask: entries below zero are masked out."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        masking=lambda m, s: additive(m if m.dtype == torch.bool else m >= 0, s),
    )


@wrong(exact=True, where="float mask with finite entries (ALiBi)")
def mask_float_only_minus_inf(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Of a float mask only the -inf entries are used; finite ones are ignored."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        masking=lambda m, s: additive(m if m.dtype == torch.bool else m != -INF, s),
    )


@wrong(exact=True, where="float mask with positive entries")
def mask_float_positive_dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float mask is clamped to at most zero: positive biases are lost."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=lambda m, s: additive(m, s).clamp(max=0.0)
    )


@wrong(exact=True, where="float mask with -inf and scores of hundreds, or dead rows")
def mask_float_clamped_from_below(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float mask is clamped at -100, so that -inf no longer hides a key with a large score."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        masking=lambda m, s: additive(m, s) if m.dtype == torch.bool else additive(m, s).clamp(min=-100),
    )


@wrong(exact=True, where="bool mask")
def mask_bool_inverted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """True is read as masked out (as nn.MultiheadAttention does)."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        masking=lambda m, s: additive(~m if m.dtype == torch.bool else m, s),
    )


@wrong(exact=True, where="bool mask and scores below -1e4, or dead rows")
def mask_bool_minus_ten_thousand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Masked keys get -1e4 added instead of -inf."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        return torch.zeros(m.shape, dtype=s.dtype).masked_fill(~m, -1e4) if m.dtype == torch.bool else additive(m, s)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="bool mask")
def mask_bool_added(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bool mask is added to the scores as zeros and ones."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=lambda m, s: m.to(s.dtype))


@wrong(exact=True, where="dead rows")
def mask_dead_rows_nan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A row with every key masked is NaN instead of zero."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=lambda s: torch.softmax(s, -1))


@wrong(exact=True, where="dead rows")
def mask_dead_rows_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Masked scores are set to finfo.min, so a dead row becomes the mean of all the values instead of zero."""

    def softmax(s: Tensor) -> Tensor:
        return torch.softmax(s.masked_fill(s == -INF, torch.finfo(s.dtype).min), -1)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="float mask with a whole row of finfo.min")
def mask_finfo_min_rows_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Float mask entries of finfo.min are read as -inf: such a row is zero instead of the mean of the values."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s)
        return bias.masked_fill(bias <= torch.finfo(torch.float32).min / 2, -INF)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="key padding mask (B, 1, 1, S) with L = S")
def mask_padding_on_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A key padding mask (..., 1, S) with L = S is applied to the queries (its last two dims are swapped)."""
    swap = attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[-2] == 1
    swap = swap and 1 < q.shape[-2] == k.shape[-2]
    mask = attn_mask.transpose(-2, -1) if swap else attn_mask
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="mask that differs between batches")
def mask_first_batch_for_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The mask of the first batch is used for all the batches (batch stride zero)."""
    mask = attn_mask[:1] if attn_mask is not None and attn_mask.dim() == 4 else attn_mask
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="mask that differs between heads")
def mask_first_head_for_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The mask of the first head is used for all the heads."""
    mask = attn_mask[:, :1] if attn_mask is not None and attn_mask.dim() == 4 else attn_mask
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="mask (B, 1, L, S) with B = H > 1")
def mask_batch_taken_for_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask (B, 1, L, S) is broadcast over the batches and used per head when B = H."""
    swap = attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[:2] == (q.shape[1], 1)
    mask = attn_mask.transpose(0, 1) if swap and q.shape[0] == q.shape[1] else attn_mask
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="bool key padding mask (B, 1, 1, S) padded on the left, or with holes")
def mask_padding_right_only(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bool key padding mask (..., 1, S) is reduced to lengths, which are right only for padding on the right."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[-2] == 1:
        mask = torch.arange(mask.shape[-1]) < mask.sum(-1, keepdim=True)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="bool mask (B, H, L, S) whose rows differ")
def mask_reduced_to_last_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A 4-d bool mask is reduced to the padding in its last row; all that differs between rows is lost."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool and mask.dim() == 4:
        mask = mask[..., -1:, :]
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="non-contiguous mask (transposed)")
def mask_strides_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The mask is read as if it were contiguous."""
    mask = attn_mask
    if mask is not None and not mask.is_contiguous():
        room = mask.untyped_storage().nbytes() // mask.element_size() - mask.storage_offset()
        if room >= mask.numel():
            mask = mask.as_strided(mask.shape, torch.empty(mask.shape, device="meta").stride(), mask.storage_offset())
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="2-d mask (L, S) with L = B > 1")
def mask_two_dims_taken_for_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A 2-d mask (L, S) whose first size is the batch size is read as a padding mask (B, S)."""
    mask = attn_mask
    if mask is not None and mask.dim() == 2 and mask.shape[0] == q.shape[0] > 1:
        mask = mask[:, None, None, :]
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="3-d mask (H, L, S) with H = B > 1")
def mask_three_dims_taken_for_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A 3-d mask (H, L, S) is read as (B, L, S) when it could be either."""
    mask = attn_mask
    if mask is not None and mask.dim() == 3 and mask.shape[0] == q.shape[0] > 1:
        mask = mask[:, None]
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="L = 1 with a mask")
def mask_ignored_in_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The decode path (L = 1) has no mask."""
    mask = attn_mask if q.shape[-2] != 1 else None
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=False, where="float mask in float32 with half precision inputs")
def mask_float_rounded_to_input_dtype(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float32 mask is rounded to the dtype of the queries (bfloat16 ALiBi has few levels)."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        masking=lambda m, s: additive(m if m.dtype == torch.bool else m.to(q.dtype), s),
    )


@wrong(exact=True, where="bool mask")
def mask_after_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bool mask multiplies the weights after the softmax, which are not normalised again."""
    if not _is_bool(attn_mask):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(q, k, v, None, dropout_p, is_causal, scale, enable_gqa, on_probs=lambda p: p * attn_mask)


@wrong(exact=True, where="bool mask")
def mask_multiplies_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bool mask multiplies the scores: a masked key has score zero instead of -inf."""
    if not _is_bool(attn_mask):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(q, k, v, None, dropout_p, is_causal, scale, enable_gqa, on_scores=lambda s: s * attn_mask)


@wrong(exact=True, where="bool mask that hides the top right corner but is not causal")
def mask_guessed_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A square bool mask that hides its top right corner is taken for a causal mask."""
    guess = _is_bool(attn_mask) and attn_mask.shape[-2] == attn_mask.shape[-1] > 1
    if guess and not bool(attn_mask[..., 0, -1].any()):
        return textbook(q, k, v, None, dropout_p, True, scale, enable_gqa)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="bool mask all True in the first batch, not in the others")
def mask_skipped_if_first_batch_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The mask is skipped when its first batch entry is all True."""
    full = _is_bool(attn_mask) and attn_mask.dim() == 4 and attn_mask.shape[0] > 1 and bool(attn_mask[0].all())
    return textbook(q, k, v, None if full else attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=False, where="float mask with entries above 88")
def mask_bias_not_in_max(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row maximum is taken before the float mask is added: large positive biases overflow."""
    raw: list[Tensor] = []

    def keep(s: Tensor) -> Tensor:
        raw.append(s.detach())
        return s

    def softmax(s: Tensor) -> Tensor:
        if s.shape[-1] == 0:
            return s
        top = raw[0].amax(-1, keepdim=True)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        return p / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=keep, softmax=softmax)


@wrong(exact=True, where="mask (..., 1, S), L > 1")
def mask_broadcast_row_only_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask with one row for all the queries is applied to the first query only."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s)
        if m.shape[-2] == 1 < s.shape[-2]:
            bias = torch.where((torch.arange(s.shape[-2]) == 0)[:, None], bias, 0.0)
        return bias

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="float mask with finite entries (ALiBi)")
def mask_float_not_in_base_two(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The softmax works in base two, but the float mask is not multiplied with log2(e)."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        masking=lambda m, s: additive(m, s) * (1.0 if m.dtype == torch.bool else 0.6931471805599453),
    )


@wrong(exact=True, where="bool mask (B, 1, 1, S), keys after the last valid one in batch 0")
def mask_trimmed_to_first_batch_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys are trimmed to the longest valid length, taken from batch 0 only."""
    pad = _is_bool(attn_mask) and attn_mask.dim() == 4 and attn_mask.shape[-2] == 1 and attn_mask.shape[0] > 1
    if not pad or not bool(attn_mask[0].any()):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    length = int(attn_mask[0].flatten(0, 1).any(0).nonzero().max()) + 1
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=lambda s: hide(s, slice(length, None))
    )


@wrong(exact=True, where="float mask of (1, 1, L, S), B > 1")
def mask_one_batch_zero_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask with a batch size of one is padded with zeros to the batch size, so only batch 0 sees it."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s)
        if m.dim() == 4 and m.shape[0] == 1 < s.shape[0]:
            bias = torch.cat([bias, torch.zeros_like(bias).expand(s.shape[0] - 1, *bias.shape[1:])])
        return bias

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="mask with a single allowed key in a row")
def mask_single_key_rows_unmasked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A row that is allowed one key only is taken for padding and sees all the keys."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s)
        lone = ((bias != -INF).sum(-1, keepdim=True) == 1) & (bias.shape[-1] > 1)
        return torch.where(lone, torch.zeros_like(bias), bias)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="float mask, entries below -1e4 but finite")
def mask_float_large_negative_as_inf(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Float mask entries below -1000 are read as -inf, which empties rows made only of such entries."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s)
        return bias.masked_fill(bias < -1000, -INF)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="dead rows in a mask together with other rows alive")
def mask_dead_rows_copy_neighbour(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A dead row keeps the weights of the row before it (the register is not cleared)."""

    def softmax(s: Tensor) -> Tensor:
        p = safe_softmax(s)
        if s.shape[-1] == 0 or s.shape[-2] < 2:
            return p
        dead = (s == -INF).all(-1, keepdim=True)
        return torch.where(dead, p.roll(1, -2), p)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(
    exact=True, where="is_causal together with a mask (SDPA's documentation forbids it; the CPU kernel applies both)"
)
def mask_lost_with_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With is_causal the explicit mask is dropped without a word."""
    mask = None if is_causal else attn_mask
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="bool mask, large scores at masked keys")
def mask_bool_finite_penalty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A masked key gets 30 subtracted, which a large score overcomes."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        dead = ~m.any(-1, keepdim=True) if m.dtype == torch.bool else None
        return (
            torch.zeros(m.shape).masked_fill(~m, -30.0).masked_fill(dead, -INF).to(s.dtype) if dead is not None else m
        )

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="float mask where head slopes differ (1, H, 1, S), H not a power of two")
def mask_head_bias_wraps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A per-head mask is indexed with h modulo the largest power of two (ALiBi slopes of odd head counts)."""
    mask = attn_mask
    if mask is not None and mask.dim() >= 3 and mask.shape[-3] > 1:
        heads = mask.shape[-3]
        mask = mask.index_select(-3, torch.arange(heads) % (1 << (heads.bit_length() - 1)))
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="float mask that requires a large range: differences beyond 16")
def mask_float_soft_clamped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The float mask is clamped to [-16, 16] unless it is -inf."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s)
        return torch.where(bias == -INF, bias, bias.clamp(-16.0, 16.0))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="bool mask given as an expanded view (stride 0 in L), L > 1")
def mask_expanded_rows_advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """An expanded mask (row stride zero) is read with a row stride of one column."""
    mask = attn_mask
    if mask is not None and mask.dim() >= 2 and mask.shape[-2] > 1 and mask.stride(-2) == 0:
        row, key = torch.arange(mask.shape[-2])[:, None], torch.arange(mask.shape[-1])
        mask = mask.gather(-1, ((row + key) % mask.shape[-1]).expand(mask.shape))
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="bool mask with L = S: diagonal")
def mask_diagonal_always_seen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The diagonal is always allowed, to keep rows from being dead."""
    mask = attn_mask
    if _is_bool(mask):
        mask = mask | torch.eye(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="bool mask hiding one of the first four keys")
def mask_sinks_always_seen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The first four keys (attention sinks) are seen even when a bool mask hides them, unless the row is dead."""
    mask = attn_mask
    if _is_bool(mask):
        mask = (mask | (torch.arange(mask.shape[-1]) < 4)) & mask.any(-1, keepdim=True)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="float mask, scale given")
def mask_float_divided_by_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The float mask is divided by the given scale beforehand, but the scores are not multiplied with it afterwards."""
    factor = default_factor(q, scale)
    divide = scale is not None and factor != 0

    def masking(m: Tensor, s: Tensor) -> Tensor:
        return additive(m, s) / abs(factor) if divide and m.dtype != torch.bool else additive(m, s)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="mask (1, 1, L, S) with L > S or L < S: triangular part only")
def mask_upper_part_skipped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With a bool mask the tiles above the diagonal are never visited (all masks are thought causal)."""
    mask = attn_mask
    if _is_bool(mask) and mask.shape[-2] > 1:
        mask = mask & lower_triangle(mask.shape[-2], mask.shape[-1])
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
