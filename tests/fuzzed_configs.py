"""Configs as a careless or hostile user would write them, and what must hold for every one of them.

Eight kinds: tiny valid ones, valid ones with a value spoilt, with a line spoilt, with YAML's rarer features, in
another encoding, cut and shuffled, as large as they can be made, and bytes that never were a config.
"""

import contextlib
import copy
import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from hypothesis import strategies as st

from harness.__main__ import main
from harness.case import Case
from harness.suite.config import ConfigError, load_suite
from harness.suite.grid import AXES
from harness.suite.schema import REGIMES
from harness.variants.masks import MASKS
from harness.variants.specs import VARIANTS

LIMIT_S = 3.0  # of processor time, so that a busy machine fails nobody
PLUGIN = "mine.py"
PLUGIN_SOURCE = """
import torch.nn.functional as F

def fast(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)
"""


@dataclass(frozen=True)
class Fuzzed:
    kind: str
    data: bytes


@dataclass(frozen=True)
class Outcome:
    code: int
    message: str


class TooSlow(BaseException):
    """Not an Exception: the command line must not be able to turn it into an exit code."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def command(*arguments: str, limit_s: float = LIMIT_S) -> Outcome:
    """The real command, in this process, with streams that encode as a terminal's do."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), at_most(limit_s):
        code = main(arguments)
    errors.flush()
    buffer = errors.buffer
    assert isinstance(buffer, io.BytesIO)
    return Outcome(code, buffer.getvalue().decode("utf-8"))


def plan(path: Path, data: bytes) -> Outcome:
    """What a dry run makes of it, once it is sure to be either a plan or a message that names the file."""
    path.write_bytes(data)
    found = command("run", str(path), "--dry-run", "--quiet")
    if found.code == 0:
        assert found.message == "", found
    else:
        assert found.code == 2, found
        assert found.message.startswith(f"harness: {path}"), found
        assert "Traceback" not in found.message, found
        # At most ten problems, and none of them as long as what it complains about.
        assert len(found.message.splitlines()) <= 11 and len(found.message) < 20_000, found
    return found


# ---- valid ones, small enough to be run ------------------------------------------------------------------------------


def some(values: Any, *, most: int = 3) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(list(values)), min_size=1, max_size=most, unique=True)


GRIDS = st.fixed_dictionaries(
    {
        "variant": some(VARIANTS, most=2),
        "embed_dim": st.sampled_from([16, [16, 32]]),
        "heads": st.sampled_from([2, [2, 4]]),
        "kv_heads": st.sampled_from([1, 2]),
        "seq_len": st.sampled_from([4, [3, 8]]),
        "rope_head_dim": st.just(4),
        "phase": st.just(["prefill"]),
    },
    optional={
        "mask": some(MASKS),
        "dtype": some(["float32", "bfloat16", "float16", "float64"], most=2),
        "batch": st.sampled_from([1, 2]),
        "bias": st.booleans(),
        "kernel": some(["eager", "sdpa", f"{PLUGIN}:fast"], most=2),
    },
)
TINY = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "a-b", "0", "null.", "UPPER_case.2"]),
        "grid": GRIDS,
        "timing": st.sampled_from([{"enabled": False}, {"budget_s": 0.001, "min_blocks": 3, "max_blocks": 3}]),
        "regimes": some(REGIMES, most=2),
    },
    optional={
        "description": st.text(max_size=20),
        "seed": st.integers(0, 2**63 - 1),
        "threads": st.just(1),
        "include": st.lists(GRIDS, max_size=1),
    },
)


def dump(config: Any) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


