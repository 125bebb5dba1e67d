"""The pictures as Vega-Lite specs. Their data arrives by name, so the page gives it once and may change it."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from harness.record import EQUAL_STATUSES

DATA = "rows"
DRAWN = "drawn"  # the layer whose data the picture's table shows
OK_UP_TO, DEGRADED_UP_TO = 2.0, 32.0  # in noise floors N
LARGEST_DRAWN = 1e6  # in noise floors N
NEAR = 0.06  # of the slowest time: names of points that are closer would lie on each other
JOINED = "join(pluck(datum.here, 'series'), ', ')"
STATUS_COLOURS = {"ok": "#2f9e77", "degraded": "#d9962b", "mismatch": "#d64550"}
STATUS_SHAPES = {"ok": "circle", "degraded": "triangle-up", "mismatch": "cross"}


def page_charts(frame: pd.DataFrame, left_out: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """All pictures of the page; scales that must not jump while someone filters are fixed by the whole table."""
    variants = list(dict.fromkeys(frame["variant"].astype(str)))
    runs = list(dict.fromkeys(frame["run"].astype(str)))
    charts = {
        "tradeoffs": tradeoffs(alt.NamedData(DATA), variants=variants, runs=runs).properties(
            width="container", height=380
        ),
        "prefill": curve("latency_ms", "prefill, ms", variants=variants, runs=runs),
        "decode": curve("latency_ms", "decode step, ms", variants=variants, runs=runs),
        "cache": curve("kv_cache_bytes", "KV cache, bytes", variants=variants, runs=runs),
        "errors": errors(frame),
        "speed": speed(frame),
    }
    if left_out:
        charts |= {"sparsity": sparsity(left_out), "gain": gain(left_out)}
    return {name: _plain(chart) for name, chart in charts.items()}


def _plain(chart: Any) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("config", None)  # the page has its own, for light and dark
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}  # as wide as its place, as high as it says
    return spec


def _variant(variants: Sequence[str], legend: Any) -> Any:
    return alt.Color("variant:N", scale=alt.Scale(domain=list(variants)), legend=legend)


def _run_shape(runs: Sequence[str]) -> Any:
    several = len(runs) > 1
    legend = alt.Legend(title=None, orient="top") if several else None
    return alt.Shape("run:N", scale=alt.Scale(domain=list(runs)), legend=legend)


def tradeoffs(data: Any, *, variants: Sequence[str], runs: Sequence[str]) -> Any:
    """KV bytes per token against a decode step, area = parameters, and the front that nothing beats on both."""
    base = alt.Chart().encode(
        x=alt.X(
            "kv_bytes_per_token:Q",
            title="KV cache, bytes per token and layer (left is better)",
            scale=alt.Scale(type="log", base=2, padding=40, nice=False),
            axis=alt.Axis(format=",d", tickCount=6, labelOverlap=True),
        )
    )
    y = alt.Y("latency_ms:Q", title="decode step, ms (lower is better)", axis=alt.Axis(tickCount=6))
    colour = _variant(variants, None)
    front = (
        base.transform_filter("datum.front")
        .mark_line(interpolate="step-after", strokeDash=[5, 4], strokeWidth=1.5, opacity=0.7)
        .encode(y=y, detail=["setting:N"], order="kv_bytes_per_token:Q")
    )
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(
        y=alt.Y("low_ms:Q"), y2="cut_ms:Q", color=colour, detail="row:Q"
    )
    points = (
        base.mark_point(filled=True, opacity=0.95, tooltip={"content": "data"})
        .encode(
            y=y,
            color=colour,
            shape=_run_shape(runs),
            size=alt.Size("params:Q", scale=alt.Scale(range=[70, 420], zero=True), legend=None),
        )
        .properties(name=DRAWN)
    )
    rings = base.transform_filter("datum.front").mark_point(size=620, strokeWidth=1.25, color="#808080").encode(y=y)
    # Named where they stand: no legend to look up, and readable without colours. Points at one place share one label,
    # and those of one variant its name: what tells them apart there would not fit beside it.
    names = (
        base.transform_filter("datum.from_top == 1")
        .transform_calculate(names="datum.variants_here == 1 && datum.here.length > 1 ? datum.variant : " + JOINED)
        .mark_text(align="center", dy=-19, fontSize=12, fontWeight=500)
        .encode(y=y, text="names:N")
    )
    ordered: dict[str, Any] = {
        "groupby": ["setting"],
        "sort": [alt.SortField("kv_bytes_per_token"), alt.SortField("latency_ms")],
        "ignorePeers": True,
    }
    column = ["setting", "kv_bytes_per_token"]
    upwards: dict[str, Any] = {"groupby": column, "sort": [alt.SortField("latency_ms")], "ignorePeers": True}
    return (
        alt.layer(front, bars, rings, points, names, data=data)
        # In order of the cache, a cell is on the front if it is faster than all before it. Two steps, because Vega's
        # frames always hold the row itself.
        .transform_window(best_so_far="min(latency_ms)", frame=[None, 0], **ordered)
        .transform_window(best_before="lag(best_so_far)", **ordered)
        .transform_joinaggregate(slowest="max(latency_ms)", groupby=["setting"])
        .transform_calculate(
            front="!isValid(datum.best_before) || datum.latency_ms < datum.best_before",
            # The interval of the ratio, carried over to the latency itself.
            low_ms="datum.latency_ms * datum.latency_ratio_lo / datum.latency_ratio",
            high_ms="datum.latency_ms * datum.latency_ratio_hi / datum.latency_ratio",
            # One disturbed sample must not press all points to the floor.
            cut_ms="min(datum.high_ms, 1.25 * datum.slowest)",
        )
        # One place: the same cache, and each time near the one below it.
        .transform_window(below="lag(latency_ms)", **upwards)
        .transform_calculate(
            apart=f"isValid(datum.below) && datum.latency_ms - datum.below > {NEAR} * datum.slowest ? 1 : 0"
        )
        .transform_window(place="sum(apart)", frame=[None, 0], **upwards)
        .transform_joinaggregate(here="values(series)", variants_here="distinct(variant)", groupby=[*column, "place"])
        .transform_window(
            from_top="row_number()", groupby=[*column, "place"], sort=[alt.SortField("latency_ms", order="descending")]
        )
    )


def curve(field: str, title: str, *, variants: Sequence[str], runs: Sequence[str]) -> Any:
    """One cost over the sequence length, both on a log scale: a straight line is a power of the length."""
    base = alt.Chart().encode(
        x=alt.X(
            "seq_len:Q",
            title="sequence length",
            scale=alt.Scale(type="log", base=2, padding=12, nice=False),
            axis=alt.Axis(format=",d", tickCount=6, labelOverlap=True, labelSeparation=8),
        ),
        y=alt.Y(
            f"{field}:Q",
            title=title,
            scale=alt.Scale(type="log", padding=8, nice=False),
            axis=alt.Axis(format="~g" if field == "latency_ms" else "~s", tickCount=5, gridOpacity=0.5),
        ),
        color=_variant(variants, None),
        detail="series:N",
    )
    lines = base.mark_line(strokeWidth=2, opacity=0.9)
    points = (
        base.mark_point(filled=True, size=48, opacity=1, tooltip={"content": "data"})
        .encode(shape=_run_shape(runs))
        .properties(name=DRAWN)
    )
    return alt.layer(lines, points, data=alt.NamedData(DATA)).properties(width="container", height=230)


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
    bounds = [("ok", low, OK_UP_TO), ("degraded", OK_UP_TO, DEGRADED_UP_TO), ("mismatch", DEGRADED_UP_TO, high)]
    zones = alt.Chart(alt.InlineData(values=[{"zone": zone, "from": a, "to": b} for zone, a, b in bounds]))
    colour = alt.Scale(domain=list(STATUS_COLOURS), range=list(STATUS_COLOURS.values()))
    bands = zones.mark_rect(opacity=0.09).encode(
        y=alt.Y(
            "from:Q",
            scale=y,
            title="error ÷ noise floor N",
            axis=alt.Axis(values=_marks(low, high), labelExpr=MARK, grid=False),
        ),
        y2="to:Q",
        color=alt.Color("zone:N", scale=colour, legend=None),
    )
    words = zones.mark_text(align="right", baseline="top", dx=-8, dy=6, opacity=0.75).encode(
        x=alt.value("width"), y=alt.Y("to:Q", scale=y), text="zone:N"
    )
    x = alt.X(
        "err_budget:Q",
        title="budget, 2 N: the largest error that is ok",
        scale=alt.Scale(type="log", padding=16),
        axis=alt.Axis(format=".0e", tickCount=6, labelOverlap=True),
    )
    shape = alt.Scale(domain=list(STATUS_SHAPES), range=list(STATUS_SHAPES.values()))
    points = (
        alt.Chart(alt.NamedData(DATA))
        .mark_point(size=36, opacity=0.75, strokeWidth=1.5, tooltip={"content": "data"})
        .encode(
            x=x,
            y=alt.Y("err_drawn:Q", scale=y),
            color=alt.Color("status:N", scale=colour, legend=None),
            shape=alt.Shape("status:N", scale=shape, legend=None),
        )
        .properties(name=DRAWN)
    )
    return alt.layer(bands, words, points).properties(width="container", height=340)


MARK = "datum.value < 1e4 ? format(datum.value, '~g') : format(datum.value, '.0e')"


def _marks(low: float, high: float) -> list[float]:
    """The two limits and the powers of ten around them."""
    powers = [10.0**power for power in range(-3, 13) if power != 1]
    return [mark for mark in sorted([*powers, OK_UP_TO, 8.0, DEGRADED_UP_TO]) if low <= mark <= high]


def speed(frame: pd.DataFrame) -> Any:
    """Latency over the reference's, geometric mean of the cells behind each square; places stay while rows go."""
    timed = frame[frame["latency_ratio"].notna() & frame["status"].isin(EQUAL_STATUSES)]
    places = sorted(set(timed["phase"].astype(str) + " · " + timed["mask"].astype(str)))
    series = list(dict.fromkeys(timed["series"].astype(str)))
    base = alt.Chart(alt.NamedData(DATA)).encode(
        x=alt.X(
            "series:N",
            title=None,
            scale=alt.Scale(domain=series),
            axis=alt.Axis(orient="top", labelAngle=-35, labelLimit=150),
        ),
        y=alt.Y("place:N", title=None, scale=alt.Scale(domain=places), axis=alt.Axis(labelLimit=170)),
    )
    squares = (
        base.mark_rect(tooltip={"content": "data"}, cornerRadius=3, strokeWidth=2)
        .encode(
            color=alt.Color(
                "doublings:Q",
                scale=alt.Scale(domain=[-2, 2], domainMid=0, clamp=True, interpolate="rgb"),
                legend=None,
            )
        )
        .properties(name=DRAWN)
    )
    numbers = base.mark_text(fontSize=11, tooltip={"content": "data"}).encode(text=alt.Text("ratio:Q", format=".2f"))
    return (
        alt.layer(squares, numbers)
        .resolve_scale(color="independent")
        .properties(width="container", height=28 * max(1, len(places)))
    )


