"""How a kernel's own arguments look: one file each, with a `LAYOUT`; its name is the file's. No torch at import.

A layout turns an SDPA call into the kernel's own arguments (`prepare`: packing, outside any clock) and the kernel's
result into SDPA's (`restore`). What it cannot express raises Unsupported. Gradients pass through both.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.kernels.layouts.layout import Layout

MACHINERY = frozenset({"layout", "sight"})  # files that hold no layout
_FOUND = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in MACHINERY))


def layout_names() -> tuple[str, ...]:
    return _FOUND


def find_layout(name: str) -> "Layout":
    """By a known name: a Domain has checked it."""
    layout: Layout = importlib.import_module(f"harness.kernels.layouts.{name}").LAYOUT
    return layout
