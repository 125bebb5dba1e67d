"""`harness init`: a kernel, a config, a test, a workflow and a make target to start from."""

import argparse
from pathlib import Path

from harness.errors import EQUAL, BadInput

HELP = "a kernel, a config, a pytest file, a workflow and a make target to start from"
DESCRIPTION = """\
Writes five files, each of which works at once. Nothing that exists is overwritten: a Makefile of your own stays, and
the target goes into attention.mk beside it, for you to include.
"""
EPILOG = """\
examples:
  harness init                         into the current folder
  harness init my-kernels
  harness run attention.yaml           then: is my_kernels.py:fast right, inside modules, and what does it cost?
  python -m pytest test_attention.py   ... one item for each question of `harness judge`
  harness gate --base HEAD~1 --kernel my_kernels.py:fast
"""
STARTER = Path(__file__).parent.parent / "starter"
MAKEFILE, INCLUDED = "Makefile", "attention.mk"
# Where each file of the starter goes.
PLACES = {
    "my_kernels.py": "my_kernels.py",
    "attention.yaml": "attention.yaml",
    "test_attention.py": "test_attention.py",
    "attention.yml": ".github/workflows/attention.yml",
    "Makefile": MAKEFILE,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path(), help="default: this folder")


def execute(options: argparse.Namespace) -> int:
    written = start(options.folder)
    if not options.quiet:
        for path in written:
            print(path)
        if written[-1].name == INCLUDED:
            print(f"{MAKEFILE} is your own; for the target add to it: include {INCLUDED}")
        inside = "" if options.folder == Path() else f"cd {options.folder} && "
        print(f"\nnext: {inside}harness run attention.yaml")
    return EQUAL


def start(folder: Path) -> list[Path]:
    """The files that were written; BadInput, and none is, where one of them is there already."""
    from harness.store import write_atomically

    places = {name: folder / place for name, place in PLACES.items()}
    if places[MAKEFILE].exists():
        places[MAKEFILE] = folder / INCLUDED
    if there := [str(path) for path in places.values() if path.exists()]:
        raise BadInput(f"{', '.join(there)}: there already; nothing was written. Move it, or name a folder: init DIR")
    for name, path in places.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (STARTER / f"{name}.txt").read_bytes())
    return list(places.values())
