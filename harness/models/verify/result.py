"""What a verification gives: its five steps, and a row for every layer and batch that was judged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from harness.cell.approximate import Metrics
from harness.cell.rule import TensorVerdict
from harness.errors import BadInput
from harness.models.families.family import Structure

if TYPE_CHECKING:
    from pandas import DataFrame

STEPS = ("load", "inspect", "swap", "forward", "generate")
Status = Literal["passed", "failed", "none", "not run"]  # none: there is no such step for this model

END = "(end)"  # the model's own output, after the last layer
LATENTS = "(generated)"  # what a diffusion model's denoising gave
Kind = Literal["layer", "end", "fast path", "generated"]  # fast path: the end again, as users run the model

LOOSEST_TUNED = 0.08  # SpargeAttn's, with a PV threshold


@dataclass(frozen=True)
class Deviation:
    """How far an approximation is from float64, all elements together; NaN or infinite where one is not finite."""

    rel_l1: float  # sum|C - G| / sum|G|
    cosine: float
    rmse: float
    max_abs: float
    sparsity: float | None = None  # here and below: of a layer's attention alone
    skipped_blocks: int | None = None
    pv_skipped: float | None = None  # share of the visible blocks that were scored, but not multiplied with values
    flow_rel_l1: float | None = None  # of the layer's output in the running model, all before it included

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> "Deviation":
        """`pairs` of what was found and what it should be, all of them as one vector."""
        found = torch.cat([found.detach().reshape(-1).double() for found, _ in pairs])
        wanted = torch.cat([wanted.detach().reshape(-1).double() for _, wanted in pairs])
        return cls(**asdict(Metrics.of(found, wanted)))

    @classmethod
    def unknown(cls) -> "Deviation":
        """Beyond any limit."""
        return cls(math.nan, math.nan, math.nan, math.nan)

    @property
    def rank(self) -> float:
        """Worst last; a NaN is worse than any number."""
        return math.inf if math.isnan(self.rel_l1) else self.rel_l1


@dataclass(frozen=True)
class Judged:
    """One tensor of one batch, judged."""

    batch: str
    kind: Kind
    layer: str
    verdict: TensorVerdict
    deviation: Deviation | None = None  # of an approximate kernel

    @property
    def ok(self) -> bool:
        return self.verdict.status == "ok"


LAYER_COLUMNS = ("batch", "kind", "layer", "tensor", "status", "reason", "max_abs_err", "mean_abs_err", "max_rel_err",
                 "max_ulp_err", "ref_max_abs_err", "err_budget", "err_ratio", "block_ratio", "mean_ratio",
                 *(column.name for column in fields(Deviation)))  # fmt: skip
STRUCTURE_COLUMNS = ("attention_class", "layers", "attentions", "heads", "kv_heads", "head_dim")


@dataclass(frozen=True)
class Budget:
    """How far an approximate kernel may be from dense: limits of sum|C - G| / sum|G|, with G in float64."""

    rel_l1: float = 0.07  # of each layer's attention, against dense attention on the same q, k and v
    end_rel_l1: float = 0.08  # of the model's output, against the original model's

    @classmethod
    def for_tuned(cls, limit: float) -> "Budget":
        """Thresholds are held to what they were tuned for, as far as SpargeAttn's own budgets go.

        A file could else set its own verdict: what is looser must be asked for.
        """
        return cls(rel_l1=max(cls.rel_l1, min(limit, LOOSEST_TUNED)))

    @classmethod
    def of(cls, given: Mapping[str, Any], *, tuned_for: float | None = None) -> "Budget":
        """`given` as on the command line; what it leaves out is the default, or that of thresholds `tuned_for` it."""
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise BadInput(f"budget {name!r} is unknown; known: {', '.join(known)}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value >= 0):
                raise BadInput(f"budget {name} = {value!r}: must be a number, 0 or more")
        default = cls() if tuned_for is None else cls.for_tuned(tuned_for)
        return cls(**{name: float(given.get(name, getattr(default, name))) for name in known})

    def describe(self, *, tuned_for: float | None) -> str:
        """Both limits, each with where it comes from."""
        default = Budget()
        layer = "default" if self.rel_l1 == default.rel_l1 else "given"
        end = "default" if self.end_rel_l1 == default.end_rel_l1 else "given"
        if layer == "given" and tuned_for is not None and self.rel_l1 == Budget.for_tuned(tuned_for).rel_l1:
            layer = "the tuned file's"
        limits = f"limits: layer {self.rel_l1:g} ({layer}), end {self.end_rel_l1:g} ({end})"
        if tuned_for is not None and tuned_for > self.rel_l1:
            limits += f"; tuned for {tuned_for:g}, which is looser: --budget rel_l1={tuned_for:g} allows it"
        return limits


@dataclass(frozen=True)
class VerifyStep:
    name: str
    status: Status
    message: str  # one line: what was found, or what is wrong
    seconds: float = 0.0
    raised: bool = False  # it could not be carried out, which says nothing about being equal


@dataclass(frozen=True)
class Verification:
    """One model verified: the steps in their order, and what each of them told."""

    family: str
    kernel: str
    steps: tuple[VerifyStep, ...] = ()
    judged: tuple[Judged, ...] = field(default=(), repr=False, compare=False)  # in order of execution
    title: str = ""
    library: str = ""  # with its version
    structure: Structure | None = None  # None here and below: the step that tells it was not reached
    parameters: int | None = None
    swapped: int | None = None
    sparsity: float | None = None  # of all layers and batches of the forward step; None: the kernel left nothing out
    first_difference: int | None = None  # the step of the first generated token that is another one

    @cached_property
    def layers(self) -> "DataFrame":
        """A row per batch and layer in order of execution, and one for the model's end."""
        import pandas as pd

        rows = [
            asdict(row.verdict)
            | (asdict(row.deviation) if row.deviation else {})
            | {"batch": row.batch, "kind": row.kind, "layer": row.layer or "the model"}
            for row in self.judged
        ]
        frame = pd.DataFrame(rows, columns=list(LAYER_COLUMNS))
        frame.insert(0, "family", self.family)
        return frame

    @property
    def approximate(self) -> bool:
        """The kernel left something out: judged by a budget instead of by equality."""
        return self.sparsity is not None

    @property
    def passed(self) -> bool:
        return all(step.status in ("passed", "none") for step in self.steps)

    @property
    def failure(self) -> VerifyStep | None:
        """The first step that failed."""
        return next((step for step in self.steps if step.status == "failed"), None)

    @property
    def verdict(self) -> str:
        if self.passed:
            return "within budget" if self.approximate else "equal"
        if all(step.raised for step in self.steps if step.status == "failed"):
            return "error"
        if not self.approximate and self._is_rounded_worse:
            return "rounded worse"
        return "beyond budget" if self.approximate else "not equal"

    @property
    def _is_rounded_worse(self) -> bool:
        """No tensor is more than degraded, and nothing but the comparison of tensors failed."""
        failed = {step.name for step in self.steps if step.status == "failed"}
        statuses = set(self.layers["status"])
        return failed == {"forward"} and "degraded" in statuses and statuses <= {"ok", "degraded", "skipped"}

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def step(self, name: str) -> VerifyStep:
        return next(step for step in self.steps if step.name == name)

    def worst(self, *kinds: Kind) -> dict[str, Any]:
        """The row with the largest error over its noise floor N among rows of these kinds; {} if none has one."""
        judged = self.layers[self.layers["kind"].isin(kinds) & self.layers["err_ratio"].notna()]
        rows: list[Any] = judged.to_dict("records")
        return max(rows, key=lambda row: row["err_ratio"], default={})

    def farthest(self, *kinds: Kind) -> float | None:
        """The largest relative L1 among rows of these kinds; None if none has one."""
        found = self.layers.loc[self.layers["kind"].isin(kinds), "rel_l1"].dropna()
        return None if found.empty else float(found.max())

    def row(self) -> dict[str, Any]:
        """This verification as a row of the table of all; None where a step was not reached."""
        layer, failure = self.worst("layer"), self.failure
        return {
            "family": self.family,
            "title": self.title,
            "library": self.library,
            "kernel": self.kernel,
            "parameters": self.parameters,
            **{name: getattr(self.structure, name, None) for name in STRUCTURE_COLUMNS},
            "swapped": self.swapped,
            "worst_layer": layer.get("layer"),
            "worst_layer_batch": layer.get("batch"),
            "worst_layer_err_ratio": layer.get("err_ratio"),
            "end_err_ratio": self.worst("end", "fast path").get("err_ratio"),
            "generated_err_ratio": self.worst("generated").get("err_ratio"),
            "sparsity": self.sparsity,
            "worst_layer_rel_l1": self.farthest("layer"),
            "end_rel_l1": self.farthest("end"),
            "generated_rel_l1": self.farthest("generated"),
            "first_difference": self.first_difference,
            **{step.name: step.status for step in self.steps},
            "seconds": self.seconds,
            "verdict": self.verdict,
            "message": f"{failure.name}: {failure.message}" if failure else None,
            "generated": self.step("generate").message,
        }
