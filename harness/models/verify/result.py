"""What a verification found: five steps, and one row for every layer and batch that was judged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from harness.cell.approximate import Metrics
from harness.errors import BadInput
from harness.models.families.family import Structure

if TYPE_CHECKING:
    from pandas import DataFrame


# ----------------------------------------------------------------------------------------------------------------------
# How far an approximation is from what it stands for.


@dataclass(frozen=True)
class Deviation:
    """Of all elements together, against float64. What is not finite makes them NaN or infinite: beyond any limit."""

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

    @property
    def rank(self) -> float:
        """Worst last; a NaN is worse than any number."""
        return self.rel_l1 if self.rel_l1 == self.rel_l1 else float("inf")

    @classmethod
    def unknown(cls) -> "Deviation":
        nan = float("nan")
        return cls(nan, nan, nan, nan)


# ----------------------------------------------------------------------------------------------------------------------
# How far an approximate kernel may be from dense attention.


LOOSEST_TUNED = 0.08  # SpargeAttn's, with a PV threshold


@dataclass(frozen=True)
class Budget:
    """Limits of the relative L1, sum|C - G| / sum|G|, with G in float64."""

    rel_l1: float = 0.07  # of each layer's attention, against dense attention on the same q, k and v
    end_rel_l1: float = 0.08  # of the model's output, against the original model's

    @classmethod
    def for_tuned(cls, limit: float) -> "Budget":
        """Thresholds are held to what they were tuned for, as far as SpargeAttn's own budgets go.

        A file could else set its own verdict: what is looser must be asked for.
        """
        return cls(rel_l1=max(cls.rel_l1, min(limit, LOOSEST_TUNED)))

    @classmethod
    def of(cls, given: Mapping[str, Any], *, default: "Budget | None" = None) -> "Budget":
        """`given` as on the command line; what it leaves out is as in `default`."""
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise BadInput(f"budget {name!r} is unknown; known: {', '.join(known)}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value >= 0):
                raise BadInput(f"budget {name} = {value!r}: must be a number, 0 or more")
        default = default or cls()
        return cls(**{name: float(given.get(name, getattr(default, name))) for name in known})


# ----------------------------------------------------------------------------------------------------------------------


STEPS = ("load", "inspect", "swap", "forward", "generate")
Status = Literal["passed", "failed", "none", "not run"]  # none: there is no such step for this model

END = "(end)"  # the model's own output, after the last layer
LATENTS = "(generated)"  # what a diffusion model's denoising gave
Kind = Literal["layer", "end", "fast path", "generated"]  # fast path: the end again, as users run the model


@dataclass(frozen=True)
class Step:
    name: str
    status: Status
    message: str  # one line: what was found, or what is wrong
    seconds: float = 0.0
    raised: bool = False  # it could not be carried out, which says nothing about being equal


@dataclass(frozen=True)
class Verification:
    """`layers` has a row per batch and layer in order of execution, and one for the model's end."""

    family: str
    title: str
    library: str  # with its version
    kernel: str
    steps: tuple[Step, ...]
    layers: "DataFrame" = field(repr=False, compare=False)
    structure: Structure | None = None  # None here and below: the step that tells it was not reached
    parameters: int | None = None
    swapped: int | None = None
    approximate: bool = False  # the kernel left something out: judged by a budget instead of by equality
    sparsity: float | None = None  # of all layers and batches of the forward step
    first_difference: int | None = None  # the step of the first generated token that is another one

    @property
    def passed(self) -> bool:
        return all(step.status in ("passed", "none") for step in self.steps)

    @property
    def failure(self) -> Step | None:
        """The first step that failed."""
        return next((step for step in self.steps if step.status == "failed"), None)

    @property
    def verdict(self) -> str:
        if self.passed:
            return "within budget" if self.approximate else "equal"
        if all(step.raised for step in self.steps if step.status == "failed"):
            return "error"
        return "beyond budget" if self.approximate else "not equal"

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def step(self, name: str) -> Step:
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
        layer, structure, failure = self.worst("layer"), self.structure, self.failure
        return {
            "family": self.family,
            "title": self.title,
            "library": self.library,
            "kernel": self.kernel,
            "parameters": self.parameters,
            "attention_class": structure and structure.attention_class,
            "layers": structure and structure.layers,
            "attentions": structure and structure.attentions,
            "heads": structure and structure.heads,
            "kv_heads": structure and structure.kv_heads,
            "head_dim": structure and structure.head_dim,
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
