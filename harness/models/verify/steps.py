"""`harness.models.verify.verify`: load, inspect, swap, forward, generate, each with what it found."""

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from harness.cell.build import ContractBroken, WatchedKernel
from harness.cell.state import preserved
from harness.errors import BadInput
from harness.kernels.call import BlockCount, Kernel, Unsupported
from harness.kernels.front import AnyKernel, find_kernel
from harness.kernels.names import is_plugin
from harness.models.families.family import Family, Structure, find_family
from harness.models.tuning import file as tuning_file
from harness.models.tuning.file import Tuned, TuningError, fingerprint
from harness.models.tuning.heads import give_layers_their_own, placeholder, tuned_name
from harness.models.verify.approximation import compare_approximate
from harness.models.verify.forward import Forward, Judged, compare_forward
from harness.models.verify.generation import compare_generation
from harness.models.verify.golden import dtype_of
from harness.models.verify.metering import Meters, attach_meters
from harness.models.verify.result import STEPS, Budget, Deviation, Status, Step, Verification
from harness.models.verify.user_model import family_of_model, model_and_inputs, user_function
from harness.swaps import SwapReport, swap
from harness.swaps.weights import WeightSource, same_bits
from harness.text import count, plural

# ----------------------------------------------------------------------------------------------------------------------
# Step 3: was everything replaced that should be, and did every weight come along?


def problem_of_swap(reference: nn.Module, swapped: nn.Module, report: SwapReport, attentions: int) -> str | None:
    done = len(report.swapped)
    if done != attentions:
        names = ", ".join(row.name or "the model" for row in report.swapped)
        return f"{done} of {attentions} replaced: {names}"
    before, after = parameters_of(reference), parameters_of(swapped)
    if before != after:
        return f"{after:,} parameters instead of {before:,}"
    return _moved_weight(reference, swapped, report)


