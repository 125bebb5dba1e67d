"""The page's trade-off picture as a file of its own: a panel for each size."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.errors import BadInput
from harness.record import EQUAL_STATUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.page import Run

PANELS = 8  # more are no picture; the page shows them one by one


def tradeoffs(runs: "Sequence[Run]") -> Any:
    """KV bytes per token against decode latency, one panel per setting."""
    import altair as alt

    from harness.report.page.charts import tradeoffs as layers
    from harness.report.page.rows import combine

    frame = combine(runs)
    shown = frame[(frame["phase"] == "decode") & frame["status"].isin(EQUAL_STATUSES) & frame["latency_ms"].notna()]
    shown = shown[(shown["dtype"] == "float32") & (shown["mask"] == "causal")]
    if shown.empty:
        raise BadInput("this run has no equal float32 causal decode cell to draw")
    panels = _fullest(shown)
    wanted = ["variant", "run", "series", "setting", "kv_bytes_per_token", "latency_ms", "latency_ratio",
              "latency_ratio_lo", "latency_ratio_hi", "params"]  # fmt: skip
    drawn = shown.loc[shown["setting"].isin(panels), wanted].reset_index(names="row")
    chart = layers(
        drawn, variants=list(dict.fromkeys(drawn["variant"])), runs=list(dict.fromkeys(drawn["run"]))
    ).properties(width=270, height=220)
    return chart.facet(facet=alt.Facet("setting:N", title=None, sort=panels), columns=2).resolve_scale(
        x="shared", y="independent"
    )


def _fullest(frame: pd.DataFrame) -> list[str]:
    """The settings with the most to compare, in the run's order."""
    counts = frame.groupby("setting", sort=False)["series"].nunique().sort_values(ascending=False, kind="stable")
    return [setting for setting in dict.fromkeys(frame["setting"]) if setting in counts.index[:PANELS]]


def save(runs: "Sequence[Run]", path: Path) -> None:
    """PNG or SVG, by the file's ending; drawn offline."""
    if path.suffix not in (".png", ".svg"):
        raise BadInput(f"{path}: must end in .png or .svg")
    chart = tradeoffs(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(str(path), **({"scale_factor": 2} if path.suffix == ".png" else {}))