def sparsity(left_out: Sequence[Mapping[str, Any]]) -> Any:
    """What approximate kernels lost over what they skipped; a colour for each kind of input, a shape a kernel."""
    chart = alt.Chart(alt.NamedData(DATA)).mark_point(size=60, filled=True, opacity=0.85, tooltip={"content": "data"})
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
    base = alt.Chart(alt.NamedData(DATA)).encode(
        x=alt.X(
            "seq_len:Q",
            title="sequence length",
            scale=alt.Scale(type="log", base=2, padding=24, nice=False),
            axis=alt.Axis(format=",d", tickCount=6, labelOverlap=True, labelSeparation=8),
        ),
        y=alt.Y("dense_ratio:Q", title="latency ÷ dense (lower is better)", axis=alt.Axis(tickCount=6)),
        **_structure(left_out),
    )
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.4).encode(y="dense_ratio_lo:Q", y2="dense_ratio_hi:Q")
    points = base.mark_point(size=60, filled=True, opacity=0.85, tooltip={"content": "data"}).properties(name=DRAWN)
    return alt.layer(level, bars, points).properties(width="container", height=320)


def _structure(left_out: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    inputs, kernels = (list(dict.fromkeys(str(row[name]) for row in left_out)) for name in ("inputs", "kernel"))
    legend: dict[str, Any] = {"orient": "bottom", "direction": "horizontal", "columns": 2, "labelLimit": 260}
    return {
        "color": alt.Color("inputs:N", scale=alt.Scale(domain=inputs), legend=alt.Legend(title="inputs", **legend)),
        "shape": alt.Shape("kernel:N", scale=alt.Scale(domain=kernels), legend=alt.Legend(title="kernel", **legend)),
    }
