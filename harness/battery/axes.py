"""The space of calls: its axes, their levels, and which combinations of levels are a call at all.

A level that stands for several sizes (`63-65`) is drawn from anew in each call, so that every size comes up.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Where an axis means nothing for a call: the shape of a mask that is not there.
NONE = "-"

# Sizes by level: one key, a few, around the borders of tiles, beyond them.
KEYS: Mapping[str, Sequence[int]] = {
    "1": (1,),
    "2-8": range(2, 9),
    "15-17": range(15, 18),
    "31-33": range(31, 34),
    "63-65": range(63, 66),
    "66-126": range(66, 127),
    "127-129": range(127, 130),
    "255-257": range(255, 258),
    "511-1025": (511, 512, 513, 640, 777, 1000, 1023, 1024, 1025),
    "2047-4095": (2047, 2048, 2049, 2100, 3000, 4095),
    "4096-8192": (4096, 4097, 5000, 6145, 8191, 8192),
}
RELATIVE = ("as keys", "fewer than keys", "more than keys")
QUERIES: Mapping[str, Sequence[int]] = {
    "1": (1,),
    "2-8": range(2, 9),
    "15-17": range(15, 18),
    "31-33": range(31, 34),
    "63-65": range(63, 66),
    "127-129": range(127, 130),
    "255-257": range(255, 258),
    "511-1025": (511, 512, 513, 640, 777, 1000, 1023, 1024, 1025),
    "2047-8192": (2047, 2048, 2049, 2100, 3000, 4095, 4097, 8192),
    **dict.fromkeys(RELATIVE, ()),
}
HEAD_DIMS: Mapping[str, Sequence[int]] = {
    "8-16": (8, 16),
    "20-33": (20, 24, 33),
    "64": (64,),
    "72-96": (72, 80, 96),
    "128": (128,),
    "192-256": (192, 256),
}

CAUSAL_MASKS = ("causal", "causal and bool", "causal and float")
BOOL_MASKS = ("bool", "left padding", "right padding", "band", "packed", "dead rows", "dead entries", "causal and bool")
FLOAT_MASKS = (
    "float", "alibi", "-1e4", "-65504", "finfo.min", "finfo.min rows", "+100", "-inf", "-inf rows", "causal and float",
)  # fmt: skip

AXES: Mapping[str, tuple[str, ...]] = {
    "queries": tuple(QUERIES),
    "keys": tuple(KEYS),
    "kv_heads": ("1", "2", "3", "5", "8", "12", "40", "64"),
    "groups": ("1", "2", "3", "4", "5", "8", "16", "32"),
    "batch": ("1", "2", "3", "4", "5"),
    "head_dim": tuple(HEAD_DIMS),
    "value_dim": ("same", "smaller", "larger"),
    "scale": ("none", "given", "1", "above 1", "0", "negative"),
    "mask": ("none", "causal", *(m for m in BOOL_MASKS + FLOAT_MASKS if m not in CAUSAL_MASKS), *CAUSAL_MASKS[1:]),
    "mask_shape": (
        NONE,
        "(B,H,L,S)",
        "(B,1,L,S)",
        "(1,H,L,S)",
        "(1,1,L,S)",
        "(L,S)",
        "(B,1,1,S)",
        "(B,H,1,S)",
        "(1,H,1,S)",
        "(1,S)",
        "(H,L,S)",
        "(B,1,L,1)",
    ),
    "mask_strides": (NONE, "plain", "expanded", "sliced", "transposed"),
    "mask_dtype": (NONE, "bool", "as q", "float32"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "threads": ("1", "2"),
    "mode": ("no_grad", "grad", "inference", "autocast", "thread"),
    "gradients": (NONE, "qkv", "q", "k", "v", "kv", "qkvm", "m"),
    "layout": ("plain", "heads last", "longer", "channels", "offset", "expanded", "shared heads", "steps", "columns"),
    "values": ("plain", "peaked", "offset", "tiny", "wide", "zero q", "zero k", "ties", "large", "garbage"),
}
# How often a level is drawn where it is free: small sizes more often, for a large call costs as much as a hundred of
# them, but one key alone tells little.
WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "queries": (2, 3, 3, 3, 3, 2, 2, 1, 1, 3, 3, 3),
    "keys": (1, 3, 3, 3, 3, 3, 3, 2, 1, 1, 1),
    "kv_heads": (4, 4, 3, 2, 2, 2, 1, 1),
    "groups": (4, 3, 3, 2, 2, 2, 1, 1),
    "head_dim": (4, 4, 4, 3, 2, 1),
    "scale": (4, 4, 1, 1, 1, 1),
    "dtype": (4, 2, 2, 1),
    "mode": (4, 4, 1, 1, 1),
    "values": (4, 2, 1, 1, 1, 1, 1, 1, 1, 2),
}
# Rows of a mask that all queries share cannot differ between them.
BY_KEY_ONLY = ("(B,1,1,S)", "(B,H,1,S)", "(1,H,1,S)", "(1,S)")
BY_QUERY_ONLY = "(B,1,L,1)"  # all keys of a query alike: what it may say is which queries see nothing
QUERY_MASKS = ("dead rows", "-inf rows", "float")
ROW_MASKS = ("band", "dead rows", "-inf rows", "finfo.min rows", "packed", "alibi")

MOST_SCORES = 1 << 22  # B H L S
MOST_WORK = 1 << 27  # multiplications: B H L S (D + D_v)
MOST_ELEMENTS = 1 << 20  # of q with its output, of k with v when its heads are repeated
MOST_MASK_GRADIENT = 1 << 16  # scores where the mask has a gradient


@dataclass(frozen=True)
class Point:
    """One call of the design: a level on every axis, and the sizes that were drawn from them."""

    levels: Mapping[str, str]  # by axis
    L: int
    S: int
    D: int
    D_v: int

    def __getitem__(self, axis: str) -> str:
        return self.levels[axis]

    @property
    def B(self) -> int:  # noqa: N802
        return int(self["batch"])

    @property
    def H_kv(self) -> int:  # noqa: N802
        return int(self["kv_heads"])

    @property
    def H(self) -> int:  # noqa: N802
        return self.H_kv * int(self["groups"])

    @property
    def is_causal(self) -> bool:
        return self["mask"] in CAUSAL_MASKS

    @property
    def has_mask(self) -> bool:
        return self["mask"] not in ("none", "causal")

    @property
    def is_documented(self) -> bool:
        """SDPA's documentation forbids a mask beside is_causal; torch answers it all the same."""
        return not (self.is_causal and self.has_mask)

    @property
    def work(self) -> int:
        return self.B * self.H * self.L * self.S * (self.D + self.D_v)

    @property
    def gradients(self) -> tuple[str, ...]:
        letters = self["gradients"] if self["gradients"] != NONE else ""
        return tuple({"m": "mask"}.get(letter, letter) for letter in letters)

    @property
    def words(self) -> str:
        """The call for people."""
        sizes = f"B={self.B} H={self.H} H_kv={self.H_kv} L={self.L} S={self.S} D={self.D} D_v={self.D_v}"
        skipped = {"queries", "keys", "kv_heads", "groups", "batch", "head_dim", "value_dim"}
        usual = {"scale": "none", "threads": "1", "layout": "plain", "values": "plain", "mask_strides": "plain"}
        names = {"dtype": "", "mode": "", "mask": "mask ", "gradients": "gradients of ", "mask_shape": ""}
        rest = [
            f"{names.get(axis, axis.replace('_', ' ') + ' ')}{level}"
            for axis, level in self.levels.items()
            if axis not in skipped and level != NONE and usual.get(axis) != level
        ]
        return ", ".join([sizes, *rest])


