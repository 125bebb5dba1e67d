"""What is asked, in which order: what reveals most for its price comes first."""

import random
from collections.abc import Iterator
from typing import Any

from harness.battery.axes import Point, point
from harness.battery.conduct import conduct_steps
from harness.battery.design import Design, by_cost
from harness.battery.rare import half_steps, rare_steps, traced_steps
from harness.battery.steps import Step, call_step

GROUPS = ("small calls", "compiled", "middle calls", "large calls")  # in their order, once there is a design


def first_calls() -> Iterator[Point]:
    """Small or nearly so, each unlike the others: most wrong kernels are wrong here."""
    some: dict[str, Any] = {"batch": "2", "kv_heads": "2"}
    yield point(17, 33, 16, **some)
    yield point(33, 33, 20, mask="causal", **some)
    yield point(7, 19, 16, mask="causal", groups="2", gradients="qkv", **some)
    for one in ("v", "k", "q"):  # a key or a value that is frozen
        yield point(7, 19, 16, mask="right padding", groups="2", gradients=one, **some)
    yield point(65, 65, 64, mask="bool", groups="3", batch="3", kv_heads="2", scale="given")
    yield point(1, 129, 64, groups="4", dtype="bfloat16", **some)
    yield point(40, 70, 32, 24, mask="right padding", mask_shape="(B,1,1,S)", gradients="qkv", batch="3", kv_heads="3")
    yield point(19, 7, 8, mask="causal", gradients="qkv", values="peaked", **some)
    yield point(20, 40, 33, mask="float", gradients="qkvm", **some)
    yield point(16, 48, 16, mask="dead rows", gradients="qkv", **some)
    yield point(16, 48, 16, mask="-inf rows", gradients="qkv", groups="2", **some)
    yield point(24, 24, 16, mask="dead rows", mask_shape="(B,1,L,1)", **some)
    yield point(24, 40, 16, mask="bool", mask_shape="(H,L,S)", **some)
    yield point(7, 40, 16, mask="bool", mask_shape="(B,1,1,S)", **some)
    yield point(7, 40, 16, mask="float", mask_shape="(B,H,1,S)", gradients="qkvm", **some)
    yield point(24, 24, 16, mask="dead entries", batch="4", kv_heads="2", dtype="bfloat16")
    yield point(24, 40, 16, mask="finfo.min", **some)
    yield point(24, 40, 16, mask="right padding", mask_shape="(B,1,1,S)", values="garbage", batch="3", kv_heads="2")
    yield point(24, 40, 16, mask="finfo.min rows", **some)
    yield point(24, 40, 16, mask="+100", **some)
    yield point(24, 40, 16, mask="left padding", dtype="float16", mask_shape="(B,1,L,S)", **some)
    yield point(32, 32, 64, values="large", dtype="bfloat16", **some)
    yield point(32, 32, 64, values="offset", dtype="float16", gradients="qkv", **some)
    yield point(13, 257, 16, dtype="float64", gradients="qkv", threads="2", **some)
    yield point(31, 31, 16, layout="heads last", mode="inference", threads="2", batch="5", kv_heads="3")
    yield point(31, 31, 16, layout="channels", mode="autocast", **some)
    yield point(9, 600, 16, layout="steps", mode="thread", mask="causal", **some)
    yield point(300, 300, 16, mask="causal", kv_heads="12")
    yield point(300, 300, 8, mask="causal", dtype="bfloat16", batch="1", kv_heads="1")
    yield point(1, 40, 16, mask="causal", **some)
    yield point(1, 1, 16, **some)
    yield point(24, 40, 64, scale="negative", values="large", **some)
    yield point(32, 32, 64, values="large", dtype="float16", **some)
    yield point(5, 2100, 8, kv_heads="1", groups="8")
    # Decoding with so few rows that a kernel splits the keys between its workers, and has the parts to combine.
    yield point(1, 300, 64, kv_heads="2")
    yield point(1, 2100, 64, kv_heads="1", groups="8", values="peaked")
    yield point(1, 4100, 32, kv_heads="1", groups="32", batch="2", dtype="bfloat16")


def big_calls() -> Iterator[Point]:
    """As models make them."""
    yield point(1, 4096, 128, kv_heads="2", groups="4", dtype="bfloat16", mask="right padding", mask_shape="(B,1,1,S)")
    yield point(512, 512, 64, kv_heads="5", mask="causal", dtype="bfloat16")
    yield point(512, 512, 64, kv_heads="3", mask="causal", gradients="qkv")
    yield point(1025, 1025, 64, kv_heads="2", mask="causal", threads="2")
    yield point(2049, 2049, 16, mask="causal")
    yield point(128, 8192, 16, threads="2", mask="band", mask_shape="(L,S)")
    yield point(8, 8192, 64, kv_heads="1", groups="2", dtype="float16", mask="causal")
    yield point(2100, 2100, 16, values="peaked", threads="2")
    yield point(256, 256, 192, 128, kv_heads="3", batch="2", mask="causal", gradients="qkv", dtype="bfloat16")


def extreme_calls() -> Iterator[Point]:
    """Sizes beyond what an index, a grid or a table was made for, each of them cheap in all others."""
    yield point(3, 5, 8, kv_heads="300")
    yield point(3, 5, 8, batch="300")
    yield point(5, 17, 320, batch="2", kv_heads="2")
    yield point(5, 17, 16, 520, batch="2", kv_heads="2", gradients="qkv")
    yield point(9, 9, 1, batch="2", kv_heads="2", mask="causal")
    yield point(2, 70001, 8)
    yield point(2100, 2100, 8, mask="causal", dtype="float16")
    yield point(70001, 3, 8)
    yield point(1, 3, 8, batch="1100", kv_heads="64")


def opening(seed: int) -> list[Step]:
    """What is asked before the design is made."""
    first = [call_step("first calls", each, seed) for each in first_calls()]
    extreme = [call_step("extreme sizes", each, seed) for each in extreme_calls()]
    return [*first, *conduct_steps(seed), *half_steps(seed), *rare_steps(seed), *extreme]


def remainder(design: Design, seed: int, *, is_first: bool) -> list[Step]:
    """The design's calls, and in the first round all that is asked once."""
    ordered = by_cost(design.points)
    third = len(ordered) // 3
    parts = {
        "small calls": ordered[:third],
        "middle calls": ordered[third : 2 * third],
        "large calls": [*ordered[2 * third :], *(big_calls() if is_first else ())],
    }
    random.Random(seed).shuffle(parts["large calls"])
    steps = [call_step(group, each, seed) for group, points in parts.items() for each in points]
    if is_first:
        steps += traced_steps(seed)
    return sorted(steps, key=lambda step: GROUPS.index(step.group))
