"""Case -> Record: is it the same, what does it weigh, how fast is it, how much memory does one call take."""

import functools
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from harness.candidate.client import Process
from harness.candidate.isolated import KernelFailed, trusted_process
from harness.case import HALF, Case
from harness.cell import apart, record_of
from harness.cell.apart import Apart, Packing
from harness.cell.approximate import DENSE, Approximation, approximate
from harness.cell.build import Pair, build_pair, poison_for
from harness.cell.clock import Clocked, fewer_threads, sample
from harness.cell.contest import Rival, full_cache, rival
from harness.cell.large import LATEST, compare_pair, judge_timed
from harness.cell.peak import peak_bytes
from harness.cell.referee import IN_FLOAT32
from harness.cell.rule import Equivalence, worst_of
from harness.cell.sampling import is_large
from harness.cell.side import Side, Subject, filled_variant, run_steps
from harness.cell.timing import Stopwatch, paired_ratio
from harness.environment import Others
from harness.kernels.call import ContractBroken, Kernel
from harness.kernels.domain import PLAIN
from harness.kernels.front import find_kernel
from harness.kernels.plugin import told
from harness.record import EQUAL_STATUSES, Record
from harness.suite.schema import Accuracy, Timing

OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory", "bad_alloc")
OF_THE_WORST = (  # columns that are the worst tensor's own
    *("max_abs_err", "mean_abs_err", "max_rel_err", "max_ulp_err"),
    *("ref_max_abs_err", "err_budget", "err_ratio"),
)
OF_THE_JUDGED = (*OF_THE_WORST, "status", "error", "worst_tensor", "worst_regime", "grad_max_abs_err", "calls",
                 "equivalence")  # fmt: skip
JUDGED_BATCH = 2  # at most, of a cell that is judged at a smaller size
UNTIMED = Timing(enabled=False)
LARGE_SCORE = 16.0  # of the example in a message
PACKAGE = str(Path(__file__).parents[1])


def measure(
    case: Case,
    kernel: Kernel,
    *,
    seed: int,
    regimes: Sequence[str],
    timing: Timing,
    accuracy: Accuracy | None = None,
    retime: bool = False,
) -> Record:
    """Never raises for what the candidate does: its failure is the result, beside what was measured before it.

    `accuracy` are the limits by which approximate kernels are judged; without them all are judged as exact ones.
    `retime`: it was judged before; of a record that is equal the speed alone counts.
    """
    stopwatch, started, others = Stopwatch(), time.perf_counter(), Others()
    record, seed = record_of(case, status="error"), case.seed(seed)
    poison, gives_weights = poison_for(case, kernel), kernel.gives_weights
    LATEST.keep_for(case, regimes, seed=seed, poison=poison, gives_weights=gives_weights)
    try:
        with stopwatch.part("building"):
            pair = build_pair(case, kernel, seed)
        close, before = None, pair.calls  # calls are those of the comparison alone: what it bypasses, others may call
        if kernel.approximate and accuracy is not None:
            close = approximate(pair, regimes, seed=seed, stopwatch=stopwatch)
        if close is not None and accuracy is not None and close.left_something_out:
            record = replace(record, calls=pair.calls - before, **close.error_columns(), **close.columns())
            record = weighed(record, pair)
            status, error = _unlike(record) or close.verdict(accuracy)
        elif retime:
            status, error = "ok", None
        else:
            before = pair.calls
            with stopwatch.part("inputs and all else"):
                equivalence = compare_pair(pair, regimes, seed=seed, stopwatch=stopwatch)
            record = replace(record, calls=pair.calls - before, **_equality_columns(equivalence))
            with stopwatch.part("weighing"):
                record = weighed(record, pair)
            status, error = status_of(record, equivalence, kernel)
            record = record if close is None else replace(record, **close.columns())
        record = replace(record, status=status, error=error)
        if timing.enabled:
            with stopwatch.part("timing"), fewer_threads(others):
                if close is not None:
                    record = replace(record, **_time_approximate(pair, close, timing, seed, stopwatch))
                elif kernel.process is not None:
                    record = _timed_apart(record, pair, kernel.process, timing, seed, stopwatch)
                else:
                    record = replace(record, **_time(pair, timing, seed, stopwatch))
    except NotImplementedError as refusal:  # Unsupported, or in whatever other words: in a backward pass, for instance
        record = replace(record, status="unsupported", error=str(refusal) or told(refusal))
    except ContractBroken as broken:
        record = replace(record, status="mismatch", error=str(broken))
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # someone's unfinished code: whatever it raises is its row
        record = _failed(record, failure)
    return replace(
        record,
        seconds=time.perf_counter() - started,
        measured_seconds=stopwatch.seconds,
        parts_s=stopwatch.parts,
    )