def possible(levels: Mapping[str, str]) -> bool:
    """Whether these levels go together; size is another matter."""
    mask, shape, kind = levels["mask"], levels["mask_shape"], levels["mask_dtype"]
    gradients, dtype = levels["gradients"], levels["dtype"]
    if mask in ("none", "causal"):
        if (shape, kind, levels["mask_strides"]) != (NONE, NONE, NONE) or "m" in gradients:
            return False
    else:
        if NONE in (shape, kind, levels["mask_strides"]):
            return False
        if (kind == "bool") != (mask in BOOL_MASKS):
            return False
        if kind == "float32" and dtype in ("float32", "float64"):
            return False  # the first is "as q"; for the second torch 2.13 itself reads the mask as float64
        if mask in ROW_MASKS and shape in BY_KEY_ONLY:
            return False
        if shape == BY_QUERY_ONLY and mask not in QUERY_MASKS:
            return False
        if mask == "dead entries" and shape not in ("(B,H,L,S)", "(B,1,L,S)", "(B,1,1,S)", "(B,H,1,S)"):
            return False
        if "m" in gradients and (mask not in FLOAT_MASKS or mask == "causal and float"):
            return False  # SDPA refuses the gradient of a mask beside is_causal
        if levels["mask_strides"] == "expanded" and shape in ("(B,H,L,S)", "(L,S)", "(1,S)"):
            return False
    if (levels["mode"] == "grad") == (gradients == NONE):
        return False
    if levels["mode"] == "autocast" and (dtype not in ("float32", "bfloat16") or kind == "float32"):
        return False
    if levels["mode"] == "autocast" and mask == "finfo.min rows":
        return False  # rounded to bfloat16 it is -inf, and the row another one
    if levels["values"] == "garbage" and mask in ("none", "float", "alibi", "+100", "-1e4", "-65504"):
        return False  # nothing is hidden
    if levels["layout"] == "expanded" and levels["batch"] == "1":
        return False
    return not (levels["layout"] == "shared heads" and levels["kv_heads"] == "1")


