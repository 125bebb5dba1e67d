"""The way of one cell, as docs/architecture.md lists it, held to a real run."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

# What a run also calls, beside the way: the parts that are measured, single checks, and what is no affair of a cell's.
BESIDE = (
    "kernels/", "variants/", "references/", "swaps/", "commands/", "report/", "models/families/names.py",
    "cell/clock.py", "cell/probe.py", "cell/relations.py", "cell/conduct.py", "cell/side.py", "cell/peak.py",
    "cell/large.py", "cell/sampling.py",
    "candidate/state.py", "candidate/child.py", "candidate/isolated.py", "candidate/zygote.py",
    "store/files.py", "store/manifest.py", "workers/__init__.py", "workers/interrupts.py",
    "__init__.py", "__main__.py", "environment.py", "record.py", "errors.py", "registry.py", "text.py",
)  # fmt: skip
CONFIG = """\
name: way
timing: {budget_s: 0.02, min_blocks: 5}
grid: {variant: gqa, embed_dim: 32, heads: 4, kv_heads: 2, seq_len: 8, mask: causal}
"""
# Prints every file of harness of which a function was called; what runs because a file is imported does not count.
TRACE = """\
import sys
from pathlib import Path
import harness
from harness.__main__ import main
package, called = str(Path(harness.__file__).parent), set()
imports = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package) and code.co_name not in imports:
        while frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename == "<string>":
            called.add(code.co_filename[len(package) + 1:])
sys.setprofile(note)
code = main(["run", "way.yaml", "--quiet", "--executor", sys.argv[1], "--out", sys.argv[1]])
sys.setprofile(None)
print("called:", *sorted(called))
sys.exit(code)
"""


def listed() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    part = page[page.index("<!-- way:") : page.index("<!-- /way -->")]
    rows = re.findall(r"^\| (\d+) \| `([\w/.]+)` \|", part, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    return [file for _, file in rows]


def called(executor: str, folder: Path) -> set[str]:
    command = [sys.executable, "-c", TRACE, executor]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("called:")[2].split())


def test_the_way_of_one_cell_is_the_one_that_is_listed(tmp_path):
    (tmp_path / "way.yaml").write_text(CONFIG)
    way = listed()
    assert len(way) == len(set(way)) <= 25
    # In one process all but the worker's own file can be seen; through a worker, the parent's half.
    real = called("here", tmp_path) | called("local", tmp_path)
    assert set(way) - real == {"workers/worker.py"}
    strange = {file for file in real - set(way) if not file.startswith(BESIDE) and file.endswith(".py")}
    assert strange == set()
