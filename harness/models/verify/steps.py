"""`harness.models.verify.verify`: swap the attention of a model and prove, in five steps, that it is the same model.

load, inspect, swap, forward, generate: each gives a status and one line that tells what was found or what is wrong.
After a step that failed the next one is taken all the same; where one raised, those behind it are not run.
"""

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.candidate.isolated import KernelFailed, judged_kernel
from harness.candidate.state import preserved
from harness.cell.build import WatchedKernel
from harness.errors import BadInput
from harness.kernels.call import ContractBroken, Kernel, Unsupported
from harness.kernels.front import AnyKernel
from harness.models.families.family import Family, Structure
from harness.models.tuning import file as tuning_file
from harness.models.tuning.file import Tuned, TuningError
from harness.models.tuning.heads import give_layers_their_own, placeholder, tuned_name, warn_of_other_weights
from harness.models.verify.approximation import compare_approximate
from harness.models.verify.forward import ModelPair, compare_forward
from harness.models.verify.generation import compare_generation
from harness.models.verify.golden import dtype_of
from harness.models.verify.metering import Meters, attach_meters
from harness.models.verify.result import STEPS, Budget, Status, Verification, VerifyStep
from harness.models.verify.subject import Load, attentions_of, subject
from harness.swaps import SwapReport, swap
from harness.swaps.engine import Only, predicate
from harness.swaps.weights import WeightSource, parameter_count, same_bits
from harness.text import count, plural

log = logging.getLogger(__name__)


def verify(
    target: str | Family | nn.Module,
    *,
    kernel: AnyKernel = "eager",
    config: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    inputs: Any = None,
    seed: int = 0,
    only: Only | None = None,
    tuned: Tuned | str | Path | None = None,
    budget: Budget | Mapping[str, float] | None = None,
    on_step: Callable[[VerifyStep], None] | None = None,
    tamper: Callable[[nn.Module], None] | None = None,
) -> Verification:
    """Swap the attention of a real model and prove that the model is still the same.

    target   a family ("llama"), a function that builds your own model ("file.py:function" or "package.module:function",
             giving a module or a pair of module and inputs), or a module
    kernel   a kernel's name, "file.py:function", or any callable with SDPA's signature
    config   overrides of the family's tiny config
    path     a local checkpoint folder of that family, instead of the tiny random model
    inputs   of a module: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a Batch
    only     which attentions are swapped, as in `swap`; the others stay as they are
    tuned    thresholds for each layer and head, or the file that `harness tune-sparse` wrote; instead of a kernel
    budget   how far an approximate kernel may be from dense attention: limits by name, as in Budget
    on_step  is told of each step as it ends
    tamper   changes the swapped model after the swap: to see that what follows can fail

    What is wrong with the arguments raises BadInput; what is wrong with the model is a failed step.
    """
    if tuned is None and isinstance(kernel, str):
        tuned = tuned_name(kernel)
    thresholds = tuned if tuned is None or isinstance(tuned, Tuned) else tuning_file.load(tuned)
    found = judged_kernel(kernel) if thresholds is None else placeholder(thresholds)
    if not isinstance(budget, Budget):
        budget = Budget.of(budget or {}, tuned_for=None if thresholds is None else thresholds.limit)
    name, load = subject(target, config or {}, None if path is None else Path(path), inputs)
    flags = [(module, module.training) for module in target.modules()] if isinstance(target, nn.Module) else []
    try:
        with preserved():
            return _Run(name, load, found, seed, only, thresholds, budget, on_step, tamper).through()
    finally:
        for module, training in flags:
            module.training = training


