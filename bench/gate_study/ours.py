"""The gate's own night, in a process whose `harness` is ROOT's: edits in the working tree do not reach a running study.

`python -P ours.py ROOT < request > verdicts`: run by path.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    request = json.load(sys.stdin)
    sys.path[:] = [sys.argv[1], *request["path"]]
    from bench.gate_study.orphans import die_with_parent
    from harness.case import Case
    from harness.gate.findings import TimingSettings
    from harness.gate.timing import judge_times
    from harness.gate.versions import Version

    die_with_parent()

    base, head = (Version(name, Path(request[name])) for name in ("base", "head"))
    cases = [Case(**fields) for fields in request["cases"]]
    verdicts = judge_times(base, head, cases, TimingSettings(**request["settings"]))
    json.dump([asdict(verdict) for verdict in verdicts], sys.stdout)


if __name__ == "__main__":
    main()
