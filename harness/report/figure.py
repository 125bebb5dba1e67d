"""One picture of a run: what each variant keeps per token against what a decode step costs."""

from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import BadInput
from harness.report.summary import EQUAL


def tradeoffs(frame: pd.DataFrame) -> Any:
    """KV bytes per token against decode latency, one panel per size; the error bars are the samples' own interval."""
    import altair as alt

    shown = frame[(frame["phase"] == "decode") & frame["status"].isin(EQUAL) & frame["latency_ms"].notna()]
    shown = shown[(shown["dtype"] == "float32") & (shown["mask"] == "causal")].copy()
    if shown.empty:
        raise BadInput("this run has no equal float32 causal decode cell to draw")
    # The interval of the ratio, carried over to the latency itself.
    for end in ("lo", "hi"):
        shown[end] = shown["latency_ms"] * shown[f"latency_ratio_{end}"] / shown["latency_ratio"]
    shown["size"] = "E " + shown["embed_dim"].astype(str) + ", S " + shown["seq_len"].astype(str)
    x = alt.X(
        "kv_bytes_per_token:Q",
        title="KV cache, bytes per token and layer",
        scale=alt.Scale(type="log", base=2, padding=12),
    )
    color = alt.Color("variant:N", sort=None, scale=alt.Scale(scheme="tableau10"), legend=None)
    base = alt.Chart(shown).encode(x=x, color=color)
    points = base.mark_point(filled=True, size=70).encode(y=alt.Y("latency_ms:Q", title="decode step, ms"))
    bars = base.mark_rule().encode(y="lo:Q", y2="hi:Q")
    # Named where they stand: no legend to look up, and readable without colours.
    names = base.mark_text(align="left", dx=7).encode(y="latency_ms:Q", text="variant:N")
    panels = (
        (bars + points + names)
        .properties(width=210, height=170)
        .facet(facet=alt.Facet("size:N", title=None), columns=4)
    )
    return panels.resolve_scale(x="shared", y="independent")


def save(frame: pd.DataFrame, path: Path) -> None:
    """PNG, SVG or HTML, by the file's ending; drawn offline."""
    if path.suffix not in (".png", ".svg", ".html"):
        raise BadInput(f"{path}: must end in .png, .svg or .html")
    path.parent.mkdir(parents=True, exist_ok=True)
    chart = tradeoffs(frame)
    chart.save(str(path), **({"scale_factor": 2} if path.suffix == ".png" else {}))
