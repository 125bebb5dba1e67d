"""Checks that need no reference: a kernel against itself, on calls in the likeness of a case.

The comparison sees a kernel through a whole module and on the sizes of its cell. These see what that may hide: order of
keys, neighbours in the batch, memory of earlier calls, strides, dropout, what lies behind a mask, threads. Most are
small; those of memory, chunks and threads have the case's own length, as far as `probe.LONGEST`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from harness.cell import conduct, relations
from harness.cell.build import Pair
from harness.cell.probe import BUILT_IN, CheckResult, LongProbe, Probe, floor_of, make_question
from harness.cell.rule import TensorVerdict
from harness.kernels.call import ContractBroken
from harness.kernels.plugin import told
from harness.variants import masks
from harness.variants.specs import VARIANTS

REGIME = "metamorphic"

CHECKS: dict[str, Callable[[Probe], CheckResult | None]] = {
    "permuted keys": relations.permuted_keys,
    "linear in v": relations.linear_in_values,
    "shifted scores": relations.shifted_scores,
    "large scores": relations.large_scores,
    "row alone": relations.row_alone,
    "permuted batch": relations.permuted_batch,
    "split prefill": relations.split_prefill,
    "repeated groups": relations.repeated_groups,
    "views": relations.views,
    "expanded batch": relations.expanded_batch,
    "chunk": relations.chunk,
    "more queries than keys": relations.more_queries_than_keys,
    "causal from the first key": relations.causal_from_the_first_key,
    "one row unpadded": relations.one_row_unpadded,
    "smallest mask": relations.smallest_mask,
    "default scale": relations.default_scale,
    "zero scores": relations.zero_scores,
    "gradient of the mask": relations.gradient_of_the_mask,
    "two threads": conduct.two_threads,
    "repeated call": conduct.repeated_call,
    "inputs untouched": conduct.inputs_untouched,
    "dropout": conduct.dropout,
    "half precision": conduct.half_precision,
    "delegation": conduct.delegation,
    "dead rows": conduct.dead_rows,
    "hidden NaN": conduct.hidden_nan,
}
SEVERAL_QUERIES = ("chunk", "more queries than keys")  # asked of kernels for one query too: reject or correct


@torch.no_grad()  # as a decorator: a `with` would hold between two verdicts, in the caller's own code
def verdicts(pair: Pair, *, seed: int) -> Iterator[TensorVerdict]:
    """One for each check that applies; `skipped` where the kernel refuses a call that its case does not make."""
    if VARIANTS[pair.case.variant].core == "recurrence":
        return  # it has no kernel
    kernel = pair.watch.kernel
    built_in = kernel.origin in BUILT_IN
    try:
        probe = make_probe(pair, seed=seed)
    except Exception as failure:
        yield _verdict("small call", _refusal(failure, built_in))
        return
    for name, check in CHECKS.items():
        try:
            result = check(probe)
        except Exception as failure:
            result = _refusal(failure, built_in)
        if result is not None:
            if kernel.domain.decode_only and name in SEVERAL_QUERIES and result.status in ("degraded", "mismatch"):
                result = replace(result, reason=f"{result.reason}; a decode_only kernel must refuse several queries")
            yield _verdict(name, result)


def _refusal(failure: Exception, built_in: bool) -> CheckResult:
    """A user's kernel may refuse, in whatever way, calls that its case does not make; ours say `Unsupported`."""
    if isinstance(failure, NotImplementedError):
        return CheckResult("skipped", str(failure) or told(failure))
    if built_in or isinstance(failure, ContractBroken | MemoryError):
        raise failure
    return CheckResult("skipped", f"{type(failure).__name__}: {failure}")


def make_probe(pair: Pair, *, seed: int) -> Probe:
    case = pair.case
    kernel = pair.watch.as_kernel()  # asked directly: the calls that the pair counts are those of its module
    generator = torch.Generator().manual_seed(seed)
    whole = make_question(case, generator)
    floor, L = floor_of(whole, generator), whole.q.shape[2]
    start = L - 1 if case.phase == "decode" else 0
    question = whole.rows(start, L)
    if kernel.domain.decode_only:  # it may refuse more than one query, and checks of anything else be skipped for that
        whole, floor, start, L = question, floor.rows(start, L), 0, question.q.shape[2]
    first = question.ask(kernel)
    long = make_question(case, torch.Generator().manual_seed(seed), at_length=True)
    end = long.q.shape[2]
    own = long.rows(end - 1 if case.phase == "decode" else 0, end)
    first_own = own.ask(kernel)
    return Probe(
        kernel=kernel,
        rule=masks.MASKS[case.mask],
        phase=case.phase,
        seed=seed,
        whole=whole,
        whole_floor=floor,
        question=question,
        floor=floor.rows(start, L),
        first=first,
        answer=first.clone(),
        long=LongProbe(whole=long, question=own, first=first_own, answer=first_own.clone()),
    )


def _verdict(check: str, result: CheckResult) -> TensorVerdict:
    return TensorVerdict(tensor=f"check: {check}", regime=REGIME, is_aside=True, **vars(result))