@dataclass
class _Run:
    """One verification under way: each step leaves here what those after it need."""

    name: str
    read: Load
    kernel: Kernel
    seed: int
    only: Only | None
    tuned: Tuned | None
    budget: Budget
    on_step: Callable[[VerifyStep], None] | None
    tamper: Callable[[nn.Module], None] | None
    done: Verification = field(init=False)  # as far as it is known
    model: nn.Module = field(init=False)
    family: Family = field(init=False)
    structure: Structure = field(init=False)
    pair: ModelPair = field(init=False)
    meters: Meters = field(default_factory=dict)  # of an approximate kernel

    def through(self) -> Verification:
        self.done = Verification(self.name, self.kernel.name)
        for name, take in zip(STEPS, (self.load, self.inspect, self.swap, self.forward, self.generate), strict=True):
            step = self._timed(name, take)
            self.done = replace(self.done, steps=(*self.done.steps, step))
            if self.on_step is not None:
                self.on_step(step)
        return self.done

    def load(self) -> tuple[Status, str]:
        torch.manual_seed(self.seed)
        started = time.perf_counter()
        self.model, self.family = self.read()
        self.model.eval()  # dropout would differ from itself
        library = f"{self.family.library} {metadata.version(self.family.library)}"
        parameters = parameter_count(self.model)
        self.done = replace(self.done, title=self.family.title, library=library, parameters=parameters)
        seconds = time.perf_counter() - started
        dtype = str(dtype_of(self.model)).removeprefix("torch.")
        return "passed", f"{type(self.model).__name__}, {count(parameters)} parameters, {dtype}, {seconds:.1f} s"

    def inspect(self) -> tuple[Status, str]:
        found = self.structure = self.family.inspect(self.model)
        self.done = replace(self.done, structure=found)
        heads = (
            f"{count(found.heads)} heads, {count(found.kv_heads)} kv heads, groups of {count(found.groups)}, "
            f"head dim {count(found.head_dim)}, hidden size {count(found.hidden_size)}"
        )
        config = "" if found.config_class is None else f"{found.config_class}: "
        attentions = f", {found.attentions} attentions" if found.attentions != found.layers else ""
        layers = plural(found.layers, "layer", "layers")
        return "passed", f"{config}{layers}{attentions} of {found.attention_class}: {heads}"

    def swap(self) -> tuple[Status, str]:
        def watched(kernel: Kernel) -> Kernel:  # a kernel that writes into its inputs is told of by name
            return WatchedKernel(kernel).as_kernel()

        swapped, report = swap(self.model, kernel=watched(self.kernel), only=self.only, **self.family.swap_options)
        warning = ""
        if self.tuned is not None:
            give_layers_their_own(self.tuned, report, heads=self.structure.heads, around=watched)
            warning = warn_of_other_weights(self.tuned, self.model)
        if self.kernel.approximate:
            self.meters = attach_meters(report)
        self.pair = ModelPair(self.model, swapped, report, self.family, self.seed)
        self.done = replace(self.done, swapped=len(report.swapped))
        problem = problem_of_swap(self.pair, self._expected())
        message = (problem or _describe_swap(report, parameter_count(swapped))) + warning
        if self.tamper is not None:
            self.tamper(swapped)
        return "failed" if problem else "passed", message

    def _expected(self) -> int:
        """How many attentions the swap is held to."""
        if self.only is None:
            return self.structure.attentions
        wanted = predicate(self.only)
        return sum(wanted(name, module) for name, module in attentions_of(self.model).items())

    def forward(self) -> tuple[Status, str]:
        limits = ""
        if not self.meters:
            found = compare_forward(self.pair)
        else:
            found = approximate = compare_approximate(self.pair, meters=self.meters, budget=self.budget)
            if approximate.count.skipped_any:
                self.done = replace(self.done, sparsity=approximate.count.sparsity)
                limits = f"; {self.budget.describe(tuned_for=None if self.tuned is None else self.tuned.limit)}"
        self.done = replace(self.done, judged=found.judged)
        return "failed" if found.problem else "passed", (found.problem or found.summary) + limits

    def generate(self) -> tuple[Status, str]:
        if self.family.generate is None:
            return "none", f"{self.family.name} does not generate"
        found = compare_generation(self.pair, self.family.generate, meters=self.meters)
        judged = (*self.done.judged, *found.judged)
        self.done = replace(self.done, judged=judged, first_difference=found.first_difference)
        return "passed" if found.passed else "failed", found.message

    def _timed(self, name: str, take: Callable[[], tuple[Status, str]]) -> VerifyStep:
        if broken := next((step.name for step in self.done.steps if step.raised), None):
            return VerifyStep(name, "not run", f"{broken} failed")
        started = time.perf_counter()
        try:
            status, message = take()
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            if isinstance(error, TuningError) or (name == "load" and isinstance(error, BadInput)):
                raise  # a config, a checkpoint or thresholds that are wrong: nothing was verified
            log.debug("%s: %s raised", self.name, name, exc_info=True)
            return VerifyStep(name, "failed", describe_error(error), time.perf_counter() - started, raised=True)
        return VerifyStep(name, status, message, time.perf_counter() - started)


def not_loaded(name: str, kernel: Kernel, error: BadInput) -> Verification:
    """A family that could not even be built, as a row among others."""
    rest = (VerifyStep(step, "not run", "load failed") for step in STEPS[1:])
    return Verification(name, kernel.name, (VerifyStep("load", "failed", str(error), raised=True), *rest))


def describe_error(error: BaseException) -> str:
    """The message; where it is not one of ours, with the line that raised: it may be the user's."""
    if isinstance(error, BadInput | Unsupported | ContractBroken | KernelFailed):  # which says where by itself
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line} ({last.filename}:{last.lineno})"


def problem_of_swap(pair: ModelPair, attentions: int) -> str | None:
    """An attention that was not replaced, or the first weight or buffer that is not, bit for bit, what it was."""
    if len(pair.layers) != attentions:
        done = ", ".join(name or "the model" for name in pair.layers)
        others = {name: each for name, each in attentions_of(pair.original).items() if name not in pair.layers}
        missing = ", ".join(f"{name} ({type(module).__name__})" for name, module in others.items())
        return f"{len(pair.layers)} of {attentions} replaced: {done}" + (f"; not {missing}" if missing else "")
    before, after = parameter_count(pair.original), parameter_count(pair.swapped)
    if before != after:
        return f"{after:,} parameters instead of {before:,}"
    sources = pair.report.sources()
    old = {**dict(pair.original.named_parameters(remove_duplicate=False)), **dict(pair.original.named_buffers())}
    new = {**dict(pair.swapped.named_parameters()), **dict(pair.swapped.named_buffers())}  # shared ones once
    for name, tensor in new.items():
        source = sources.get(name, WeightSource(name))
        if source.name not in old:
            return f"{name} has no counterpart in the original"
        if not same_bits(tensor, source.of(old[source.name])):
            return f"{name} is not the original's {source.name}, bit for bit"
    return None


def _describe_swap(report: SwapReport, parameters: int) -> str:
    done = len(report.swapped)
    became = ", ".join(dict.fromkeys(row.became for row in report.swapped))
    left = "".join(f"; {name} ({kind}) stays as it is" for name, kind in report.left.items())
    return f"{done} of {done} replaced by {became}; {count(parameters)} parameters as before, the same bits{left}"
