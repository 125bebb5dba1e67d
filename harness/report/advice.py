"""What `harness advise` shows: one row a variant, and the choice in one sentence."""

from rich.console import Console

from harness.advise.choose import Advice, Alternative, faster
from harness.advise.memory import Requirement
from harness.advise.roofline import BEYOND, CACHED, Roofline
from harness.advise.work import Figure, StepPart
from harness.report.table import Column, Table
from harness.report.terminal import say
from harness.text import ABSENT, count, milliseconds, percent, plain, plural

LEGEND = (
    "own: what the model has. params: of the attention of one layer. cache: KV cache at this context and batch, of it "
    "and with the weights the share of the memory. longest, most: the largest context at this batch and the largest "
    "batch at this context that fit.",
    "*: on the front: no other is as good or better on all of cache, parameters, key/value heads (kv) and, where "
    "measured and beyond its error, time. How well a model answers is not judged here, and another variant must be "
    "trained or converted to.",
)
ROUGH = 0.3  # of a time: with a wider spread it is no more than a hint
BUSY = "These times are rough: other work on this machine disturbed the measuring. Again when it is quiet?"
COSTS = {
    True: "cache, parameters, key/value heads and, beyond its error, time at once",
    False: "cache, parameters and key/value heads at once",
}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
STEP = (
    "step: one decode step of one layer here, predicted from measured speeds; ±: the spread of these. The whole "
    "model takes as many as it has layers, and its other parts."
)


def print_advice(advice: Advice, console: Console, *, roofline: Roofline | None, measurements: bool = False) -> None:
    say(console, _title(advice.demand), style="bold")
    console.print()
    room = _room(advice)
    whole = Table([*NAME, *WEIGHT, *room], advice.options)
    if whole.fits(console):
        console.print(whole)
    else:
        console.print(Table([*NAME, *WEIGHT], advice.options, "What does it weigh?"))
        console.print()
        console.print(Table([*NAME, *room], advice.options, "What fits, and how fast is it?"))
    console.print()
    say(console, *LEGEND, *([] if roofline is None else [STEP]), style="dim")
    say(console, *warnings(advice, roofline), style="yellow")
    if roofline is not None and measurements:
        console.print()
        _print_measurements(roofline, console)
    console.print()
    say(console, sentence(advice), style="bold green" if advice.chosen is not None else "bold red")


def warnings(advice: Advice, roofline: Roofline | None) -> list[str]:
    """What makes the times doubtful: samples that spread, and others' work that slows all of them alike."""
    lines = []
    if any(option.step is not None and option.step.error > ROUGH for option in advice.options):
        lines.append(BUSY)
    if roofline is not None and roofline.disturbance is not None and (words := roofline.disturbance.words):
        lines.append(f"These times may be too long: {words}. ± does not show a steady load. Again when it is quiet?")
    return lines


def sentence(advice: Advice) -> str:
    """What to choose and why, from the numbers of the table alone."""
    demand, chosen = advice.demand, advice.chosen
    asked = f"{demand.context:,} tokens x {demand.batch:,} in {size(demand.memory)}"
    if chosen is None:
        least = min(advice.options, key=lambda option: option.footprint.needed)
        return f"Nothing fits {asked}: the smallest, {least.candidate.label}, needs {size(least.footprint.needed)}."
    measured = chosen.step is not None
    own = next((option for option in advice.options if option.candidate.own), None)
    words = f"{_heads(chosen)}, cache {size(chosen.footprint.cache_bytes)}"
    if chosen.step is not None:
        words += f", {step(chosen.step)} a layer"
    label = chosen.candidate.label
    if own is chosen:
        return f"Keep {label}: it fits {asked}, and nothing that fits beats it on {COSTS[measured]} ({words})."
    if own is None:
        reason = f"of what fits and is unbeaten on {COSTS[measured]}, it has the most heads"
    elif not own.footprint.fits:
        needs = f"{own.candidate.label} needs {size(own.footprint.needed)}"
        reason = f"{needs}; of what fits, this has the most key/value heads"
    else:
        reason = f"nowhere worse than {own.candidate.label} on {COSTS[False]}"
        if measured:
            reason += ", and faster" if faster(chosen, own) else ", and no slower within the error"
    return f"Choose {label} for {asked} ({words}): {reason}."


