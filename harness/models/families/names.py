"""Which model families exist, without importing torch: a family is a file here with a `FAMILY` in it."""

import ast
import pkgutil
from pathlib import Path

# Files of this package that hold machinery rather than a family.
MACHINERY = frozenset({"names", "family", "language", "diffusion"})


def family_names() -> tuple[str, ...]:
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return tuple(sorted(module.name for module in found if module.name not in MACHINERY))


def family_titles() -> dict[str, str]:
    """The first line of each file: importing them would import transformers and diffusers."""
    folder = Path(__file__).parent
    texts = {name: ast.get_docstring(ast.parse((folder / f"{name}.py").read_text())) for name in family_names()}
    return {name: (text or "").partition("\n")[0].rstrip(".") for name, text in texts.items()}
