"""`harness advise`: which kind of attention fits a model, a memory, a context length and a batch."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.advise import memory as amounts
from harness.case import DTYPES
from harness.commands import positive
from harness.errors import EQUAL, NOT_EQUAL, BadInput
from harness.text import terminal

if TYPE_CHECKING:
    from harness.advise.candidates import Model
    from harness.advise.memory import Requirement
    from harness.advise.roofline import Roofline

HELP = "which kind of attention fits your memory, context and batch"
DESCRIPTION = """\
Shows for MHA, GQA, MQA and MLA in a model of your size: parameters, KV-cache bytes, what fits into the memory, and the
decode time to expect on this machine, from exact formulas and a few seconds of measuring. Then it names a choice and
why. Exits 1 if nothing fits.
"""
EPILOG = """\
models:  llama-2-7b llama-2-70b llama-3-8b llama-3.1-70b llama-3.1-405b mistral-7b qwen2.5-72b qwen3-8b
         deepseek-v2-lite deepseek-v2 deepseek-v3

examples:
  harness advise --model llama-3-8b --memory 24GiB --context 32k
  harness advise --model llama-2-7b --memory 24GiB --context 128k --batch 4 --no-measure
  harness advise --config checkpoint/config.json --context 128k     its cache, hybrids included, by formula
  harness advise --embed-dim 2048 --layers 24 --heads 16 --memory 8GiB --params 1.3B   a model to be designed
"""
VERBOSE = "also say what was measured"
MOST_ROWS = 4096  # of a product that is still measured in no time
OWN = ("embed_dim", "layers", "heads", "kv_heads", "head_dim", "params")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="a real model's sizes; those below replace single ones")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="a model's config.json: what its cache weighs, layer by layer"
    )
    parser.add_argument("--embed-dim", metavar="E", type=whole)
    parser.add_argument("--layers", metavar="N", type=whole)
    parser.add_argument("--heads", metavar="H", type=whole)
    parser.add_argument("--kv-heads", metavar="N", type=whole, help="that the model has (default: not decided yet)")
    parser.add_argument("--head-dim", metavar="D", type=whole, help="default: embed-dim / heads")
    parser.add_argument("--window", metavar="W", type=window, help="keys that every layer keeps, or none")
    parser.add_argument(
        "--params", metavar="N", type=amounts.parameters, help="of the whole model, so that its weights are counted too"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", type=amounts.memory_size, help="for weights and cache (default: this machine's)"
    )
    parser.add_argument("--context", metavar="TOKENS", type=amounts.tokens, default=32768, help="default: 32768")
    parser.add_argument("--batch", metavar="B", type=whole, default=1, help="sequences at once (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (default: bfloat16)")
    parser.add_argument("--no-measure", action="store_true", help="no decode times, only what is exact: at once")


def execute(options: argparse.Namespace) -> int:
    if options.config is not None:
        return _model_cache(options)
    # Before torch is loaded, as `harness run` sets it: so that times here and there are alike.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

    from harness.advise.choose import advise

    demand = demand_of(options)
    roofline = None if options.no_measure else _measured(demand, quiet=options.quiet)
    advice = advise(demand, roofline)
    if not options.quiet:
        from harness.report.advice import print_advice

        print_advice(advice, terminal(), roofline=roofline, measurements=options.verbose)
    return EQUAL if advice.chosen is not None else NOT_EQUAL


def _model_cache(options: argparse.Namespace) -> int:
    """Of a config, by formula alone: nothing is measured, and nothing else of the model is known."""
    import psutil

    from harness.advise.model_cache import read_model_cache
    from harness.report.model_cache import print_model_cache

    if given := [name for name in ("model", "window", *OWN) if getattr(options, name) is not None]:
        raise BadInput(f"--{given[0].replace('_', '-')}: the config says what the model is; give one of the two")
    cache = read_model_cache(options.config)
    memory = options.memory if options.memory is not None else psutil.virtual_memory().total
    asked = {"context": options.context, "batch": options.batch, "dtype": options.dtype, "memory": memory}
    if not options.quiet:
        print_model_cache(cache, terminal(), **asked)
    fits = cache.bytes(options.context, batch=options.batch, dtype=options.dtype) <= memory
    return EQUAL if fits else NOT_EQUAL


def demand_of(options: argparse.Namespace) -> "Requirement":
    import psutil

    from harness.advise.candidates import candidates, own_attention_params
    from harness.advise.memory import Requirement

    memory = options.memory if options.memory is not None else psutil.virtual_memory().total
    model = _model(options)
    own = own_attention_params(model) if model.existing else None
    least = model.layers * (own or min(one.attention_params for one in candidates(model, "float32")))
    if model.params is not None and model.params < least:
        raise BadInput(f"--params = {model.params}: must be at least {least}, what the attention alone has")
    return Requirement(model, options.context, options.batch, options.dtype, memory)


def _model(options: argparse.Namespace) -> "Model":
    from harness.advise.candidates import MODELS, Model, own_attention_params

    given = {name: getattr(options, name) for name in OWN if getattr(options, name) is not None}
    if options.window is not None:
        given["window"] = options.window or None
    if options.model is not None:
        model = MODELS[options.model]
        if model.is_latent and "kv_heads" in given:
            raise BadInput(f"--kv-heads = {given['kv_heads']}: {model.name} has latent attention, which has none")
        if {"embed_dim", "layers", "heads", "head_dim"} & given.keys() and "params" not in given:
            given["params"] = None  # the published count is of another size
        changed = replace(model, **given)
        if "params" not in given and model.params is not None:
            grown = own_attention_params(changed) - own_attention_params(model)
            changed = replace(changed, params=model.params + model.layers * grown)
        return changed
    if lost := [f"--{name.replace('_', '-')}" for name in ("embed_dim", "layers", "heads") if name not in given]:
        raise BadInput(f"{', '.join(lost)}: must be given, or --model, one of {', '.join(MODELS)}")
    if "head_dim" not in given:
        if given["embed_dim"] % given["heads"]:
            rule = f"must divide --embed-dim ({given['embed_dim']}) when --head-dim is not given"
            raise BadInput(f"--heads = {given['heads']}: {rule}")
        given["head_dim"] = given["embed_dim"] // given["heads"]
    return Model(name="your model", existing="kv_heads" in given, **given)


def _measured(demand: "Requirement", *, quiet: bool) -> "Roofline":
    from rich.console import Console

    from harness.advise.candidates import candidates
    from harness.advise.choose import step_of
    from harness.advise.roofline import measure

    for name, rows in (("--batch", demand.batch), ("--heads", demand.model.heads)):
        if rows > MOST_ROWS:
            raise BadInput(f"{name} = {rows}: decode times are predicted up to {MOST_ROWS}; add --no-measure")
    steps = [step_of(candidate, demand) for candidate in candidates(demand.model, demand.dtype)]
    with Console(stderr=True, quiet=quiet).status("measuring this machine") as status:
        return measure(steps, told=status.update)


def whole(text: str) -> int:
    return positive(text, "a whole number of at least 1")


def window(text: str) -> int:
    """0 stands for none."""
    return 0 if text == "none" else whole(text)