@functools.lru_cache(maxsize=64)
def _judged(case: Case, kernel: Kernel, seed: int, regimes: tuple[str, ...], accuracy: Accuracy | None) -> Record:
    """Cells that are alike but for their length share it."""
    return measure(case, kernel, seed=seed, regimes=regimes, timing=UNTIMED, accuracy=accuracy)


@functools.lru_cache(maxsize=1)  # large; cells that are alike but for their length follow each other
def _small_rival(case: Case, kernel: Kernel, seed: int) -> Rival:
    return rival(case, kernel, seed)


def measure_by_smaller(
    case: Case,
    kernel: Kernel,
    *,
    seed: int,
    regimes: Sequence[str],
    judge_len: int,
    accuracy: Accuracy | None = None,
) -> Record:
    """A cell that is too long to be judged as it is: judged at `judge_len` tokens, weighed at its own size."""
    started, record = time.perf_counter(), record_of(case, status="error")
    small = replace(case, seq_len=judge_len, batch=min(case.batch, JUDGED_BATCH))
    judged = _judged(small, kernel, seed, tuple(regimes), accuracy)
    columns = {name: getattr(judged, name) for name in OF_THE_JUDGED}
    record = replace(record, **columns, judged_as=small.case_id)
    if record.status not in EQUAL_STATUSES:
        return record
    try:
        own = _small_rival(small, kernel, seed).of_size(case)
        if own.side.new_cache is not None and case.phase != "train":
            held = full_cache(own).allocated_bytes
            record = replace(record, kv_cache_bytes=held, kv_bytes_per_token=held / (case.kv_len * case.batch))
        size = sum(p.numel() for p in own.side.module.parameters())
        record = replace(record, params=size, ref_params=judged.ref_params)
        if unlike := _unlike(record):
            record = replace(record, status=unlike[0], error=unlike[1])
    except Exception as failure:
        record = _failed(record, failure)
    seconds = time.perf_counter() - started
    return replace(record, seconds=seconds, measured_seconds=min(seconds, judged.measured_seconds or 0.0))


def _failed(record: Record, failure: BaseException) -> Record:
    message = _describe(failure)
    is_oom = isinstance(failure, MemoryError) or any(text in message for text in OUT_OF_MEMORY)
    return replace(record, status="oom" if is_oom else "error", error=message)


def _describe(failure: BaseException) -> str:
    """Type, message, and the innermost line that is not torch's or ours: the candidate's own, where it has one."""
    if isinstance(failure, KernelFailed):
        return str(failure)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(failure.__traceback__)]
    own = [frame for frame in frames if "site-packages" not in frame[0] and not frame[0].startswith(PACKAGE)]
    place = (own or frames)[-1:]
    return told(failure) + "".join(f" at {file}:{line}" for file, line in place)


def weighed(record: Record, pair: Pair) -> Record:
    """With parameters and cache bytes as they really are, not as the formula says.

    After the comparison: filling a cache calls the kernel, and a kernel's first call must be one that is judged.
    """
    case, side = pair.case, pair.candidate
    record = replace(
        record,
        params=sum(p.numel() for p in side.module.parameters()),
        ref_params=sum(p.numel() for p in pair.reference.module.parameters()),
    )
    if side.new_cache is None or case.phase == "train":
        return record
    x = torch.zeros(case.batch, case.kv_len, case.embed_dim, dtype=getattr(torch, case.dtype))
    with torch.no_grad():
        if is_large(case):
            cache = filled_variant(side.module, x[:, :1], length=case.kv_len)
        elif case.phase == "decode":
            cache = run_steps(side, pair.steps, x)[1]
        else:
            cache = side.new_cache(case.kv_len)
            side.forward(side.module, x, side.views[0], cache, False)
    size = cache.allocated_bytes
    return replace(record, kv_cache_bytes=size, kv_bytes_per_token=size / (case.kv_len * case.batch))