# ---- a value spoilt --------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 10**99, 10**4000]),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from(["", "x" * 5000, "a\x00b", "\x1b[31m", "\u202e", "[/red]", "😀" * 40, "../../x", "y\n" * 9, "1e3"]),
    st.sampled_from([date(2024, 2, 29), datetime(2024, 2, 29, 12, 30)]),
    st.sampled_from([*VARIANTS, *MASKS, *REGIMES, "mhaa", "decode", "train", "float8", "no.such.module:f", "a:b"]),
    st.sampled_from(["x.py:f", f"{PLUGIN}:fast", f"{PLUGIN}:class", "/dev/stdin.py:f", "\x00.py:f", "~/x.py:f", ":"]),
)
KEYS = st.sampled_from(
    [
        *AXES,
        *("name", "description", "seed", "threads", "grid", "include", "exclude", "timing", "limits", "regimes"),
        *("enabled", "budget_s", "min_blocks", "max_blocks", "timeout_s", "max_memory", "hads", "Grid", "<<", ""),
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)
STEPS = st.lists(st.tuples(st.lists(KEYS, min_size=1, max_size=3), VALUES | st.just(...)), min_size=1, max_size=3)


def spoilt(config: dict[str, Any], steps: list[tuple[list[str], Any]]) -> dict[str, Any]:
    """Each step goes along its keys as far as they lead, and puts its value there; `...` takes the key away."""
    config = copy.deepcopy(config)  # what a strategy gives may be the strategy's own
    for keys, value in steps:
        inside: dict[str, Any] = config
        for key in keys[:-1]:
            deeper = inside.get(key)
            deeper = deeper[0] if isinstance(deeper, list) and deeper else deeper
            inside = deeper if isinstance(deeper, dict) else inside
        if value is ...:
            inside.pop(keys[-1], None)
        else:
            inside[keys[-1]] = value
    return config


# ---- a line spoilt ---------------------------------------------------------------------------------------------------

SNIPPETS = (
    *("name: again", "grid: {}", "grid: []", "seed: 0o17", "seed: 1_000", "seed: 12:30:45", "seed: 1e400"),
    *(
        "seed: .nan",
        "seed: .inf",
        "seed: 0x_",
        "threads: 2024-99-99",
        "seed: =",
        "<<: 1",
        "threads: yes",
        "? seed\n: 1",
    ),
    *("anchor: &a [1, 2]", "seed: *a", "x: &x {y: *x}", "<<: *a", "<<: {seed: 3}", "include: [&g {}, *g]"),
    *("? [a]\n: b", "? {a: 1}\n: b", "1: 2", "null: 3", "true: 4", "2024-01-01: 5", "~: 1", "'': 1", "'name': b"),
    *("seed: !!int '3'", "seed: !!str 3", "seed: !!binary aGk=", "seed: !local 3", "seed: ! 3", "seed: !!set {a}"),
    "x: !!python/object/apply:os.system ['touch pwned']",
    "x: !!python/object/new:os.system ['touch pwned']",
    "x: !!python/name:os.system",
    "x: !<tag:yaml.org,2002:python/module:os> y",
    *("---", "...", "--- !!map", "---\nname: b", "%YAML 1.1", "%TAG ! x", "\t", "  \tseed: 1", "seed:\t1", "- 1", "-"),
    *("seed: |\n  1", "seed: >-\n  1", "seed: '1", 'seed: "1', 'seed: "\\x00"', 'seed: "\\ud800"', 'seed: "\\U1"'),
    *("{", "}", "[", "]", "[" * 40, "{a: " * 40, "- " * 40, "&a", "*a", "!", "@", "`", "#", ",", ":", "::", "? ", ">"),
    *("é: 1", "x: \x85", "x: \u2028", "x: \ufeff", "x: \x07", "x: \x1b[2J", "x: \x7f", "\ufeffname: b", "\r"),
)


@st.composite
def with_spoilt_lines(draw: st.DrawFn) -> bytes:
    lines = dump(draw(TINY)).split("\n")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines)))
        indent = " " * draw(st.sampled_from([0, 0, 0, 2, 1, 4]))
        snippet = draw(st.sampled_from(SNIPPETS) | st.text(max_size=12))
        lines.insert(at, indent + snippet)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@st.composite
def cut_and_shuffled(draw: st.DrawFn) -> bytes:
    text = dump(draw(TINY))
    for _ in range(draw(st.integers(1, 3))):
        a, b = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        text = draw(st.sampled_from([text[:a] + text[b:], text[:a], text[:b] + text[a:], text[a:] + text[:a]]))
    lines = text.split("\n")
    return "\n".join(draw(st.permutations(lines)) if draw(st.booleans()) else lines).encode()


