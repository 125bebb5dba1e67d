"""The pictures as Vega-Lite specs: how the columns of rows.py are drawn, nothing else.

Their data arrives by name, so the page gives it once and may change it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from harness.record import DEGRADED_FACTOR, OK_FACTOR
from harness.report.summary import is_timed

DATA = "rows"
DRAWN = "drawn"  # the layer whose data the picture's table shows
LARGEST_DRAWN = 1e6  # in noise floors N
STATUS_COLOURS = {"ok": "#2f9e77", "degraded": "#d9962b", "mismatch": "#d64550"}
STATUS_SHAPES = {"ok": "circle", "degraded": "triangle-up", "mismatch": "cross"}
TIPS: Any = {"content": "data"}
# Points of one variant at one place share its name: what tells them apart there would not fit beside it.
NAMES = "datum.variants == 1 && datum.here.length > 1 ? datum.here[0].variant : join(pluck(datum.here, 'series'), ', ')"
MARK = "datum.value < 1e4 ? format(datum.value, '~g') : format(datum.value, '.0e')"


def page_charts(frame: pd.DataFrame, left_out: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """All pictures of the page; scales that must not jump while someone filters are fixed by the whole table."""
    who = {"variants": frame["variant"], "runs": frame["run"]}
    charts = {
        "tradeoffs": tradeoffs(alt.NamedData(DATA), **who).properties(width="container", height=380),
        "prefill": curve("latency_ms", "prefill, ms", **who),
        "decode": curve("latency_ms", "decode step, ms", **who),
        "cache": curve("kv_cache_bytes", "KV cache, bytes", **who),
        "errors": errors(frame),
        "speed": speed(frame),
    }
    if left_out:
        charts |= {"sparsity": sparsity(left_out), "gain": gain(left_out)}
    return {name: _spec(chart) for name, chart in charts.items()}


def _spec(chart: Any) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("config", None)  # the page has its own, for light and dark
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}  # as wide as its place, as high as it says
    return spec


def _who(variants: pd.Series, runs: pd.Series) -> dict[str, Any]:
    """A colour for each variant, and where there are several a shape for each run."""
    legend = alt.Legend(title=None, orient="top") if runs.nunique() > 1 else None
    return {
        "color": alt.Color("variant:N", scale=alt.Scale(domain=_words(variants)), legend=None),
        "shape": alt.Shape("run:N", scale=alt.Scale(domain=_words(runs)), legend=legend),
    }


def _words(values: Any) -> list[str]:
    return list(dict.fromkeys(map(str, values)))


def tradeoffs(data: Any, *, variants: pd.Series, runs: pd.Series) -> Any:
    """KV bytes per token against a decode step, area = parameters, and the front that nothing beats on both."""
    base = alt.Chart().encode(
        x=alt.X(
            "kv_bytes_per_token:Q",
            title="KV cache, bytes per token and layer (left is better)",
            scale=alt.Scale(type="log", base=2, padding=40, nice=False),
            axis=alt.Axis(format=",d", tickCount=6, labelOverlap=True),
        ),
        y=alt.Y("latency_ms:Q", title="decode step, ms (lower is better)", axis=alt.Axis(tickCount=6)),
    )
    who = _who(variants, runs)
    on_front = base.transform_filter("datum.front")
    front = on_front.mark_line(interpolate="step-after", strokeDash=[5, 4], strokeWidth=1.5, opacity=0.7).encode(
        detail=["setting:N"], order="kv_bytes_per_token:Q"
    )
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(
        y=alt.Y("low_ms:Q"), y2="cut_ms:Q", color=who["color"], detail="row:Q"
    )
    rings = on_front.mark_point(size=620, strokeWidth=1.25, color="#808080")
    size = alt.Size("params:Q", scale=alt.Scale(range=[70, 420], zero=True), legend=None)
    points = base.mark_point(filled=True, opacity=0.95, tooltip=TIPS).encode(size=size, **who).properties(name=DRAWN)
    # Named where they stand: no legend to look up, and readable without colours. Points at one spot share one label.
    names = (
        base.transform_aggregate(
            latency_ms="max(latency_ms)",
            here="values(series)",
            variants="distinct(variant)",
            groupby=["setting", "kv_bytes_per_token", "spot"],
        )
        .transform_calculate(names=NAMES)
        .mark_text(align="center", dy=-19, fontSize=12, fontWeight=500)
        .encode(text="names:N")
    )
    return alt.layer(front, bars, rings, points, names, data=data)


def _over_length(padding: int) -> Any:
    return alt.X(
        "seq_len:Q",
        title="sequence length",
        scale=alt.Scale(type="log", base=2, padding=padding, nice=False),
        axis=alt.Axis(format=",d", tickCount=6, labelOverlap=True, labelSeparation=8),
    )


def curve(field: str, title: str, *, variants: pd.Series, runs: pd.Series) -> Any:
    """One cost over the sequence length, both on a log scale: a straight line is a power of the length."""
    who = _who(variants, runs)
    y = alt.Y(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(type="log", padding=8, nice=False),
        axis=alt.Axis(format="~g" if field == "latency_ms" else "~s", tickCount=5, gridOpacity=0.5),
    )
    base = alt.Chart().encode(x=_over_length(12), y=y, color=who["color"], detail="series:N")
    lines = base.mark_line(strokeWidth=2, opacity=0.9)
    points = base.mark_point(filled=True, size=48, opacity=1, tooltip=TIPS).encode(shape=who["shape"])
    layers = alt.layer(lines, points.properties(name=DRAWN), data=alt.NamedData(DATA))
    return layers.properties(width="container", height=230)


def error_range(frame: pd.DataFrame) -> tuple[float, float]:
    """What the picture of errors spans. Beyond it, and that is said, cells stand on the edge: infinite errors, an exact
    zero, and what is so large that the limits would be squeezed to a line."""
    ratios = frame["err_ratio"].astype("float64")
    finite = ratios[(ratios > 0) & (ratios < float("inf"))]
    if finite.empty:
        return 0.05, 100.0
    return min(0.05, float(finite.min()) / 2), min(LARGEST_DRAWN, max(100.0, float(finite.max()) * 2))


def errors(frame: pd.DataFrame) -> Any:
    """Each cell's error in noise floors over its budget: float64 stands far left, the half types far right."""
    low, high = error_range(frame)
    y = alt.Scale(type="log", domain=[low, high], clamp=True, nice=False)
    powers = [10.0**power for power in range(-3, 13) if power != 1]
    marks = [mark for mark in sorted([*powers, OK_FACTOR, 8.0, DEGRADED_FACTOR]) if low <= mark <= high]
    edges = (low, OK_FACTOR, DEGRADED_FACTOR, high)
    bounds = [{"zone": zone, "from": a, "to": b} for zone, a, b in zip(STATUS_COLOURS, edges, edges[1:], strict=False)]
    zones = alt.Chart(alt.InlineData(values=bounds))
    colour = alt.Scale(domain=list(STATUS_COLOURS), range=list(STATUS_COLOURS.values()))
    axis = alt.Axis(values=marks, labelExpr=MARK, grid=False)
    bands = zones.mark_rect(opacity=0.09).encode(
        y=alt.Y("from:Q", scale=y, title="error ÷ noise floor N", axis=axis),
        y2="to:Q",
        color=alt.Color("zone:N", scale=colour, legend=None),
    )
    words = zones.mark_text(align="right", baseline="top", dx=-8, dy=6, opacity=0.75).encode(
        x=alt.value("width"), y=alt.Y("to:Q", scale=y), text="zone:N"
    )
    x = alt.X(
        "err_budget:Q",
        title=f"budget, {OK_FACTOR:g} N: the largest error that is ok",
        scale=alt.Scale(type="log", padding=16),
        axis=alt.Axis(format=".0e", tickCount=6, labelOverlap=True),
    )
    shape = alt.Scale(domain=list(STATUS_SHAPES), range=list(STATUS_SHAPES.values()))
    points = (
        alt.Chart(alt.NamedData(DATA), name=DRAWN)
        .mark_point(size=36, opacity=0.75, strokeWidth=1.5, tooltip=TIPS)
        .encode(
            x=x,
            y=alt.Y("err_drawn:Q", scale=y),
            color=alt.Color("status:N", scale=colour, legend=None),
            shape=alt.Shape("status:N", scale=shape, legend=None),
        )
    )
    return alt.layer(bands, words, points).properties(width="container", height=340)


