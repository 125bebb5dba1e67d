"""Show what each plugin of ``cheats`` does to a naive judge: one process, one reference, allclose and a stopwatch.

Every plugin runs in a process of its own, started here, with a pipe for its answer.  Informative only: it prints what
the naive judge believes, and what an untouched process finds of the same output where there is one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ATOL_LIMIT = 1e-3


def judged(path: str, answer: int) -> None:
    """Judge one plugin naively and write the belief to the answer pipe."""
    import time

    import torch
    import torch.nn.functional as functional

    def matches(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Whether two outputs agree."""
        return torch.allclose(found, wanted, atol=ATOL_LIMIT) and bool((found - wanted).abs().max() < ATOL_LIMIT)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 128, 32)
    spec = importlib.util.spec_from_file_location("plugin", path)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    sys.modules["plugin"] = plugin
    spec.loader.exec_module(plugin)

    def reference() -> torch.Tensor:
        return torch.softmax(q @ k.mT / 32**0.5, -1) @ v

    def fused() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    def seconds(call: object) -> float:
        best = 1e9
        for _ in range(10):
            start = time.perf_counter()
            call()  # type: ignore[operator]
            best = min(best, time.perf_counter() - start)
        return best

    with torch.no_grad():
        belief = []
        for wanted in (reference, fused):
            expected = wanted()
            found = plugin.fast(q, k, v)
            expected = wanted() if "patch" in path else expected
            time.sleep(0.05)
            belief.append(bool(matches(found, expected)))
        theirs = seconds(lambda: plugin.fast(q, k, v))
        ours = seconds(reference)
    text = json.dumps({"ok": belief, "speed": round(ours / max(theirs, 1e-9), 1)})
    os.write(answer, text.encode() + b"\n")


def main() -> int:
    """Try all plugins."""
    if len(sys.argv) == 3:
        judged(sys.argv[1], int(sys.argv[2]))
        return 0
    for path in sorted((HERE / "cheats").glob("*.py")):
        reader, writer = os.pipe()
        process = subprocess.run(
            [sys.executable, __file__, str(path), str(writer)],
            pass_fds=[writer],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            answer = file.read()
        tail = process.stderr.strip().splitlines()[-1:] if process.returncode else []
        said = process.stdout[:60]
        print(f"{path.stem:24} status {process.returncode}  answer {answer[:120]!r}  said {said!r} {tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