def _equality_columns(equivalence: Equivalence) -> dict[str, Any]:
    worst = equivalence.worst
    gradients = [v.max_abs_err for v in equivalence.verdicts if v.tensor.startswith("grad ") and not v.is_aside]
    return {
        **{name: getattr(worst, name) for name in OF_THE_WORST},
        "worst_tensor": worst.tensor,
        "worst_regime": worst.regime,
        "grad_max_abs_err": max((e for e in gradients if e is not None), default=None),
        "equivalence": [asdict(v) for v in equivalence.verdicts],
        "golden_rows": None if (sampled := equivalence.sampled) is None else len(sampled.rows),
        "sampled": {} if sampled is None else asdict(sampled) | {"rows": list(sampled.rows)},
    }


def status_of(record: Record, equivalence: Equivalence, kernel: Kernel) -> tuple[str, str | None]:
    """Status and message of a record whose calls are counted, and that is weighed."""
    if unlike := _unlike(record):
        return unlike
    worst = equivalence.worst
    if equivalence.judged == "ok":
        return "ok", None
    hint = ""
    if kernel.approximate:
        hint = "; the kernel is approximate: judge it by limits in `accuracy`, with `equivalence: approximate`"
    elif equivalence.judged == "degraded" and record.dtype in HALF and _is_right_in_float32(equivalence):
        hint = _rounded_scores(record.dtype)
    if (sampled := equivalence.sampled) is not None:
        hint += f" ({len(sampled.rows)} of {record.seq_len} queries have a golden, chosen by seed {sampled.seed})"
    return equivalence.judged, f"{worst.tensor} in regime {worst.regime}: {worst.reason}{hint}"


def _is_right_in_float32(equivalence: Equivalence) -> bool:
    shadow = [verdict.status for verdict in equivalence.verdicts if IN_FLOAT32 in verdict.tensor]
    return bool(shadow) and set(shadow) == {"ok"}


def _rounded_scores(dtype: str) -> str:
    """The usual reason and its price: a score keeps few digits, and exp makes its error one of the weight."""
    lost = LARGE_SCORE * torch.finfo(getattr(torch, dtype)).eps / 2
    return (
        f"; right in float32, as a kernel is whose scores are rounded to {dtype} before the softmax: a score of "
        f"{LARGE_SCORE:g} is off by up to {lost:.2g}, its weight by {100 * lost:.2g} %. Score in float32"
    )


def _unlike(record: Record) -> tuple[str, str] | None:
    """What makes a cell fail however close its numbers are."""
    if not record.calls:
        return "mismatch", "the kernel was never called: something bypassed the swapped module"
    for what in ("params", "kv_cache_bytes"):
        measured, formula = getattr(record, what), getattr(record, f"{what}_formula")
        if measured is not None and measured != formula:
            return "mismatch", f"{what}: measured {measured}, by formula {formula}"
    if record.params != record.ref_params:
        return "mismatch", f"params: {record.params}, the reference has {record.ref_params}"
    return None


def _time(pair: Pair, timing: Timing, seed: int, stopwatch: Stopwatch) -> dict[str, Any]:
    """The reference runs as its users run it, torch's fast path included."""
    pair.watch.checking = False
    calls = {"candidate": timed_call(pair, pair.candidate, seed), "reference": timed_call(pair, pair.reference, seed)}
    with stopwatch.running():
        timed = sample(calls, timing, seed)
        peak = peak_bytes(calls["candidate"])
    return _speed_columns(timed, peak, seed)


def _timed_apart(
    record: Record, pair: Pair, process: Process, timing: Timing, seed: int, stopwatch: Stopwatch
) -> Record:
    """Both sides in processes of their own; some of the timed calls are judged."""
    subject, layout = subject_of(pair, pair.candidate, seed), process.domain.layout
    process.begin(torch.get_num_threads())
    candidate = Apart(process, subject)
    sides = {"candidate": candidate, "reference": Apart(_beside("reference"), subject_of(pair, pair.reference, seed))}
    if layout != PLAIN:
        packing = Packing.of(pair, subject_of(pair, pair.candidate, seed), layout)
        sides["packing"] = Apart(_beside("packing"), packing)
    with stopwatch.running():
        timed = sample(sides, timing, seed, sample_s=apart.SAMPLE_S)
        peak = process.peak(candidate.fresh())
    if "packing" in timed.samples:
        timed.samples["candidate"] = apart.without(timed.samples["packing"], timed.samples["candidate"])
    verdicts = [v for result in candidate.kept for v in judge_timed(pair, subject, result, seed=seed)]
    speed = _speed_columns(timed, peak, seed)
    record = replace(record, **speed, equivalence=[*record.equivalence, *map(asdict, verdicts)])
    if record.status in EQUAL_STATUSES and (wrong := worst_of(verdicts)).status != "ok":
        record = replace(record, status=wrong.status, error=f"{wrong.tensor}: {wrong.reason}")
    return record