def sized(levels: Mapping[str, str], rng: random.Random) -> Point | None:
    """With sizes drawn from the levels; None if such a call would take too long."""
    S = rng.choice(KEYS[levels["keys"]])
    queries = levels["queries"]
    if queries == "as keys":
        L = S
    elif queries == "fewer than keys":
        if S < 3:
            return None
        L = rng.choice([S - 1, S - 2, rng.randint(2, S - 1), rng.randint(2, min(S - 1, 64))])
    elif queries == "more than keys":
        L = S + rng.choice([1, 2, 31, 64, 65])
    else:
        L = rng.choice(QUERIES[queries])
    D = rng.choice(HEAD_DIMS[levels["head_dim"]])
    kinds = {"same": [D], "smaller": [max(1, D // 2), max(1, D - 1), max(1, D - 8)], "larger": [D + 1, D + 8, 2 * D]}
    D_v = rng.choice(kinds[levels["value_dim"]])
    point = Point({axis: levels[axis] for axis in AXES}, L, S, D, D_v)
    scores = point.B * point.H * L * S
    fits = (
        scores <= MOST_SCORES
        and point.work <= MOST_WORK
        and point.H <= 64
        and point.B * point.H * max(L, S) * (D + D_v) <= MOST_ELEMENTS
        and ("m" not in levels["gradients"] or scores <= MOST_MASK_GRADIENT)
    )
    return point if fits else None


FEW: Mapping[str, Any] = {"batch": "2", "kv_heads": "2", "groups": "2"}
DEFAULTS = {axis: levels[0] for axis, levels in AXES.items()} | {"mode": "no_grad"}


def point(L: int, S: int, D: int, D_v: int | None = None, **levels: Any) -> Point:
    """By hand: sizes, and levels where they are not the plainest. A mask's shape, strides and dtype are filled in."""
    mask = levels.get("mask", "none")
    if mask not in ("none", "causal"):
        kind = "bool" if mask in BOOL_MASKS else "as q"
        levels = {"mask_shape": "(B,1,L,S)", "mask_strides": "plain", "mask_dtype": kind} | levels
    if levels.get("gradients", NONE) != NONE:
        levels = {"mode": "grad"} | levels
    return Point(DEFAULTS | levels, L, S, D, D if D_v is None else D_v)
