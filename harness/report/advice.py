"""What `harness advise` shows: one row a variant, and the choice in one sentence."""

from rich.console import Console
from rich.text import Text

from harness.advise.choose import Advice, Option, faster
from harness.advise.memory import Demand
from harness.advise.roofline import BEYOND, CACHED, Roofline
from harness.advise.work import Figure, Part
from harness.report.story import Column
from harness.report.terminal import fits, table_of
from harness.text import ABSENT, count, milliseconds, plain, plural

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
    demand = advice.demand
    console.print(Text(_title(demand), "bold"), highlight=False)
    console.print()
    own, weight, room = _names(advice), _weight(advice), _room(advice)
    table = table_of([*own, *weight, *room])
    if fits(table, console):
        console.print(table)
    else:
        console.print(table_of([*own, *weight], title="What does it weigh?"))
        console.print()
        console.print(table_of([*own, *room], title="What fits, and how fast is it?"))
    console.print()
    for line in LEGEND if roofline is None else (*LEGEND, STEP):
        console.print(Text(line, "dim"), highlight=False)
    for line in warnings(advice, roofline):
        console.print(Text(line, "yellow"), highlight=False)
    if roofline is not None and measurements:
        console.print()
        _print_measurements(roofline, console)
    console.print()
    style = "bold green" if advice.chosen is not None else "bold red"
    console.print(Text(sentence(advice), style), highlight=False)


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


def _heads(option: Option) -> str:
    heads = option.candidate.kv_heads
    latent = " from one latent" if option.candidate.case.kv_lora_rank is not None else ""
    return f"{heads} key/value {'head' if heads == 1 else 'heads'}{latent}"


def _title(demand: Demand) -> str:
    model = demand.model
    sizes = f"E {model.embed_dim}, {plural(model.layers, 'layer', 'layers')}, {model.heads} heads of {model.head_dim}"
    window = "" if model.window is None else f", window {model.window:,}"
    asked = f"{demand.context:,} tokens x {demand.batch:,}, {demand.dtype}, {size(demand.memory)}"
    return f"{plain(model.name)} ({sizes}{window}): {asked}"


def _names(advice: Advice) -> list[Column]:
    def name(option: Option) -> str:
        return f"{option.candidate.label}{' own' if option.candidate.own else ''}"

    return [
        Column("", ["*" if option.pareto else "" for option in advice.options], left=True),
        Column("variant", [name(option) for option in advice.options], left=True),
    ]


def _weight(advice: Advice) -> list[Column]:
    options = advice.options
    return [
        Column("kv", [str(option.candidate.kv_heads) for option in options]),
        Column("params", [f"{option.candidate.attention_params:,}" for option in options]),
        Column("B/token/layer", [f"{option.candidate.bytes_per_token_layer:,}" for option in options]),
        Column("B/token", [f"{option.footprint.bytes_per_token:,}" for option in options]),
        Column("cache", [size(option.footprint.cache_bytes) for option in options]),
    ]


def _room(advice: Advice) -> list[Column]:
    prints = [option.footprint for option in advice.options]
    known = prints[0].weight_bytes is not None
    columns = [Column("of memory", [percent(one.cache_share) for one in prints])]
    if known:
        columns.append(Column("with weights", [percent(one.whole_share) for one in prints]))
    columns += [
        Column("longest", ["any" if one.largest_context is None else f"{one.largest_context:,}" for one in prints]),
        Column("most", [f"{one.largest_batch:,}" for one in prints]),
    ]
    steps = [option.step for option in advice.options]
    if any(one is not None for one in steps):
        columns.append(Column("step", [ABSENT if one is None else step(one) for one in steps]))
    return columns


def _print_measurements(roofline: Roofline, console: Console) -> None:
    def speed(per_byte: Figure) -> str:
        return f"{1e-9 / per_byte.value:.1f} ±{per_byte.error:.0%}"

    rows = [(f"reading {place}", size(span), size(span), speed(roofline.reading[span]))
            for place, span in (("in cache", CACHED), ("from memory", BEYOND))]  # fmt: skip
    rows += [(part_name(part), size(part.bytes), size(span), speed(seconds.times(1 / part.bytes)))
             for (part, span), seconds in roofline.parts.items() if part.bytes]  # fmt: skip
    names = (plural(roofline.threads, "thread", "threads"), "bytes", "among", "GB/s")
    cells = zip(names, zip(*rows, strict=True), strict=True)
    console.print(table_of([Column(name, list(of), left=name == names[0]) for name, of in cells], title="Measured"))
    for (part, span), overhead in roofline.parts.items():
        if part.kind == "overhead":
            name = "an MLA" if part.latent else "a"
            words = f"overhead of {name} step: {1e6 * overhead.value:.0f} µs, among {size(span)}"
            console.print(words, highlight=False)


def part_name(part: Part) -> str:
    if part.kind == "attention":
        return f"attention, {plural(part.rows, 'query', 'queries')} x {part.batch * part.heads}"
    return f"{part.kind.replace('_', ' ')}, {plural(part.batch, 'row', 'rows')}"


def step(seconds: Figure) -> str:
    return f"{milliseconds(1e3 * seconds.value)} ms ±{seconds.error:.0%}".replace("%", " %")


def percent(share: float | None) -> str:
    if share is None:
        return ABSENT
    return f"{share:.1%}".replace("%", " %") if share < 10 else f"{count(round(100 * share))} %"


def size(number: int) -> str:
    """By 1024, three digits."""
    power = next((power for power in range(4) if number < 1000 * 1024**power), 4)
    return f"{number / 1024**power:,.4g} {UNITS[power]}"
