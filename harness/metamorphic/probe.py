"""What every check is given: the kernel, the question, the kernel's first answer, and how noisy answers may be."""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.kernels.call import Kernel
from harness.masks import MaskRule
from harness.metamorphic.noise import Finding, Noise, judge_relation
from harness.metamorphic.question import Question

BUILT_IN = ("harness", "saboteur")  # origins of kernels that are held to our own promises


@dataclass(frozen=True)
class Probe:
    kernel: Kernel
    rule: MaskRule
    phase: str
    seed: int
    whole: Question  # all queries
    whole_noise: Noise
    question: Question  # those of the phase: all, or the last one alone when decoding
    noise: Noise
    first: Tensor  # the kernel's answer to `question`, the tensor itself
    answer: Tensor  # a copy of it, taken at once

    @property
    def is_built_in(self) -> bool:
        return self.kernel.origin in BUILT_IN

    @property
    def keeps_nan_out(self) -> bool:
        """Whether the kernel promises that what is hidden cannot leak: a user's kernel is not asked to."""
        return self.kernel.shielded or self.is_built_in

    def generator(self) -> torch.Generator:
        """Anew for each check, so that no number depends on which others ran."""
        return torch.Generator().manual_seed(self.seed)

    def same(self, question: Question) -> Finding:
        """Another form of the question must get the first answer."""
        return judge_relation(question.ask(self.kernel), self.answer, self.noise.times(2))
