"""`harness verify`: swap a real model's attention and prove that it is the same model."""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commands import override
from harness.errors import EQUAL, NOT_EQUAL, BadInput
from harness.models.families.names import family_names
from harness.text import plain, terminal

if TYPE_CHECKING:
    from harness.environment import Environment
    from harness.models.verify.result import Verification

log = logging.getLogger(__name__)

MARKDOWN, TABLE, LAYERS = "verify.md", "verify.csv", "layers.csv"

HELP = "swap a real model's attention and prove that it is the same model"
VERBOSE = "show every layer's row, log every module"
DESCRIPTION = """\
Swaps the attention of a real model and proves, in five steps, that the model is still the same:

  load      a tiny random model of the family, a checkpoint of yours, or the model that your function builds
  inspect   layers, attention class, heads: what the swap is held to
  swap      every attention replaced, every weight the same bits
  forward   the same output at the model's end and at every swapped layer, within what rounding explains
            (docs/acceptance-rule.md); the first layer that departs is named, and a swap that is bypassed fails
  generate  the same tokens from a greedy decode through the KV cache, or the same latents after a few denoising steps

Nothing is downloaded. The verdict is written to results/verify-<time>/: verify.md, verify.csv and layers.csv.
"""
EPILOG = """\
exit codes:  0 all steps passed   1 a step failed   2 bad input   3 a bug in harness

examples:
  harness verify llama                                     a tiny random LLaMA, our eager kernel
  harness verify llama --kernel my_kernels.py:fast         the same, with your kernel (SDPA's signature)
  harness verify qwen3 --config num_hidden_layers=4 --config attention_bias=true
  harness verify llama --path ~/models/Llama-3.2-1B        a checkpoint on this disk
  harness verify my_model.py:build_model --verbose         your own model, every layer's row shown
  harness verify my_package.models:build_model
  harness verify llama --only 'model.layers.1.*'           one layer swapped, the others as they are
  harness verify --all                                     every family, and a table of them
  harness verify llama --kernel 'sparse?topk=0.9&block_q=4&block_k=4' --budget rel_l1=0.05
  harness verify llama --tuned tuned.yaml                  the thresholds that `harness tune-sparse` found

approximate kernels (docs/sparse.md): the swap itself is proven with dense attention in the kernel's place. Then each
layer's attention may depart from dense by a relative L1 of 0.07, the model's output by 0.08 (--budget); tokens that
differ are reported. A kernel that skips nothing is judged as an exact one.

your own model: a function without arguments that returns the model, or a pair of model and inputs: a tensor, a tuple of
positional arguments or a dict of keyword arguments. Causal language models of transformers, and models of the families,
need no inputs.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "target",
        metavar="FAMILY|FILE.py:FUNCTION",
        nargs="?",
        help=f"one of {', '.join(family_names())}; or your own model, as file.py:function or package.module:function",
    )
    target.add_argument("--all", action="store_true", help="every family, one after another")
    parser.add_argument("--kernel", metavar="NAME|FILE.py:FUNCTION", help="default: eager")
    parser.add_argument("--only", metavar="PATTERN", help="which attentions to swap, by name: 'encoder.*'")
    parser.add_argument(
        "--tuned", metavar="FILE", type=Path, help="a file of `harness tune-sparse`: thresholds for each layer and head"
    )
    parser.add_argument(
        "--budget",
        metavar="LIMIT=VALUE",
        type=override,
        action="append",
        default=[],
        help="for approximate kernels: rel_l1 of each layer's attention (0.07), end_rel_l1 of the output (0.08)",
    )
    model_arguments(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="the run's folder (default: a new one under results/)")


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="KEY=VALUE",
        type=override,
        action="append",
        default=[],
        help="override a key of the family's tiny config; the value is YAML; repeat for several",
    )
    parser.add_argument("--path", metavar="DIR", type=Path, help="a local checkpoint folder of the family")


def stay_offline(*, quiet: bool) -> None:
    """Before transformers is loaded: nothing is ever downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def execute(options: argparse.Namespace) -> int:
    if options.all and (options.config or options.path):
        raise BadInput("--all takes no --config and no --path: they belong to one family")
    if options.only and (options.all or options.tuned):
        raise BadInput(
            "--only goes without --all and --tuned: it names modules of one model, and thresholds are for all"
        )
    if options.tuned and (options.all or options.kernel):
        raise BadInput("--tuned goes without --all, for it belongs to one model, and without --kernel, which it names")
    stay_offline(quiet=options.quiet)
    from harness.models.families.family import all_families

    found = _verify_all(all_families() if options.all else [options.target], options)
    return EQUAL if all(each.passed for each in found) else NOT_EQUAL


def _verify_all(targets: Sequence[str], options: argparse.Namespace) -> "list[Verification]":
    """One target, or several one after the other: of several, one that cannot be loaded does not stop the rest."""
    import torch

    from harness import environment, store
    from harness.candidate.isolated import judged_kernel
    from harness.models.tuning import file as tuning_file
    from harness.models.tuning.heads import placeholder, tuned_name
    from harness.models.verify.steps import not_loaded, verify
    from harness.report.terminal import say
    from harness.report.verification import print_layers, print_step, print_verdict

    console = terminal()
    console.quiet = options.quiet
    name = options.kernel or "eager"
    tuned = options.tuned or tuned_name(name)
    thresholds = None if tuned is None else tuning_file.load(tuned)
    kernel = judged_kernel(name) if thresholds is None else placeholder(thresholds)
    _refuse_taken(options.out)
    where = environment.collect(torch.get_num_threads())
    folder: Path | None = None
    found: list[Verification] = []
    for target in targets:
        say(console, plain(target), style="bold", whole=True)
        try:
            done = verify(
                target,
                kernel=kernel,
                only=options.only,
                tuned=thresholds,
                budget=dict(options.budget),
                config=dict(options.config),
                path=options.path,
                on_step=lambda step: print_step(step, console),
            )
        except BadInput as error:
            if len(targets) == 1:
                raise
            done = not_loaded(target, kernel, error)
            for step in done.steps:
                print_step(step, console)
        if options.verbose or done.approximate:
            print_layers(done, console, every_batch=options.verbose)
        found.append(done)
        if folder is None:  # only now: what cannot be loaded leaves no folder behind
            folder = options.out or store.new_folder(Path("results"), "verify")
            folder.mkdir(parents=True, exist_ok=True)
        _write(folder, found, where)  # after each, so that an interrupted run leaves what it found
    assert folder is not None
    if kernel.process is not None and (patched := kernel.process.patched()):
        log.warning("%s replaces %s; that reaches nothing but itself", name, ", ".join(patched))
    print_verdict(found, console, folder=folder)
    return found


def _refuse_taken(out: Path | None) -> None:
    if out is not None and out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file; --out needs a folder")
    if out is not None and (out / TABLE).exists():
        raise BadInput(f"{out} already holds {TABLE} of another run; give another --out or move it")


def _write(folder: Path, found: "Sequence[Verification]", where: "Environment") -> None:
    import pandas as pd

    from harness import store
    from harness.report.verification import verification_markdown

    layers = [each.layers for each in found if not each.layers.empty] or [found[0].layers]
    tables = {TABLE: pd.DataFrame([each.row() for each in found]), LAYERS: pd.concat(layers, ignore_index=True)}
    for name, frame in tables.items():
        store.write_atomically(folder / name, store.csv_text(frame).encode())
    store.write_atomically(folder / MARKDOWN, verification_markdown(found, where).encode())
    store.write_environment(folder, where)
