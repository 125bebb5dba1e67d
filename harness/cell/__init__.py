"""One case: its pair of modules is built, drawn, judged, weighed and timed, and a Record tells what came out.

Nothing here imports torch: a case whose process died has a Record, too.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from harness.case import Case
from harness.cell.timing import Samples, paired_ratio
from harness.record import Record, retimed
from harness.variants.specs import VARIANTS


def record_of(case: Case, *, status: str, **measured: Any) -> Record:
    """What is known of the case without running it, and the columns that were `measured`."""
    if case.is_battery:
        sizes = {name: None for name, value in asdict(case).items() if value == 0 and type(value) is int}
        named = asdict(case) | sizes
        return Record(case_id=case.case_id, reference="sdpa", kv_len=None, **named, status=status, **measured)
    spec = VARIANTS[case.variant]
    return Record(
        case_id=case.case_id,
        reference=spec.reference(case),
        kv_len=case.kv_len,
        **asdict(case),
        status=status,
        params_formula=spec.params(case),
        kv_cache_bytes_formula=spec.kv_cache_bytes(case),
        flops=spec.flops(case),
        **measured,
    )


def contested(before: Mapping[str, Record], found: Record, *, seed: int) -> list[Record]:
    """The records of a contest's cells, with what it measured: `found` is that of the cell that all are held to."""
    samples = {name: Samples(found.samples_s[name], found.waited[name]) for name in before}
    records = []
    for name, record in before.items():
        ratio = paired_ratio(samples[name], samples[found.case_id], seed=seed)
        if name == found.case_id:  # against itself
            ratio = replace(ratio, lo=1.0, hi=1.0)
        speed: dict[str, Any] = {
            "latency_ms": 1e3 * samples[name].typical,
            "timing": "disturbed" if ratio.disturbed else "ok",
            "threads": found.threads,
            "others_busy": found.others_busy,
            "rounds": ratio.rounds,
            "against": found.case_id,
            "ratio_to": ratio.value,
            "ratio_lo": ratio.lo,
            "ratio_hi": ratio.hi,
            "samples_s": {"candidate": samples[name].seconds},
            "waited": {"candidate": samples[name].waited},
            "seconds": found.seconds if name == found.case_id else 0.0,  # of the whole contest
            "measured_seconds": found.measured_seconds if name == found.case_id else 0.0,
        }
        records.append(retimed(record, replace(record, **speed)))
    return records