@st.composite
def with_aliases(draw: st.DrawFn) -> bytes:
    """Valid YAML that PyYAML writes with anchors, because a part is used twice; some of these are valid configs."""
    config = copy.deepcopy(draw(TINY))
    shared = draw(st.one_of(GRIDS, VALUES))
    for key in draw(st.lists(KEYS, min_size=2, max_size=3)):
        config[key] = draw(st.sampled_from([shared, [shared], [shared, shared], {"grid": shared}]))
    if isinstance(config.get("include"), list) and draw(st.booleans()):
        config["include"] = [config["grid"]]
    merged = draw(st.sampled_from(["", "base: &base {seed: 1}\n<<: *base\n", "<<: [{seed: 1}, {threads: 1}]\n"]))
    return (merged + dump(config)).encode()


ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "utf-7", "shift-jis")


@st.composite
def in_another_encoding(draw: st.DrawFn) -> bytes:
    text = dump(draw(TINY) | {"description": draw(st.sampled_from(["é", "漢字", "plain", "😀"]))})
    data = text.encode(draw(st.sampled_from(ENCODINGS)), "replace")
    marked = [b"\xef\xbb\xbf" + data, b"\xff\xfe" + data, data + b"\x80"]
    return draw(st.sampled_from([data, data.replace(b"\n", b"\r\n"), *marked]))


