"""One case: its pair of modules is built, drawn, judged, weighed and timed, and a Record tells what came out.

Nothing here imports torch: a case whose process died has a Record, too.
"""

from dataclasses import asdict
from typing import Any

from harness.case import Case
from harness.record import Record
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
