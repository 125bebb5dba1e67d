"""PyTorch's own tests of attention, with its class replaced by ours: what passes with torch's passes with ours.

python -m bench.torch_tests FOLDER [FILE ...] [--only TEXT]

FOLDER is `test` of PyTorch's sources, which the wheel does not have. A test counts if torch's own class passes it, and
if it makes an attention at all. Some fill `parameters()` by place and shape, and know the numbers that follow from one
packed weight: what the split form fails, it gets again with its weights under torch's names. The exit code is 1 if one
that counts fails with ours, and is none of MEANT.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

FILES = {  # and which of their tests may make an attention
    "nn/test_multihead_attention.py": "test",
    "test_transformers.py": "TestTransformers",
    "test_nn.py": "transformer or multihead or mha",
    "test_modules.py": "MultiheadAttention or Transformer",
}
CLASSES = {"torch": "", "packed": "EagerMultiheadAttentionWithInProj", "split": "EagerMultiheadAttention"}
FILLED = "split, filled as torch's"
OWN_OPERATOR = "asks whether torch's own fused operator ran"
ALL_MEANT = {  # ends of names -> why ours is not to pass
    "two_masks_fast_path_mock_cpu": OWN_OPERATOR,
    "test_mask_check_fastpath_cpu": OWN_OPERATOR,
    "test_disable_fastpath_cpu": OWN_OPERATOR,
    "test_transformerencoderlayer_cpu_float32": "wants the NaN of a dead row on torch's fast path",
}


NO_PARAMETER = "sets requires_grad of the packed weight, which is no parameter of the split form"
MEANT = {
    "torch": {},
    "packed": ALL_MEANT,
    "split": ALL_MEANT | {"nested_tensor_outside_fast_path": NO_PARAMETER},
}
# What tests of another version import from torch.testing._internal and may be gone: nothing of it is about attention.
GONE: dict[str, dict[str, Any]] = {
    "common_nn": {"new_module_tests": []},
    "common_cuda": {"tf32_is_not_fp32": bool},
    "common_mkldnn": {"bf32_on_and_off": lambda *_: lambda test: test},
}


@dataclass(frozen=True)
class Outcome:
    test: str
    passed: bool
    why: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=[*FILES], help=f"of {', '.join(FILES)}")
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return in_child(options.folder, options.only, options.child, options.files[0])
    print(f"{'':32}" + "".join(f"{name:>12}" for name in CLASSES))
    failures: list[str] = []
    wrong = 0
    for file in options.files:
        found = {name: in_own_process(options.folder, options.only, name, file) for name in (*CLASSES, FILLED)}
        filled = {each.test for each in found.pop(FILLED) if each.passed}
        found["split"] = [replace(each, passed=each.passed or each.test in filled) for each in found["split"]]
        counted = {each.test for each in found["torch"] if each.passed}
        columns = []
        for name, outcomes in found.items():
            failed = [each for each in outcomes if each.test in counted and not each.passed]
            columns.append(f"{len(counted) - len(failed)}/{len(counted)}")
            for each in failed:
                meant = next((why for end, why in MEANT[name].items() if each.test.endswith(end)), None)
                wrong += meant is None
                failures.append(f"{name}: {each.test}: {meant or each.why}")
            if missing := counted - {each.test for each in outcomes}:
                wrong += len(missing)
                failures.append(f"{name}: made no attention in {', '.join(sorted(missing))}")
        print(f"{file:32}" + "".join(f"{column:>12}" for column in columns), flush=True)
        failures += [f"torch: {each.test}: {each.why}" for each in found["torch"] if not each.passed]
    print("\n".join(["", *failures]))
    return int(wrong > 0)


def in_own_process(folder: Path, only: str, name: str, file: str) -> list[Outcome]:
    """The tests run where the class was replaced before anything else saw it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command = [sys.executable, "-m", "bench.torch_tests", str(folder), file, "--only", only, "--child", name]
        told = {"TORCH_TESTS_ANSWER": answer.name, "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}
        done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True)
        text = Path(answer.name).read_text(encoding="utf-8")
    if not text:
        raise SystemExit(f"{name}, {file}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [Outcome(**each) for each in json.loads(text)]


def in_child(folder: Path, only: str, name: str, file: str) -> int:
    sys.argv = sys.argv[:1]  # torch's tests read it
    recorder = Recorder(replace_class(CLASSES["split" if name == FILLED else name]))
    if name == FILLED:
        import torch

        torch.nn.Module.parameters = as_packed  # type: ignore[assignment, method-assign]
    for module, names in GONE.items():
        place = importlib.import_module(f"torch.testing._internal.{module}")
        vars(place).update({key: value for key, value in names.items() if not hasattr(place, key)})
    chosen = f"({FILES[file]}) and {only}" if only else FILES[file]
    quiet = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "-W", "ignore"]
    pytest.main([str(folder / file), "-k", chosen, *quiet], plugins=[recorder])
    text = json.dumps([asdict(outcome) for outcome in recorder.outcomes])
    Path(os.environ["TORCH_TESTS_ANSWER"]).write_text(text, encoding="utf-8")
    return 0


def replace_class(name: str) -> type:
    """Everywhere that torch knows its class by name, in this process; gives the class whose making is counted."""
    import torch

    if not name:
        return torch.nn.MultiheadAttention
    from harness.variants import dropin

    ours = getattr(dropin, name)
    for place in (torch.nn, torch.nn.modules, torch.nn.modules.activation, torch.nn.modules.transformer):
        assert hasattr(place, "MultiheadAttention")
        place.MultiheadAttention = ours  # type: ignore[attr-defined]
    return dropin.DropInAttention


def as_packed(module: Any, recurse: bool = True) -> Any:
    """`Module.parameters` with the split projections under torch's names, for those who fill it."""
    from harness.variants.dropin import EagerMultiheadAttention

    for name, parameter in module.named_parameters(recurse=recurse):
        parent, _, kind = name.rpartition(".")
        owner, _, part = parent.rpartition(".")
        split = part in EagerMultiheadAttention.PARTS and module.get_submodule(owner)
        if not isinstance(split, EagerMultiheadAttention) or not split.packs:
            yield parameter
        elif part == "q_proj":
            yield getattr(split, f"in_proj_{kind}")


class Recorder:
    """A plugin of pytest: the outcome of every test that made an attention."""

    def __init__(self, counted: Any) -> None:
        self.outcomes: list[Outcome] = []
        self.made = 0
        before = counted.__init__

        def count(module: Any, *args: Any, **kwargs: Any) -> None:
            self.made += 1
            before(module, *args, **kwargs)

        counted.__init__ = count

    def pytest_runtest_setup(self) -> None:
        self.made = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and self.made and not report.skipped:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = " ".join(str(crash.message if crash else report.longrepr).split())[:300] if report.failed else ""
            self.outcomes.append(Outcome(report.nodeid.rpartition("::")[2], report.passed, why))


if __name__ == "__main__":
    sys.exit(main())
