"""Which kernels exist, without importing torch: a kernel is a file here with a `KERNEL` in it."""

import pkgutil
from pathlib import Path

# Files of this package that hold machinery rather than a kernel.
MACHINERY = frozenset(
    {
        "names",
        "options",
        "call",
        "choice",
        "counter",
        "tally",
        "plugin",
        "shield",
        "front",
        "threads",
        "tiles",
        "compiling",
        "blocksparse",
    }
)


# Listed once, here: torch.compile warns of a functools.cache in its way.
_FOUND = tuple(sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in MACHINERY))


def kernel_names() -> tuple[str, ...]:
    return _FOUND


def is_plugin(name: str) -> bool:
    """`file.py:function` or `package.module:function`: code of the user's, run only because it was named."""
    return ":" in name
