"""The page's trade-off picture as a file of its own: a panel for each size."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.errors import BadInput
from harness.report.page import refuse_without_packages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.page import StoredRun

PANELS = 8  # more are no picture; the page shows them one by one


def tradeoffs(runs: "Sequence[StoredRun]") -> Any:
    """KV bytes per token against decode latency, one panel per setting."""
    import altair as alt

    from harness.report.page.charts import tradeoffs as layers
    from harness.report.page.rows import combine, tradeoff_points

    points = tradeoff_points(combine(runs))
    points = points[(points["dtype"] == "float32") & (points["mask"] == "causal")]
    if points.empty:
        raise BadInput("this run has no equal float32 causal decode cell to draw")
    panels = _fullest(points)
    wanted = ["variant", "run", "series", "setting", "kv_bytes_per_token", "latency_ms", "low_ms", "cut_ms", "params",
              "spot"]  # fmt: skip
    drawn = points.loc[points["setting"].isin(panels), wanted].assign(front=points["beaten_by"].map(len) == 0)
    chart = layers(drawn.reset_index(names="row"), variants=drawn["variant"], runs=drawn["run"])
    facet = alt.Facet("setting:N", title=None, sort=panels)
    small = chart.properties(width=270, height=220)
    return small.facet(facet=facet, columns=2).resolve_scale(x="shared", y="independent")


def _fullest(frame: pd.DataFrame) -> list[str]:
    """The settings with the most to compare, in the run's order."""
    counts = frame.groupby("setting", sort=False)["series"].nunique().sort_values(ascending=False, kind="stable")
    return [setting for setting in dict.fromkeys(frame["setting"]) if setting in counts.index[:PANELS]]


def save(runs: "Sequence[StoredRun]", path: Path) -> None:
    """PNG or SVG, by the file's ending; drawn offline."""
    if path.suffix not in (".png", ".svg"):
        raise BadInput(f"{path}: must end in .png or .svg")
    refuse_without_packages(path)
    chart = tradeoffs(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(str(path), **({"scale_factor": 2} if path.suffix == ".png" else {}))
