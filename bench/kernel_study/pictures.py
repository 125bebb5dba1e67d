"""prefill.png and decode.png: each kernel's time over SDPA's, against the length."""

from pathlib import Path
from typing import Any

import pandas as pd

AXES = {"prefill": ("queries", "prompt length L"), "decode": ("keys", "keys in the cache S")}


def save_all(frame: pd.DataFrame, folder: Path) -> list[str]:
    """The names of the pictures drawn: of each study of which there is something to draw."""
    drawn = []
    for study in AXES:
        shown = _shown(frame, study)
        if not shown.empty:
            chart(shown, study).save(str(folder / f"{study}.png"), scale_factor=2)
            drawn.append(f"{study}.png")
    return drawn


def chart(shown: pd.DataFrame, study: str) -> Any:
    """Lines with their 95 % intervals; the dashed line at 1 is SDPA."""
    import altair as alt

    column, title = AXES[study]
    ticks = alt.Axis(values=sorted(shown[column].unique().tolist()), labelOverlap=True)
    x = alt.X(f"{column}:Q", title=title, scale=alt.Scale(type="log", base=2), axis=ticks)
    y = alt.Y("x_sdpa:Q", title="time over SDPA's", scale=alt.Scale(type="log"))
    color = alt.Color("side:N", title=None, scale=alt.Scale(scheme="tableau10"), legend=alt.Legend(orient="top"))
    base = alt.Chart(shown).encode(x=x, color=color)
    lines = base.mark_line(point=True).encode(y=y)
    bars = base.mark_rule().encode(y="x_sdpa_lo:Q", y2="x_sdpa_hi:Q")
    sdpa = alt.Chart(shown).mark_rule(strokeDash=[4, 3], color="black").encode(y=alt.datum(1))
    return (
        (sdpa + bars + lines).properties(width=230, height=180).facet(facet=alt.Facet("panel:N", title=None), columns=2)
    )


def _shown(frame: pd.DataFrame, study: str) -> pd.DataFrame:
    """float32, one sequence: one panel for each head layout, width and mask."""
    own = frame[(frame["study"] == study) & (frame["dtype"] == "float32") & (frame["batch"] == 1)]
    own = own[own["x_sdpa"].notna()].copy()
    heads = "H " + own["heads"].astype(str) + "/" + own["kv_heads"].astype(str) + ", D " + own["head_dim"].astype(str)
    own["panel"] = heads + own["causal"].map({True: ", causal", False: ""}).astype(str)
    return own