def _heads(option: Alternative) -> str:
    heads = option.candidate.kv_heads
    latent = " from one latent" if option.candidate.case.kv_lora_rank is not None else ""
    return f"{heads} key/value {'head' if heads == 1 else 'heads'}{latent}"


def _title(demand: Requirement) -> str:
    model = demand.model
    sizes = f"E {model.embed_dim}, {plural(model.layers, 'layer', 'layers')}, {model.heads} heads of {model.head_dim}"
    window = "" if model.window is None else f", window {model.window:,}"
    asked = f"{demand.context:,} tokens x {demand.batch:,}, {demand.dtype}, {size(demand.memory)}"
    return f"{plain(model.name)} ({sizes}{window}): {asked}"


NAME = [
    Column("", lambda option: "*" if option.pareto else "", left=True),
    Column("variant", lambda option: f"{option.candidate.label}{' own' if option.candidate.own else ''}", left=True),
]
WEIGHT = [
    Column("kv", lambda option: option.candidate.kv_heads),
    Column("params", lambda option: f"{option.candidate.attention_params:,}"),
    Column("B/token/layer", lambda option: f"{option.candidate.bytes_per_token_layer:,}"),
    Column("B/token", lambda option: f"{option.footprint.bytes_per_token:,}"),
    Column("cache", lambda option: size(option.footprint.cache_bytes)),
]


def _room(advice: Advice) -> list[Column]:
    def longest(option: Alternative) -> str:
        context = option.footprint.largest_context
        return "any" if context is None else f"{context:,}"

    columns = [
        Column("of memory", lambda option: share_of(option.footprint.cache_share)),
        Column("with weights", lambda option: share_of(option.footprint.whole_share)),
        Column("longest", longest),
        Column("most", lambda option: f"{option.footprint.largest_batch:,}"),
        Column("step", lambda option: ABSENT if option.step is None else step(option.step)),
    ]
    if advice.options[0].footprint.weight_bytes is None:
        del columns[1]
    return columns if any(option.step is not None for option in advice.options) else columns[:-1]


def _print_measurements(roofline: Roofline, console: Console) -> None:
    """What was read, how many bytes, among how many, and how fast."""
    rows = [
        (f"reading {place}", span, span, roofline.reading[span])
        for place, span in (("in cache", CACHED), ("from memory", BEYOND))
    ]
    rows += [
        (part_name(part), part.bytes, span, seconds.times(1 / part.bytes))
        for (part, span), seconds in roofline.parts.items()
        if part.bytes
    ]
    columns = [
        Column(plural(roofline.threads, "thread", "threads"), lambda row: row[0], left=True),
        Column("bytes", lambda row: size(row[1])),
        Column("among", lambda row: size(row[2])),
        Column("GB/s", lambda row: f"{1e-9 / row[3].value:.1f} ±{row[3].error:.0%}"),
    ]
    console.print(Table(columns, rows, "Measured"))
    for (part, span), overhead in roofline.parts.items():
        if part.kind == "overhead":
            name = "an MLA" if part.latent else "a"
            say(console, f"overhead of {name} step: {1e6 * overhead.value:.0f} µs, among {size(span)}")


def part_name(part: StepPart) -> str:
    if part.kind == "attention":
        return f"attention, {plural(part.rows, 'query', 'queries')} x {part.batch * part.heads}"
    return f"{part.kind.replace('_', ' ')}, {plural(part.batch, 'row', 'rows')}"


def step(seconds: Figure) -> str:
    return f"{milliseconds(1e3 * seconds.value)} ms ±{percent(seconds.error)}"


def share_of(share: float | None) -> str:
    return percent(share, 1) if share is None or share < 10 else f"{count(round(100 * share))} %"


def size(number: int) -> str:
    """By 1024, three digits."""
    power = next((power for power in range(4) if number < 1000 * 1024**power), 4)
    return f"{number / 1024**power:,.4g} {UNITS[power]}"