@st.composite
def bytes_thrown_in(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    data = dump(draw(TINY)).encode()
    at, cut = draw(st.integers(0, len(data))), draw(st.integers(0, 20))
    return data[:at] + draw(st.binary(max_size=20)) + data[at + cut :]


# ---- as large as can be ----------------------------------------------------------------------------------------------

HEAD = "name: a\ngrid:\n  variant: [mha]\n  embed_dim: 64\n  heads: 4\n"
ENTRY = "  - {{variant: mha, embed_dim: 64, heads: 4, seq_len: {}}}\n"
DROP = "  - {{seq_len: {}}}\n"
THREE_AXES = ("seq_len", "batch", "head_dim")


def numbers(n: int) -> str:
    return "[" + ",".join(map(str, range(1, n + 1))) + "]"


def rows(n: int, row: str) -> str:
    return "".join(row.format(i + 1) for i in range(n))


def square(n: int) -> int:
    return max(1, int(n**0.5))


def modules(n: int, more: str) -> str:
    return f"name: a\ngrid:\n  variant: mha\n  seq_len: 3\n  embed_dim: {numbers(n)}\n  heads: {numbers(n)}\n{more}"


# Each takes a size; those of 20,000 stand just below or just above a limit.
BOMBS: dict[str, Callable[[int], str]] = {
    "cells": lambda n: f"{HEAD}  seq_len: {numbers(n)}\n",
    "cells of two axes": lambda n: f"{HEAD}  seq_len: {numbers(n // 100 + 1)}\n  batch: {numbers(499)}\n",
    "cells of three axes": lambda n: HEAD + "".join(f"  {axis}: {numbers(n // 4 + 1)}\n" for axis in THREE_AXES),
    "impossible modules": lambda n: modules(square(n), ""),
    "possible modules": lambda n: modules(2 * square(n), "  head_dim: 1\n"),
    "exclusions": lambda n: f"{HEAD}  seq_len: 1\nexclude:\n" + rows(n // 4, DROP),
    "exclusions and cells": lambda n: f"{HEAD}  seq_len: {numbers(n // 4)}\nexclude:\n" + rows(n // 8, DROP),
    "exclusions and includes": lambda n: f"name: a\ninclude:\n{rows(n // 20, ENTRY)}exclude:\n{rows(n // 20, DROP)}",
    "includes": lambda n: "name: a\ninclude:\n" + rows(n // 10, ENTRY),
    "broken includes": lambda n: "name: a\ninclude:\n" + rows(n // 3 - 4, "  - {{variant: m{}}}\n"),
    "wrong values": lambda n: HEAD + "  seq_len: [" + "a," * n + "]\n",
    "wrong kernels": lambda n: HEAD + "  seq_len: 2\n  kernel: [" + rows(n - 20, "k{},") + "]\n",
    "missing files": lambda n: HEAD + "  seq_len: 2\n  kernel: [" + rows(n - 20, "k{}.py:f,") + "]\n",
    "modules": lambda n: HEAD + "  seq_len: 2\n  kernel: [" + rows(n - 20, "k{}:f,") + "]\n",
    "unknown keys": lambda n: rows(n // 2 - 4, "k{}: 1\n"),
    "unknown axes": lambda n: HEAD + "  seq_len: 2\n" + rows(n // 2 - 20, "  k{}: 1\n"),
    "anchors": lambda n: rows(n, "k{0}: &a{0} 1\n"),
    "laughs": lambda n: (
        "x0: &x0 [lol]\n" + "".join(f"x{i}: &x{i} [{f'*x{i - 1},' * 10}]\n" for i in range(1, n // 100))
    ),
    "tower of aliases": lambda n: "x0: &x0 [lol]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, n)),
    "aliases": lambda n: "a: &a [" + "1," * (n // 100) + "]\nb: [" + "*a," * n + "]\n",
    "open lists": lambda n: "[" * n * 50,
    "open mappings": lambda n: "{a: " * n * 10,
    "dashes": lambda n: "- " * n * 50,
    "questions": lambda n: "? " * n * 50,
    "indents": lambda n: "".join(" " * i + "a:\n" for i in range(min(n, 2000))),
    "quotes": lambda n: "'" * n * 50,
    "text": lambda n: "name: a\ndescription: " + "x" * n * 100 + "\n" + HEAD[8:] + "  seq_len: 2\n",
    "escapes": lambda n: 'name: "' + "\\x41" * n * 50 + '"\n',
    "name": lambda n: "name: " + "a" * n * 100 + "\n" + HEAD[8:],
    "digits": lambda n: f"name: a\nseed: {'9' * n}\n",
    "base 60": lambda n: f"name: a\nseed: 1{':1' * n}\n",
    "dots": lambda n: HEAD + "  seq_len: 2\n  kernel: '" + "a." * n * 20 + "a:f'\n",
    "folders": lambda n: HEAD + "  seq_len: 2\n  kernel: '" + "../" * n * 20 + "a.py:f'\n",
    "one value": lambda n: HEAD + "  seq_len: [" + "7," * n + "]\n",
    "directives": lambda n: "%TAG !a! tag:a\n" * n,
    "comments": lambda n: "#\n" * n * 50,
    "bytes": lambda n: "x" * n * 250,
}
BOMBS_OF_ALL_SIZES = st.builds(
    lambda name, size: BOMBS[name](size).encode(), st.sampled_from(list(BOMBS)), st.sampled_from([100, 1000, 20_000])
)

KINDS: dict[str, st.SearchStrategy[bytes]] = {
    "valid": TINY.map(lambda config: dump(config).encode()),
    "value spoilt": st.builds(lambda config, steps: dump(spoilt(config, steps)).encode(), TINY, STEPS),
    "line spoilt": with_spoilt_lines(),
    "aliases": with_aliases(),
    "cut and shuffled": cut_and_shuffled(),
    "encoding": in_another_encoding(),
    "bytes": bytes_thrown_in(),
    "large": BOMBS_OF_ALL_SIZES,
}
# The large ones take as long as fifty others, so fewer are drawn.
_SHARES = {"valid": 4, "value spoilt": 14, "line spoilt": 12, "aliases": 4, "encoding": 3, "large": 1}


def _of_kind(kind: str) -> st.SearchStrategy[Fuzzed]:
    return KINDS[kind].map(lambda data: Fuzzed(kind, data))


FUZZED: st.SearchStrategy[Fuzzed] = st.sampled_from(
    [kind for kind in KINDS for _ in range(_SHARES.get(kind, 6))]
).flatmap(_of_kind)


# ---- what is valid, and running it -----------------------------------------------------------------------------------


def cells_of(path: Path) -> tuple[Case, ...]:
    """None at all of a config that is refused."""
    try:
        return load_suite(path).cases
    except ConfigError:
        return ()


def run_one(path: Path, out: Path, *, cell: int, cells: int) -> Outcome:
    """One cell of it, measured in this process."""
    shard = f"{cell + 1}/{cells}"
    options = ("--shard", shard, "--out", str(out), "--executor", "here", "--quiet")
    return command("run", str(path), *options, limit_s=20 * LIMIT_S)
