"""What may stand in a config, as docs/config.md and `harness list --config` show it: asked from the schema itself.

The rule of a key is what the schema says to a wrong value; only what a key is for is written here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pydantic import ValidationError

from harness.suite.grid import AXES
from harness.suite.schema import Accuracy, Battery, Document, Grid, Limits, Timing
from harness.variants.specs import OPTIONAL_AXES, VARIANTS

ABOUT = {
    "name": "of the suite: its runs' folders and its baseline are named after it",
    "description": "for readers",
    "seed": "of all weights and inputs",
    "threads": "of torch; by default one, or with timing all physical cores",
    "regimes": "ways of drawing inputs; by default the first six",
    "equivalence": "`approximate` for kernels that leave work out: held to `accuracy`, not to the acceptance rule",
    "timing.enabled": "whether latencies are measured",
    "timing.budget_s": "seconds for the samples of a cell",
    "timing.min_blocks": "of interleaved samples, whatever they take",
    "timing.max_blocks": "of them, however fast they are",
    "limits.timeout_s": "seconds for a cell; beyond it is `timeout`",
    "limits.max_memory": "of a cell's processes; beyond it is `oom`; by default 80 % of the machine's",
    "kernels": "in the place of every grid's, as `--kernel` gives them; a run's folder keeps those there",
    "battery.enabled": "ask your own kernels directly, too, as `harness judge` does; by default those of `kernels`",
    "battery.minutes": "what that may take",
    "accuracy.rel_l1": "relative L1 over the whole output, at most",
    "accuracy.cosine": "cosine similarity, at least",
    "accuracy.rmse": "root of the mean squared error, at most",
    "accuracy.max_abs": "largest absolute error, at most",
    "contest": "an axis along which cells that else are alike are built side by side and timed in the same rounds",
    "against": "of a contest: the value to which the others' latencies are ratios",
    "judge_len": "of a contest: longer cells are judged at so many tokens, and the row says so",
    "grid": "the product of all axes; an axis that a variant does not have collapses",
    "include": "a list of further grids, each with the defaults of its own",
    "exclude": "a list of combinations to leave out, by any axes",
    "variant": "the kind of attention",
    "embed_dim": "E, the width of the model",
    "heads": "H, of the queries",
    "kv_heads": "of keys and values; for mqa it is 1, for mha `heads`",
    "head_dim": "D; by default `embed_dim / heads`",
    "q_lora_rank": "rank of the queries' projection; by default none",
    "kv_lora_rank": "R, rank of the latent that is cached",
    "rope_head_dim": "of the decoupled rotary part",
    "v_head_dim": "D_v; by default `head_dim`",
    "bias": "of the projections",
    "seq_len": "tokens: of a prefill or training step, or in the cache before a decode step",
    "mask": "which keys a query sees",
    "phase": "a whole sequence, one token with a cache, or forward and backward",
    "dtype": "of weights and inputs",
    "batch": "B",
    "kernel": "names, or your own: `my_kernels.py:fast`, beside the config or in the current folder; "
    "options stand in the name: `sparse?topk=0.5`",
}
GROUPS: Mapping[str, Any] = {"timing": Timing, "limits": Limits, "battery": Battery, "accuracy": Accuracy}
# Each is wrong for most keys, and what the schema says to one of them is the key's rule.
WRONG = (object(), -1, "?", 2**70)


@dataclass(frozen=True, slots=True)
class Key:
    """One that a config may have; `where` has dots between group and key."""

    where: str
    default: str
    rule: str
    about: str


def top_keys() -> Iterator[Key]:
    for name, field in Document.model_fields.items():
        if name in GROUPS:
            for one in fields(GROUPS[name]):
                default = one.default if one.default is not MISSING else None
                where = f"{name}.{one.name}"
                yield Key(where, _shown(default), _rule({name: one.name}, lists=False), ABOUT[where])
        else:
            default = "required" if field.is_required() else _shown(field.default)
            is_grid = name in ("grid", "include", "exclude")
            rule = "a mapping of axes" if name == "grid" else "a list" if is_grid else _rule({"": name}, lists=True)
            yield Key(name, default, rule, ABOUT[name])


def axis_keys() -> Iterator[Key]:
    for axis in AXES:
        field = Grid.model_fields[axis]
        default = "required" if field.is_required() else _shown(field.default)
        only = [name for name in VARIANTS if axis in VARIANTS[name].axes] if axis in OPTIONAL_AXES else []
        about = ABOUT[axis] + (f" ({', '.join(only)})" if only else "")
        yield Key(axis, default, _rule({"grid": axis}, lists=True), about)


def markdown() -> str:
    lines = [
        "# What a config may say",
        "",
        "Made from the schema by `harness list --config`; a test holds it fresh. A mistake is told with file, line,",
        "key, value and rule before anything runs. `harness run NAME` takes one of the configs in the package by its",
        "name; a path wins. Numbers that YAML 1.1 alone reads as such (`017`, `12:30:45`) are refused.",
        "",
        "## Keys",
        "",
        *_table("key", top_keys()),
        "",
        "## Axes of `grid`, `include` and `exclude`",
        "",
        "Each is one value or a list of values.",
        "",
        *_table("axis", axis_keys()),
    ]
    return "\n".join(lines) + "\n"


def _table(name: str, keys: Iterator[Key]) -> list[str]:
    rows = [f"| `{key.where}` | {key.about} | {key.rule} | {key.default} |" for key in keys]
    return [f"| {name} | what for | must be | default |", "|:--|:--|:--|:--|", *rows]


def _rule(place: Mapping[str, str], *, lists: bool) -> str:
    ((group, name),) = place.items()
    found: dict[str, None] = {}
    for wrong in WRONG:
        config: dict[str, Any] = {group: {name: wrong}} if group else {name: wrong}
        try:
            Document.model_validate(config)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                if name in one["loc"] and one["type"] != "missing":
                    found[_words(one)] = None
    return "; ".join(rule for rule in found if not any(other != rule and other.startswith(rule) for other in found))


def _words(error: Any) -> str:
    if error["type"] == "unknown":
        known = [f"`{name}`" for name in error["ctx"]["known"]]
        return "one of " + ", ".join(known) if known else "known"
    return str(error["msg"]).removeprefix("must be ")


def _shown(default: Any) -> str:
    if isinstance(default, tuple) and len(default) == 1:
        (default,) = default
    if default is None or default == "" or default == ():
        return ""
    if isinstance(default, bool):
        return "`true`" if default else "`false`"
    return "" if isinstance(default, list) else f"`{default}`"
