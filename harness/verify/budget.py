"""How far an approximate kernel may be from dense attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness.errors import BadInput

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
