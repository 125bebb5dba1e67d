"""The smallest call that still fails: every part that can go goes, as long as there is time.

A way to make a call smaller is a function Request -> Request or None. Where a kernel fails only after other calls it is
applied to all of them alike.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from harness.battery.result import FAILING, Finding
from harness.candidate.request import DIFFERENTIABLE, Request
from harness.diagnosis.evidence import Witness, with_tensors

Way = Callable[[Request], Request | None]
Sequenced = tuple[Request, ...]
TENSORS = ("q", "k", "v")
MOST_SINGLE = 48  # elements that are tried one by one
ROUNDS = 4
FOR_NUMBERS_S = 1.0
SIZES = {
    "batch": "batch entries", "heads": "key heads", "groups": "query heads for each key head", "rows": "queries",
    "keys": "keys", "channels": "channels", "value channels": "value channels",
}  # fmt: skip


@dataclass(frozen=True)
class Smallest:
    requests: Sequenced  # the last one fails, after those before it
    finding: Finding
    needs: tuple[str, ...]
    tried: int


class Shrinker:
    """`worst`: the indices of the worst element, which are kept longest."""

    def __init__(self, witness: Witness, requests: Sequenced, finding: Finding, worst: tuple[int, ...], until: float):
        self.witness, self.requests, self.finding = witness, requests, finding
        self.worst = (*worst, 0, 0, 0, 0)[:4] if worst else (0, 0, 0, 0)
        self.until, self.tried = until, 0
        self.remembers = len(requests) > 1  # what fails alone must do so in a kernel that was asked nothing before
        self.needs: dict[str, None] = {}

    def run(self) -> Smallest:
        self._without_earlier()
        self._plainer()
        for _ in range(ROUNDS):
            before = _size(self.requests[-1])
            self._smaller()
            self._plainer()
            if _size(self.requests[-1]) == before or not self._has_time:
                break
        self._numbers()
        return Smallest(self.requests, self.finding, (*self.needs, *self._sizes()), self.tried)

    def _sizes(self) -> Iterator[str]:
        """Those of which one less passes: each was tried."""
        if self._has_time:
            for name in ("batch", "heads", "groups", "rows", "keys", "channels", "value channels"):
                if (n := self._count(name)) > 1:
                    yield f"{n} {SIZES[name]}"

    @property
    def _has_time(self) -> bool:
        return time.perf_counter() < self.until

    def _try(self, way: Way) -> bool:
        """Taken if the call still fails as it did."""
        try:
            changed = tuple(way(request) for request in self.requests)
        except (RuntimeError, IndexError, ValueError):
            return False
        if any(each is None for each in changed):
            return False
        return self._take(tuple(each for each in changed if each is not None))

    def _take(self, requests: Sequenced) -> bool:
        if not self._has_time:
            return False
        self.tried += 1
        if self.remembers:
            self.witness.refresh()
        finding = self.witness.finding(requests[-1], requests[:-1])
        if (
            finding.status not in FAILING
            or finding.status != self.finding.status
            or _kind(finding) != _kind(self.finding)
        ):
            return False
        self.requests, self.finding = requests, finding
        return True

    def _without_earlier(self) -> None:
        number = 0
        while number < len(self.requests) - 1 and self._has_time:
            if not self._take(self.requests[:number] + self.requests[number + 1 :]):
                number += 1

    def _plainer(self) -> None:
        """Circumstances that can be left out; what cannot is needed."""
        self.needs.clear()
        for words, way, has in self._circumstances():
            if has(self.requests[-1]) and not self._try(way) and self._has_time:
                self.needs[words] = None

    def _circumstances(self) -> Iterator[tuple[str, Way, Callable[[Request], bool]]]:
        request = self.requests[-1]
        yield (
            f"mode {request.mode}",
            lambda r: replace(r, mode="grad" if r.gradients else "no_grad"),
            lambda r: r.mode not in ("grad", "no_grad"),
        )
        yield "gradients", _without_gradients, lambda r: bool(r.gradients)
        for name in DIFFERENTIABLE:
            yield (
                f"the gradient of {name}", partial(_without_gradient, name=name),
                partial(_has_gradient_among_others, name=name),
            )  # fmt: skip
        yield "second derivatives", lambda r: replace(r, directions=()), lambda r: bool(r.directions)
        yield f"{request.threads} threads", lambda r: replace(r, threads=None), lambda r: r.threads is not None
        yield "one tensor as several inputs", lambda r: replace(r, tied=()), lambda r: bool(r.tied)
        yield "tensors changed in place", lambda r: replace(r, reuse=None), lambda r: r.reuse is not None
        yield "arguments left out", lambda r: replace(r, brief=False), lambda r: r.brief
        for name in (*TENSORS, "mask", "cotangent"):
            yield (
                f"strides of {name}", partial(_contiguous, name=name), partial(_has_strides, name=name),
            )  # fmt: skip
        yield f"dtype {str(request.q.dtype)[6:]}", _in_float32, lambda r: r.q.dtype != torch.float32
        yield "dropout", lambda r: replace(r, dropout_p=0.0), lambda r: r.dropout_p > 0
        yield "is_causal", lambda r: replace(r, is_causal=False), lambda r: r.is_causal
        kind = "" if request.mask is None else "bool" if request.mask.dtype == torch.bool else "float"
        yield f"a {kind} mask", _without_mask, lambda r: r.mask is not None
        yield f"scale {request.scale}", lambda r: replace(r, scale=None), lambda r: r.scale is not None

    def _smaller(self) -> None:
        b, h, row, _ = self.worst
        G = max(_groups(self.requests[-1]), 1)
        for name, way, at in (
            ("batch", _at_batches, b),
            ("heads", _at_key_heads, h // G),
            ("groups", _at_group_heads, h % G),
        ):
            for start in dict.fromkeys((at, 0)):
                self._reduce(partial(_from, way, start), name)
        for start in dict.fromkeys((row, 0)):
            self._reduce(partial(_from, _at_rows, start), "rows")
        self._reduce(lambda n: lambda r: _at_keys(r, 0, n), "keys")
        self._reduce(lambda n: lambda r: _at_keys(r, r.k.shape[2] - n, n), "keys")
        if self._count("rows") == self._count("keys"):
            self._reduce(lambda n: lambda r: _at_both(r, n), "rows")
        if self._count("channels") == self._count("value channels"):
            self._reduce(lambda n: lambda r: _at_channels(r, n, n), "channels")
        self._reduce(lambda n: lambda r: _at_channels(r, n, None), "channels")
        self._reduce(lambda n: lambda r: _at_channels(r, None, n), "value channels")

    def _count(self, what: str) -> int:
        request = self.requests[-1]
        (B, _, L, D), (_, H_kv, S, D_v) = request.q.shape, request.v.shape
        sizes = {"batch": B, "heads": H_kv, "groups": _groups(request), "rows": L, "keys": S}
        return (sizes | {"channels": D, "value channels": D_v})[what]

    def _reduce(self, way_to: Callable[[int], Way], what: str) -> None:
        """To the fewest: by powers of two, then between the last that passed and the first that fails."""
        n = self._count(what)
        if n <= 1:
            return
        low, size = 0, 1
        while size < n and self._has_time:
            if self._try(way_to(size)):
                break
            low, size = size, 2 * size
        else:
            size = n
        while size - low > 1 and self._has_time:
            middle = (low + size) // 2
            if self._try(way_to(middle)):
                size = middle
            else:
                low = middle
        if size == n and n > 2:
            self._try(way_to(n - 1))

    def _numbers(self) -> None:
        """The simplest that still fail; a little longer than there is time, for a script wants short numbers."""
        self.until += FOR_NUMBERS_S
        for names in ((*TENSORS, "cotangent"), TENSORS):
            if all(getattr(self.requests[-1], name) is not None for name in names) and self._try(
                partial(_redrawn, names)
            ):
                break
        for name in (*TENSORS, "cotangent"):
            if getattr(self.requests[-1], name) is None:
                continue
            for change in (torch.zeros_like, torch.ones_like, _drawn, torch.round, _one_digit):
                if self._try(partial(_changed, name=name, change=change)):
                    break
            if getattr(self.requests[-1], name).numel() <= MOST_SINGLE:
                for index in range(getattr(self.requests[-1], name).numel()):
                    self._try(partial(_changed, name=name, change=partial(_without_element, index=index)))
        mask = self.requests[-1].mask
        if mask is not None and mask.numel() <= MOST_SINGLE:
            for index in range(mask.numel()):
                self._try(partial(_changed, name="mask", change=partial(_opened, index=index)))
            self._try(partial(_changed, name="mask", change=_round_finite))


def _kind(finding: Finding) -> str:
    """What may not change on the way: what fails, and how."""
    return (
        finding.reason.split(":")[0]
        if finding.status == "error"
        else "out"
        if finding.tensor in ("", "out")
        else "grad"
    )


def _size(request: Request) -> int:
    return request.q.numel() + request.k.numel() + request.v.numel()


def _groups(request: Request) -> int:
    return request.q.shape[1] // max(request.k.shape[1], 1)


def _is_plain(t: Tensor) -> bool:
    return (
        t.is_contiguous() and t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.numel() * t.element_size()
    )


def _contiguous(request: Request, name: str) -> Request:
    return with_tensors(request, **{name: getattr(request, name).clone(memory_format=torch.contiguous_format)})


def _has_strides(request: Request, name: str) -> bool:
    tensor = getattr(request, name)
    return tensor is not None and not _is_plain(tensor)


def _has_gradient_among_others(request: Request, name: str) -> bool:
    return name in request.gradients and len(request.gradients) > 1


def _without_gradients(request: Request) -> Request:
    return replace(
        request, gradients=(), cotangent=None, directions=(), mode=request.mode if request.mode != "grad" else "no_grad"
    )


def _without_gradient(request: Request, name: str) -> Request | None:
    rest = tuple(each for each in request.gradients if each != name)
    return replace(request, gradients=rest) if rest and not request.directions else None


def _in_float32(request: Request) -> Request:
    def single(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.dtype == torch.bool else t.float()

    tensors = {name: single(getattr(request, name)) for name in (*TENSORS, "mask", "cotangent")}
    return with_tensors(replace(request, directions=tuple(d.float() for d in request.directions)), **tensors)


def _without_mask(request: Request) -> Request | None:
    if "mask" in request.gradients:
        return None
    return replace(request, mask=None)


def _part(t: Tensor, dim: int, index: list[int]) -> Tensor:
    """Of a dimension that is not 1: these of it. What was no view stays none; a view keeps its strides where it can."""
    if t.shape[dim] == 1:
        return t
    if _is_plain(t) or index != list(range(index[0], index[0] + len(index))):
        return t.index_select(dim, torch.tensor(index))
    return t.narrow(dim, index[0], len(index))


def _mask_part(mask: Tensor | None, dim: int, index: list[int], full: int) -> Tensor | None:
    """`dim` of four, counted from the end."""
    if mask is None or mask.ndim < -dim or mask.shape[dim] != full or full == 1:
        return mask
    return _part(mask, dim, index)


def _chosen(request: Request, sizes: dict[str, tuple[int, list[int]]], mask_dim: int | None, full: int) -> Request:
    """`sizes`: by tensor its dimension and the indices that stay."""
    tensors: dict[str, Tensor | None] = {}
    for name, (dim, index) in sizes.items():
        tensors[name] = _part(getattr(request, name), dim, index)
    if mask_dim is not None:
        index = next(iter(sizes.values()))[1]
        tensors["mask"] = _mask_part(request.mask, mask_dim, index, full)
    cotangent = request.cotangent
    if cotangent is not None and "q" in sizes and sizes["q"][0] < 3:
        cotangent = _part(cotangent, *sizes["q"])
    if cotangent is not None and "v" in sizes and sizes["v"][0] == 3:
        cotangent = _part(cotangent, *sizes["v"])
    return with_tensors(replace(request, cotangent=cotangent), **tensors)


def _within(places: range, n: int) -> list[int]:
    """Moved to where they fit."""
    start = max(0, min(places.start, n - len(places)))
    return list(range(start, start + len(places)))


def _from(way: Callable[[Request, range], Request | None], start: int, n: int) -> Way:
    return lambda request: way(request, range(start, start + n))


def _at_batches(request: Request, places: range) -> Request | None:
    B = request.q.shape[0]
    if len(places) >= B:
        return None
    index = _within(places, B)
    return _chosen(request, dict.fromkeys(TENSORS, (0, index)), -4, B)


def _at_key_heads(request: Request, places: range) -> Request | None:
    H_kv, G = request.k.shape[1], _groups(request)
    if len(places) >= H_kv:
        return None
    index = _within(places, H_kv)
    ours = [h * G + g for h in index for g in range(G)]
    return _chosen(request, {"q": (1, ours), "k": (1, index), "v": (1, index)}, -3, request.q.shape[1])


def _at_group_heads(request: Request, places: range) -> Request | None:
    H_kv, G = request.k.shape[1], _groups(request)
    if len(places) >= G:
        return None
    index = _within(places, G)
    ours = [h * G + g for h in range(H_kv) for g in index]
    return _chosen(request, {"q": (1, ours)}, -3, request.q.shape[1])


def _at_rows(request: Request, places: range) -> Request | None:
    """Of a causal call the first ones: the others would stand elsewhere."""
    L = request.q.shape[2]
    if len(places) >= L:
        return None
    index = _within(range(len(places)) if request.is_causal else places, L)
    return _chosen(request, {"q": (2, index)}, -2, L)


def _at_keys(request: Request, start: int, n: int) -> Request | None:
    S = request.k.shape[2]
    if n >= S or (request.is_causal and start):
        return None
    index = _within(range(start, start + n), S)
    return _chosen(request, {"k": (2, index), "v": (2, index)}, -1, S)


def _at_both(request: Request, n: int) -> Request | None:
    fewer = _at_rows(request, range(n))
    return None if fewer is None else _at_keys(fewer, 0, n) or fewer


def _at_channels(request: Request, D: int | None, D_v: int | None) -> Request | None:
    sizes: dict[str, tuple[int, list[int]]] = {}
    if D is not None and request.q.shape[3] > D:
        sizes |= dict.fromkeys(("q", "k"), (3, list(range(D))))
    if D_v is not None and request.v.shape[3] > D_v:
        sizes["v"] = (3, list(range(D_v)))
    return _chosen(request, sizes, None, 0) if sizes else None


def _changed(request: Request, name: str, change: Callable[[Tensor], Tensor]) -> Request | None:
    """Numbers alone: strides stay."""
    old: Tensor = getattr(request, name)
    new = change(old.contiguous())
    if torch.equal(new, old):
        return None
    if _is_plain(old):
        return with_tensors(request, **{name: new})
    whole = torch.full((old.untyped_storage().nbytes() // old.element_size(),), 0, dtype=old.dtype)
    view = whole.as_strided(old.shape, old.stride(), old.storage_offset())
    view.copy_(new)
    return with_tensors(request, **{name: view})


def _drawn(t: Tensor) -> Tensor:
    """Numbers that a script can draw as well."""
    return seeded(t.shape, t.dtype)


def seeded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _redrawn(names: Sequence[str], request: Request) -> Request:
    for name in names:
        request = _changed(request, name, _drawn) or request
    return request


def _one_digit(t: Tensor) -> Tensor:
    size = 10 ** t.double().abs().clamp(min=1e-30).log10().floor()
    return ((t.double() / size).round() * size).to(t.dtype)


def _without_element(t: Tensor, index: int) -> Tensor:
    changed = t.clone()
    changed.view(-1)[index] = 0
    return changed


def _opened(mask: Tensor, index: int) -> Tensor:
    changed = mask.clone()
    changed.view(-1)[index] = True if mask.dtype == torch.bool else 0.0
    return changed


def _round_finite(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask.round()
