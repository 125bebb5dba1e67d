"""Which kernels exist, without importing torch: a kernel is a file here with a `KERNEL` in it."""

import functools
import pkgutil
from pathlib import Path

# Files of this package that hold machinery rather than a kernel.
MACHINERY = frozenset({"names", "call", "plugin", "shield", "front"})


@functools.cache
def kernel_names() -> tuple[str, ...]:
    here = str(Path(__file__).parent)
    return tuple(sorted(m.name for m in pkgutil.iter_modules([here]) if m.name not in MACHINERY))


def is_plugin(name: str) -> bool:
    """`file.py:function` or `package.module:function`: code of the user's, run only because it was named."""
    return ":" in name