def parameters_of(model: nn.Module) -> int:
    """Tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def describe_swap(report: SwapReport, parameters: int) -> str:
    done = len(report.swapped)
    became = ", ".join(dict.fromkeys(row.became for row in report.swapped))
    return f"{done} of {done} replaced by {became}; {count(parameters)} parameters as before, the same bits"


def _moved_weight(reference: nn.Module, swapped: nn.Module, report: SwapReport) -> str | None:
    """The first weight or buffer that is not, bit for bit, what it was; every one has a source."""
    sources = report.sources()
    old = {**dict(reference.named_parameters(remove_duplicate=False)), **dict(reference.named_buffers())}
    new = {**dict(swapped.named_parameters()), **dict(swapped.named_buffers())}  # shared ones under their first name
    for name, tensor in new.items():
        source = sources.get(name, WeightSource(name))
        if source.name not in old:
            return f"{name} has no counterpart in the original"
        if not same_bits(tensor, source.of(old[source.name])):
            return f"{name} is not the original's {source.name}, bit for bit"
    return None


# ----------------------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

LAYER_COLUMNS = ("batch", "kind", "layer", "tensor", "status", "reason", "max_abs_err", "mean_abs_err", "max_rel_err",
                 "max_ulp_err", "ref_max_abs_err", "err_budget", "err_ratio", "block_ratio", "mean_ratio",
                 *(column.name for column in fields(Deviation)))  # fmt: skip
Load = Callable[[], tuple[nn.Module, Family]]


def verify(
    target: str | Family | nn.Module,
    *,
    kernel: AnyKernel = "eager",
    config: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    inputs: Any = None,
    seed: int = 0,
    tuned: Tuned | str | Path | None = None,
    budget: Budget | Mapping[str, float] | None = None,
    on_step: Callable[[Step], None] | None = None,
    tamper: Callable[[nn.Module], None] | None = None,
) -> Verification:
    """Swap the attention of a real model and prove that the model is still the same.

    target   a family ("llama"), a function that builds your own model ("file.py:function" or "package.module:function",
             giving a module or a pair of module and inputs), or a module
    kernel   a kernel's name, "file.py:function", or any callable with SDPA's signature
    config   overrides of the family's tiny config
    path     a local checkpoint folder of that family, instead of the tiny random model
    inputs   of a module: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a Batch
    tuned    thresholds for each layer and head, or the file that `harness tune-sparse` wrote; instead of a kernel
    budget   how far an approximate kernel may be from dense attention: limits by name, as in Budget
    on_step  is told of each step as it ends
    tamper   changes the swapped model after the swap: to see that what follows can fail

    What is wrong with the arguments raises BadInput; what is wrong with the model is a failed step.
    """
    if tuned is None and isinstance(kernel, str):
        tuned = tuned_name(kernel)
    thresholds = tuned if tuned is None or isinstance(tuned, Tuned) else tuning_file.load(tuned)
    found = find_kernel(kernel) if thresholds is None else placeholder(thresholds)
    limits = budget if isinstance(budget, Budget) else _budget(budget or {}, thresholds)
    name, load = subject(target, config or {}, None if path is None else Path(path), inputs)
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    flags = [module.training for module in modules]
    try:
        with preserved():
            return _Run(name, found, seed, on_step, tamper, thresholds, limits).through(load)
    finally:
        for module, training in zip(modules, flags, strict=True):
            module.training = training


def _budget(given: Mapping[str, float], tuned: Tuned | None) -> Budget:
    default = Budget() if tuned is None else Budget.for_tuned(tuned.limit)
    return Budget.of(given, default=default)


def _limits_told(limits: Budget, tuned: Tuned | None) -> str:
    """With where they come from."""
    default = Budget()
    layer, end = ("default" if is_default else "given" for is_default in
                  (limits.rel_l1 == default.rel_l1, limits.end_rel_l1 == default.end_rel_l1))  # fmt: skip
    if layer == "given" and tuned is not None and limits.rel_l1 == Budget.for_tuned(tuned.limit).rel_l1:
        layer = "the tuned file's"
    told = f"limits: layer {limits.rel_l1:g} ({layer}), end {limits.end_rel_l1:g} ({end})"
    if tuned is not None and tuned.limit > limits.rel_l1:
        told += f"; tuned for {tuned.limit:g}, which is looser: --budget rel_l1={tuned.limit:g} allows it"
    return told


def subject(
    target: str | Family | nn.Module, config: Mapping[str, Any], path: Path | None, inputs: Any
) -> tuple[str, Load]:
    """What is verified, and how it is loaded."""
    if isinstance(target, Family) or (isinstance(target, str) and not is_plugin(target)):
        wanted = target
        name = wanted if isinstance(wanted, str) else wanted.name
        if inputs is not None:
            raise BadInput(f"inputs: {name} makes its own")
        if path is not None and config:
            raise BadInput(f"config ({', '.join(config)}) and path ({path}): a checkpoint has its own config")

        def load() -> tuple[nn.Module, Family]:
            family = find_family(wanted) if isinstance(wanted, str) else wanted
            return family.build(config) if path is None else family.load(path), family

        return name, load
    if config or path is not None:
        raise BadInput(f"{'config' if config else 'path'}: only a family has one; your own model is built by your code")
    if isinstance(target, nn.Module):
        module = target
        name = type(module).__name__
        return name, lambda: (module, family_of_model(name, module, inputs))
    if inputs is not None:
        raise BadInput(f"inputs: {target} must give them itself, as a pair of model and inputs")
    spec, function = target, user_function(target)

    def build() -> tuple[nn.Module, Family]:
        model, given = model_and_inputs(spec, function())
        return model, family_of_model(spec, model, given)

    return spec, build


def _other_weights(tuned: Tuned, model: nn.Module) -> str:
    """Thresholds of a fine-tuned sibling may do; that they are not this model's own must be known."""
    if (found := fingerprint(model)) == tuned.weights:
        return ""
    theirs, ours = (text.removeprefix("sha256:")[:8] or "none" for text in (tuned.weights, found))
    return f"; warning: tuned on other weights (sha256 {theirs}, this model's {ours})"


class _Stopped(Exception):
    """A step raised: those after it have nothing to work on."""