def _beside(purpose: str) -> Process:
    """Ready for something of ours that is timed beside a user's kernel."""
    process = trusted_process(purpose)
    process.begin(torch.get_num_threads())
    return process


def _time_approximate(
    pair: Pair, close: Approximation, timing: Timing, seed: int, stopwatch: Stopwatch
) -> dict[str, Any]:
    """On the inputs of every regime, because what is left out depends on them, beside the dense kernel.

    The columns are those of the regime that the error's columns are of.
    """
    xs = {regime: inputs.x for regime, inputs in close.inputs.items() if inputs.poisoned is None}
    if not xs:
        return {}
    worst = close.worst.regime if close.worst.regime in xs else next(iter(xs))
    dense = build_pair(pair.case, find_kernel(DENSE), seed)  # with the same weights
    pair.watch.checking = dense.watch.checking = False
    calls = {f"candidate {regime}": _call_on(pair, pair.candidate, x) for regime, x in xs.items()}
    calls |= {"dense": _call_on(dense, dense.candidate, xs[worst])}
    calls |= {"reference": _call_on(pair, pair.reference, xs[worst])}
    with stopwatch.running():
        timed = sample(calls, timing, seed)
        peak = peak_bytes(calls[f"candidate {worst}"])
    of_regime = {regime: timed.samples[f"candidate {regime}"] for regime in xs}
    ratios = {regime: paired_ratio(own, timed.samples["dense"], seed=seed) for regime, own in of_regime.items()}
    latencies = {regime: (1e3 * own.typical, ratios[regime]) for regime, own in of_regime.items()}
    kept = {"candidate": of_regime[worst], **{name: timed.samples[name] for name in ("reference", "dense")}}
    regimes = [closeness.as_dict() for closeness in close.timed(latencies).regimes]
    return _speed_columns(replace(timed, samples=kept), peak, seed) | {"approximation": regimes}


def _speed_columns(timed: Clocked, peak: int, seed: int) -> dict[str, Any]:
    candidate, reference = timed.samples["candidate"], timed.samples["reference"]
    ratio = paired_ratio(candidate, reference, seed=seed)
    return {
        "latency_ms": 1e3 * candidate.typical,
        "ref_latency_ms": 1e3 * reference.typical,
        "latency_ratio": ratio.value,
        "latency_ratio_lo": ratio.lo,
        "latency_ratio_hi": ratio.hi,
        "timing": "disturbed" if ratio.disturbed else "ok",
        "threads": torch.get_num_threads(),
        "others_busy": round(timed.others_busy, 2),
        "rounds": ratio.rounds,
        "peak_bytes": peak,
        "samples_s": {name: samples.seconds for name, samples in timed.samples.items()},
        "waited": {name: [round(w, 4) for w in samples.waited] for name, samples in timed.samples.items()},
    }


def subject_of(pair: Pair, side: Side, seed: int) -> Subject:
    """What is timed of a side, with random inputs."""
    case = pair.case
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.seq_len, case.embed_dim)
    x, cotangent = (torch.randn(shape, generator=generator).to(getattr(torch, case.dtype)) for _ in range(2))
    return Subject(side, case.phase, pair.steps, x, cotangent)


def timed_call(pair: Pair, side: Side, seed: int) -> Callable[[], object]:
    """One prefill, one decode step at the end of a full cache, or one training step."""
    return _call_of(subject_of(pair, side, seed))


def _call_of(subject: Subject) -> Callable[[], object]:
    subject.warm_up()
    x = subject.example
    return lambda: subject.call(x)


def _call_on(pair: Pair, side: Side, x: torch.Tensor) -> Callable[[], object]:
    return _call_of(Subject(side, pair.case.phase, pair.steps, x, torch.ones_like(x)))