def speed(frame: pd.DataFrame) -> Any:
    """Latency over the reference's, geometric mean of the cells behind each square; places stay while rows go."""
    timed = frame[is_timed(frame) & frame["latency_ratio"].notna()]
    places = sorted(set(timed["phase"].astype(str) + " · " + timed["mask"].astype(str)))
    top = alt.Axis(orient="top", labelAngle=-35, labelLimit=150)
    base = alt.Chart(alt.NamedData(DATA)).encode(
        x=alt.X("series:N", title=None, scale=alt.Scale(domain=_words(timed["series"])), axis=top),
        y=alt.Y("place:N", title=None, scale=alt.Scale(domain=places), axis=alt.Axis(labelLimit=170)),
    )
    colour = alt.Scale(domain=[-2, 2], domainMid=0, clamp=True, interpolate="rgb")
    squares = base.mark_rect(tooltip=TIPS, cornerRadius=3, strokeWidth=2).encode(
        color=alt.Color("doublings:Q", scale=colour, legend=None)
    )
    numbers = base.mark_text(fontSize=11, tooltip=TIPS).encode(text=alt.Text("ratio:Q", format=".2f"))
    layers = alt.layer(squares.properties(name=DRAWN), numbers).resolve_scale(color="independent")
    return layers.properties(width="container", height=28 * max(1, len(places)))


