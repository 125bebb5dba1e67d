"""One file a command, found by its name: `arguments` adds its options, `execute` does it and gives the exit code."""

import pkgutil

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
