"""One cell of the study: a right pair and its referee, made once and shared by every candidate that is tried in it."""

import copy
import dataclasses
from collections.abc import Generator, Iterator, Sequence

import torch

from harness.build import Pair, WatchedKernel, build_pair
from harness.case import Case
from harness.compare import Referee
from harness.equivalence import Equivalence, TensorVerdict
from harness.kernels.call import Kernel
from harness.kernels.front import find_kernel
from harness.measure import status_of, weigh
from harness.saboteurs.saboteur import Saboteur
from harness.specs import VARIANTS
from harness.state import preserved
from harness.swaps import VARIANT, swap

COUNTS = "counts"  # calls, parameters and cache bytes: what is compared with a formula, not with the reference


class Cell:
    def __init__(self, case: Case, *, seed: int, regimes: Sequence[str]) -> None:
        self.case, self.seed = case, case.seed(seed)
        self.right = build_pair(case, find_kernel(case.kernel), self.seed)
        # Our kernels promise not to leak what is behind a mask, so what takes their place is held to NaN too.
        self.referee = Referee(self.right, regimes, seed=self.seed, poison=float("nan"))

    def pair_with(self, kernel: Kernel) -> Pair:
        """The same reference beside a fresh candidate around `kernel`."""
        watch = WatchedKernel(kernel)
        options = VARIANTS[self.case.variant].swap_options
        module, report = swap(self.right.reference.module, to=VARIANT, kernel=watch.as_kernel(), **options)
        right = self.right.candidate
        candidate = dataclasses.replace(
            right,
            module=module,
            views=copy.deepcopy(right.views),  # a saboteur may write into them
            new_cache=None if right.new_cache is None else (lambda capacity: module.new_cache(capacity)),  # type: ignore[operator]
            gives_weights=kernel.gives_weights,
        )
        return dataclasses.replace(self.right, candidate=candidate, watch=watch, swap_report=report)

    def sabotaged(self, saboteur: Saboteur) -> Pair:
        if saboteur.kernel is not None:
            return self.pair_with(saboteur.kernel())
        assert saboteur.spoil is not None, f"{saboteur.name} has neither a kernel nor a spoil"
        pair = self.pair_with(self.right.watch.kernel)
        with preserved():
            torch.manual_seed(self.seed)
            saboteur.spoil(pair)
        return pair

    def examine(self, pair: Pair) -> Generator[TensorVerdict]:
        """All that a run would judge of this candidate, one by one; global state is put back at the end."""
        with preserved():
            torch.manual_seed(self.seed)  # a saboteur that draws does so alike, whatever ran before it
            pair.watch.calls = 0
            verdicts = []
            for verdict in self.referee.examine(pair):
                verdicts.append(verdict)
                yield verdict
            if not all(verdict.is_aside for verdict in verdicts):
                yield from self._counts(pair, Equivalence(tuple(verdicts)))

    def glance(self, pair: Pair) -> Generator[TensorVerdict]:
        """What is most sensitive to a wrong number, alone."""
        with preserved():
            yield from self.referee.glance(pair)

    def _counts(self, pair: Pair, equivalence: Equivalence) -> Iterator[TensorVerdict]:
        """What a run holds to a formula, where that is worse than all tensors."""
        spec, calls = VARIANTS[self.case.variant], pair.watch.calls
        formulas = {"params_formula": spec.params(self.case), "kv_cache_bytes_formula": spec.kv_cache_bytes(self.case)}
        weighed = weigh(pair)
        pair.watch.calls = calls  # those of the comparison alone: what it bypasses, weighing may have called
        status, message = status_of(pair, equivalence, formulas | weighed)
        if status != equivalence.status:
            yield TensorVerdict(COUNTS, COUNTS, status, message or "")