def sparsity(left_out: Sequence[Mapping[str, Any]]) -> Any:
    """What approximate kernels lost over what they skipped; a colour for each kind of input, a shape a kernel."""
    chart = alt.Chart(alt.NamedData(DATA)).mark_point(size=60, filled=True, opacity=0.85, tooltip=TIPS)
    return chart.encode(
        x=alt.X(
            "sparsity:Q",
            title="sparsity: share of the visible blocks that was skipped",
            scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format=".0%", tickCount=6),
        ),
        y=alt.Y("rel_l1:Q", title="relative L1 error (lower is better)", axis=alt.Axis(tickCount=6)),
        **_structure(left_out),
    ).properties(name=DRAWN, width="container", height=320)


def gain(left_out: Sequence[Mapping[str, Any]]) -> Any:
    """Latency over the dense kernel's, over the sequence length."""
    level = alt.Chart(alt.InlineData(values=[{"even": 1}])).mark_rule(strokeDash=[5, 4], opacity=0.7).encode(y="even:Q")
    y = alt.Y("dense_ratio:Q", title="latency ÷ dense (lower is better)", axis=alt.Axis(tickCount=6))
    base = alt.Chart(alt.NamedData(DATA)).encode(x=_over_length(24), y=y, **_structure(left_out))
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.4).encode(y="dense_ratio_lo:Q", y2="dense_ratio_hi:Q")
    points = base.mark_point(size=60, filled=True, opacity=0.85, tooltip=TIPS).properties(name=DRAWN)
    return alt.layer(level, bars, points).properties(width="container", height=320)


def _structure(left_out: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    inputs, kernels = (_words(row[name] for row in left_out) for name in ("inputs", "kernel"))
    legend: dict[str, Any] = {"orient": "bottom", "direction": "horizontal", "columns": 2, "labelLimit": 260}
    return {
        "color": alt.Color("inputs:N", scale=alt.Scale(domain=inputs), legend=alt.Legend(title="inputs", **legend)),
        "shape": alt.Shape("kernel:N", scale=alt.Scale(domain=kernels), legend=alt.Legend(title="kernel", **legend)),
    }
