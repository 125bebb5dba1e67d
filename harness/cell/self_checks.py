"""Checks that need no reference: a kernel against itself, on small calls in the likeness of a case.

The comparison sees a kernel through a whole module and on the sizes of its cell. These see what that may hide: order of
keys, neighbours in the batch, memory of earlier calls, strides, dropout, what lies behind a mask.
"""

from collections.abc import Callable, Iterator

import torch

from harness.cell import conduct, relations
from harness.cell.build import ContractBroken, Pair
from harness.cell.probe import BUILT_IN, CheckResult, Probe, floor_of, make_question
from harness.cell.rule import TensorVerdict
from harness.kernels.call import Unsupported
from harness.variants import masks

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
    "repeated call": conduct.repeated_call,
    "inputs untouched": conduct.inputs_untouched,
    "dropout": conduct.dropout,
    "delegation": conduct.delegation,
    "dead rows": conduct.dead_rows,
    "hidden NaN": conduct.hidden_nan,
}


@torch.no_grad()  # as a decorator: a `with` would hold between two verdicts, in the caller's own code
def verdicts(pair: Pair, *, seed: int) -> Iterator[TensorVerdict]:
    """One for each check that applies; `skipped` where the kernel refuses a call that its case does not make."""
    built_in = pair.watch.kernel.origin in BUILT_IN
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
            yield _verdict(name, result)


def _refusal(failure: Exception, built_in: bool) -> CheckResult:
    """A user's kernel may refuse, in whatever way, calls that its case does not make; ours say `Unsupported`."""
    if isinstance(failure, Unsupported):
        return CheckResult("skipped", str(failure))
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
    first = question.ask(kernel)
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
    )


def _verdict(check: str, result: CheckResult) -> TensorVerdict:
    return TensorVerdict(tensor=f"check: {check}", regime=REGIME, is_aside=True, **vars(result))
