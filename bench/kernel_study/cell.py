"""What is measured at one place of the sweep: sizes (a cell), and the rival calls made for them (sides)."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cell:
    """The sizes of one point. `note` tells apart what sizes do not: with or without weights, for instance."""

    study: str
    queries: int  # L
    keys: int  # S
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    causal: bool = False
    note: str = ""
    required: bool = False  # a target is judged by it: measured first, and its absence is a failure

    @property
    def label(self) -> str:
        heads = f"H{self.heads}/{self.kv_heads}"
        length = f"S{self.keys}" if self.queries == 1 else f"L{self.queries}"
        words = (self.study, f"B{self.batch}", heads, length, f"D{self.head_dim}", self.dtype)
        return " ".join([*words, *(["causal"] if self.causal else []), *([self.note] if self.note else [])])

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(self.label.encode()))


@dataclass(frozen=True)
class Work:
    """What the mathematics needs, whoever does it: hidden pairs are not counted, and each operand moves once."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Golden:
    """The truth in float64, for a part of the output that `pick` takes out of a side's whole one."""

    value: Tensor
    pick: Callable[[Tensor], Tensor] = lambda out: out


@dataclass(frozen=True)
class Sides:
    calls: Mapping[str, Callable[[], Tensor]]
    reference: str  # the side that the others are compared with, element by element
    golden: Callable[[], Golden]
    work: Mapping[str, Work]
    absent: Mapping[str, str] = field(default_factory=dict)  # sides that are not run, and why
    unlike: frozenset[str] = frozenset()  # sides that compute something else, timed for their own growth


@dataclass(frozen=True)
class Point:
    """`build` makes the sides of any cell: of this one, and of a small one for the guard."""

    cell: Cell
    build: Callable[[Cell], Sides]
    work: Callable[[Cell], Work]  # of the dearest side, to guess the cost before anything is made
    side_names: tuple[str, ...]
