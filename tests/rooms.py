"""The rooms of the package and their order, and the picture of them in docs/architecture.md.

`python -m tests.rooms` (`make architecture`) draws the picture anew from the imports as they are.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

# Everything that stands in harness/, lowest first: a room imports only what stands before it. Imports inside functions
# and for types count like all others, and so does the module that a string names.
ORDER = (
    "errors",
    "registry",
    "text",
    "yaml_lines",
    "case",
    "record",
    "environment",
    "kernels",
    "candidate",
    "variants",
    "references",
    "swaps",
    "suite",
    "store",
    "cell",
    "battery",
    "mutants",
    "diagnosis",
    "workers",
    "gate",
    "models",
    "advise",
    "doctor",
    "report",
    "runner",
    "reproduction",
    "pytest_plugin",
    "commands",
    "__main__",
)
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: made by `make architecture` -->\n", "<!-- /rooms -->\n"


def module_files(root: Path) -> dict[str, Path]:
    """Every module of the `harness` package below root, by dotted name."""
    found = {}
    for path in sorted((root / "harness").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def named_modules(name: str, path: Path) -> Iterator[str]:
    """Whatever of harness a file imports, anywhere in it, or names in a string."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for importlib.import_module
            yield from re.findall(r"^harness(?:\.\w+)+", node.value)


def room_of(module: str) -> str | None:
    """None for the package itself, whose public names are looked up when they are first used."""
    parts = module.split(".")
    return parts[1] if parts[0] == "harness" and len(parts) > 1 else None


def reached(start: str, root: Path) -> set[str]:
    """The modules of harness's rooms that a module may import, whatever is asked of it, and those that they may."""
    files = module_files(root)
    found, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        parents = (".".join(name.split(".")[:size]) for size in range(2, name.count(".") + 2))
        for one in parents:
            if one in files and one not in found:
                found.add(one)
                waiting += named_modules(one, files[one])
    return found


def doors(root: Path) -> dict[tuple[str, str], list[str]]:
    """(room, room that it imports) -> the files that do so."""
    found: dict[tuple[str, str], list[str]] = {}
    files = module_files(root)
    rooms = {room_of(name) for name in files}
    for name, path in files.items():
        for target in named_modules(name, path):
            one, other = room_of(name), room_of(target)
            if one is not None and other is not None and other in rooms and one != other:
                found.setdefault((one, other), []).append(f"{name} imports {target}")
    return found


def back_edges(root: Path, order: tuple[str, ...] = ORDER) -> list[str]:
    """Imports of a room that stands later, or in no place at all."""
    place = {room: number for number, room in enumerate(order)}
    wrong = [why for (one, other), why in doors(root).items() if place.get(other, len(order)) >= place.get(one, -1)]
    return sorted({line for lines in wrong for line in lines})


def picture(root: Path) -> str:
    """A Mermaid chart: an arrow to every room that is imported, but for those that another arrow leads to anyway."""
    uses: dict[str, set[str]] = {}
    for one, other in doors(root):
        uses.setdefault(one, set()).add(other)
    beyond: dict[str, set[str]] = {}
    for room in ORDER:  # lowest first: whatever a room uses is complete before it
        direct = uses.get(room, set())
        beyond[room] = direct.union(*(beyond[other] for other in direct))
    arrows = [
        f"    {one} --> {other}"
        for one in reversed(ORDER)
        for other in reversed(ORDER)
        if other in uses.get(one, set()) and not any(other in beyond[third] for third in uses[one])
    ]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", ""])


def drawn(page: str, root: Path = ROOT) -> str:
    """The page with the picture as it should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{picture(root)}{END}{after}"


def main() -> int:
    if wrong := back_edges(ROOT):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    PAGE.write_text(drawn(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