class _Run:
    """One verification under way."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        seed: int,
        on_step: Callable[[Step], None] | None,
        tamper: Callable[[nn.Module], None] | None,
        tuned: Tuned | None,
        budget: Budget,
    ) -> None:
        self.name, self.kernel, self.seed, self.on_step, self.tamper = name, kernel, seed, on_step, tamper
        self.tuned, self.budget = tuned, budget
        self.meters: Meters | None = None  # of an approximate kernel
        self.count: BlockCount | None = None
        self.first_difference: int | None = None
        self.family: Family | None = None
        self.structure: Structure | None = None
        self.parameters: int | None = None
        self.swapped: int | None = None
        self.steps: list[Step] = []
        self.judged: list[Judged] = []

    def through(self, load: Load) -> Verification:
        try:
            model = self._load(load)
            self._inspect(model)
            swapped, report = self._swap(model)
            if self.tamper is not None:
                self.tamper(swapped)
            self._forward(model, swapped, report)
            self._generate(model, swapped, report)
        except _Stopped:
            failed = self.steps[-1].name
            for name in STEPS[len(self.steps) :]:
                self._end(Step(name, "not run", f"{failed} failed"))
        return Verification(
            family=self.name,
            title=self.family.title if self.family else "",
            library=_with_version(self.family.library) if self.family else "",
            kernel=self.kernel.name,
            steps=tuple(self.steps),
            layers=_table(self.name, self.judged),
            structure=self.structure,
            parameters=self.parameters,
            swapped=self.swapped,
            sparsity=self.count.sparsity if self.count else None,
            approximate=self.count is not None,
            first_difference=self.first_difference,
        )

    def _load(self, load: Load) -> nn.Module:
        with self._step("load") as end:
            torch.manual_seed(self.seed)
            started = time.perf_counter()
            model, self.family = load()
            model.eval()  # dropout would differ from itself
            self.parameters = parameters_of(model)
            seconds = time.perf_counter() - started
            dtype = str(dtype_of(model)).removeprefix("torch.")
            end("passed", f"{type(model).__name__}, {count(self.parameters)} parameters, {dtype}, {seconds:.1f} s")
        return model

    def _inspect(self, model: nn.Module) -> None:
        assert self.family is not None
        with self._step("inspect") as end:
            found = self.structure = self.family.inspect(model)
            heads = f"{count(found.heads)} heads, {count(found.kv_heads)} kv heads, head dim {count(found.head_dim)}"
            layers = plural(found.layers, "layer", "layers")
            attentions = f", {found.attentions} attentions" if found.attentions != found.layers else ""
            end("passed", f"{layers}{attentions} of {found.attention_class}: {heads}")

    def _swap(self, model: nn.Module) -> tuple[nn.Module, SwapReport]:
        assert self.family is not None and self.structure is not None
        with self._step("swap") as end:
            watched = WatchedKernel(self.kernel).as_kernel()  # a kernel that writes into its inputs is told of by name
            swapped, report = swap(model, kernel=watched, **self.family.swap_options)
            if self.tuned is not None:
                give_layers_their_own(
                    self.tuned,
                    report,
                    heads=self.structure.heads,
                    around=lambda kernel: WatchedKernel(kernel).as_kernel(),
                )
            if self.kernel.approximate:
                self.meters = attach_meters(report)
            self.swapped = len(report.swapped)
            problem = problem_of_swap(model, swapped, report, self.structure.attentions)
            warning = "" if self.tuned is None else _other_weights(self.tuned, model)
            end("failed" if problem else "passed", (problem or describe_swap(report, parameters_of(swapped))) + warning)
        return swapped, report

    def _forward(self, model: nn.Module, swapped: nn.Module, report: SwapReport) -> None:
        assert self.family is not None
        with self._step("forward") as end:
            found: Forward
            if self.meters is None:
                found = compare_forward(model, swapped, report, self.family, self.seed)
            else:
                found = approximation = compare_approximate(
                    model, swapped, report, self.family, self.seed, meters=self.meters, budget=self.budget
                )
                self.count = approximation.count if approximation.skipped_any else None
            self.judged += found.judged
            limits = f"; {_limits_told(self.budget, self.tuned)}" if self.count is not None else ""
            end("failed" if found.problem else "passed", (found.problem or found.summary) + limits)

    def _generate(self, model: nn.Module, swapped: nn.Module, report: SwapReport) -> None:
        assert self.family is not None
        with self._step("generate") as end:
            generate = self.family.generate
            if generate is None:
                end("none", f"{self.family.name} does not generate")
                return
            found = compare_generation(model, swapped, report, self.family, generate, self.seed, meters=self.meters)
            self.judged += found.judged
            self.first_difference = found.first_difference
            end("passed" if found.passed else "failed", found.message)

    @contextmanager
    def _step(self, name: str) -> Iterator[Callable[[Status, str], None]]:
        started = time.perf_counter()

        def end(status: Status, message: str) -> None:
            self._end(Step(name, status, message, time.perf_counter() - started))

        try:
            yield end
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            if isinstance(error, TuningError) or (name == "load" and isinstance(error, BadInput)):
                raise  # a config, a checkpoint or thresholds that are wrong: nothing was verified
            log.debug("%s: %s raised", self.name, name, exc_info=True)
            self._end(Step(name, "failed", describe_error(error), time.perf_counter() - started, raised=True))
            raise _Stopped from error

    def _end(self, step: Step) -> None:
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)


def not_loaded(name: str, kernel: Kernel, error: BadInput) -> Verification:
    """A family that could not even be built, as a row among others."""
    rest = (Step(step, "not run", "load failed") for step in STEPS[1:])
    steps = (Step("load", "failed", str(error), raised=True), *rest)
    return Verification(name, "", "", kernel.name, steps, _table(name, []))


def describe_error(error: BaseException) -> str:
    """The message; where it is not one of ours, with the line that raised: it may be the user's."""
    if isinstance(error, BadInput | Unsupported | ContractBroken):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line} ({last.filename}:{last.lineno})"


def _with_version(library: str) -> str:
    return f"{library} {metadata.version(library)}"


def _table(family: str, judged: list[Judged]) -> pd.DataFrame:
    rows = [
        asdict(row.verdict)
        | (asdict(row.deviation) if row.deviation else {})
        | {"batch": row.batch, "kind": row.kind, "layer": row.layer or "the model"}
        for row in judged
    ]
    frame = pd.DataFrame(rows, columns=list(LAYER_COLUMNS))
    frame.insert(0, "family", family)
    return frame
