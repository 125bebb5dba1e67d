"""PyTorch's own tests of attention, with its class replaced by ours: what passes with torch's passes with ours.

python -m bench.torch_tests FOLDER [FILE ...] [--only TEXT] [--modes MODE ...]

FOLDER is `test` of PyTorch's sources, which the wheel does not have. A test counts if torch's own class passes it, and
if it makes an attention at all. Each of our classes is tried as it is made, and with `fast_path=True`: then torch's
encoder layers may take theirs. Some tests fill `parameters()` by place and shape, and know the numbers that follow from
one packed weight: what the split form fails, it gets again with its weights under torch's names. The exit code is 1 if
one that counts fails with ours, and is none that its mode means to fail.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

FILES = {  # and which of their tests may make an attention
    "nn/test_multihead_attention.py": "test",
    "test_transformers.py": "TestTransformers",
    "test_nn.py": "transformer or multihead or mha",
    "test_modules.py": "MultiheadAttention or Transformer",
}
OWN_CALL = "asks whether the module calls torch's own fused operator"
IN_LAYER = "asks whether torch's encoder layer took its fast path"
ANY_MODE = {"two_masks_fast_path_mock_cpu": OWN_CALL, "test_disable_fastpath_cpu": OWN_CALL}  # ends of names
BY_DEFAULT = ANY_MODE | {
    "test_mask_check_fastpath_cpu": IN_LAYER,
    "test_transformerencoderlayer_cpu_float32": "wants the NaN of a dead row on torch's fast path",
}


@dataclass(frozen=True)
class Mode:
    """In which a file's tests run; `meant`: ends of names, and why ours is not to pass."""

    replaced_by: str = ""
    fast_path: bool = False
    meant: Mapping[str, str] = field(default_factory=dict)
    is_filled: bool = False  # its weights under torch's names, for who fills them


PACKED, SPLIT = "EagerMultiheadAttentionWithInProj", "EagerMultiheadAttention"
MODES = {
    "torch": Mode(),
    "packed": Mode(PACKED, meant=BY_DEFAULT),
    "split": Mode(SPLIT, meant=BY_DEFAULT),
    "packed, fast": Mode(PACKED, fast_path=True, meant=ANY_MODE),
    "split, fast": Mode(SPLIT, fast_path=True, meant=ANY_MODE),
}
FILLED = {f"{name}, filled": replace(mode, is_filled=True) for name, mode in MODES.items() if mode.replaced_by == SPLIT}
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
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="besides torch; default: all")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return in_child(options.folder, options.only, options.child, options.files[0])
    modes = [name for name in MODES if name == "torch" or name in options.modes]
    print(f"{'':32}" + "".join(f"{name:>14}" for name in modes))
    failures: list[str] = []
    wrong = 0
    for file in options.files:
        found = {name: in_own_process(options.folder, options.only, name, file) for name in modes}
        counted = {each.test for each in found["torch"] if each.passed}
        for name in [name for name in modes if f"{name}, filled" in FILLED]:
            if all(each.passed for each in found[name] if each.test in counted):
                continue
            again = in_own_process(options.folder, options.only, f"{name}, filled", file)
            filled = {each.test for each in again if each.passed}
            found[name] = [replace(each, passed=each.passed or each.test in filled) for each in found[name]]
        columns = []
        for name, outcomes in found.items():
            failed = [each for each in outcomes if each.test in counted and not each.passed]
            columns.append(f"{len(counted) - len(failed)}/{len(counted)}")
            for each in failed:
                meant = next((why for end, why in MODES[name].meant.items() if each.test.endswith(end)), None)
                wrong += meant is None
                failures.append(f"{name}: {each.test}: {meant or each.why}")
            if missing := counted - {each.test for each in outcomes}:
                wrong += len(missing)
                failures.append(f"{name}: made no attention in {', '.join(sorted(missing))}")
        print(f"{file:32}" + "".join(f"{column:>14}" for column in columns), flush=True)
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
    mode = (MODES | FILLED)[name]
    recorder = Recorder(replace_class(mode))
    if mode.is_filled:
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


def replace_class(mode: Mode) -> type:
    """Everywhere that torch knows its class by name, in this process; gives the class whose making is counted."""
    import torch

    if not mode.replaced_by:
        return torch.nn.MultiheadAttention
    from harness.variants import dropin, multihead

    ours = getattr(dropin, mode.replaced_by)
    made: Any = multihead.DropInAttention.__init__
    made.__kwdefaults__["fast_path"] = mode.fast_path
    for place in (torch.nn, torch.nn.modules, torch.nn.modules.activation, torch.nn.modules.transformer):
        assert hasattr(place, "MultiheadAttention")
        place.MultiheadAttention = ours  # type: ignore[attr-defined]
    return multihead.DropInAttention


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
