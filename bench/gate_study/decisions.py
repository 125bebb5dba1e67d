"""What each tool says of a cell, by the tool's own code: pytest-benchmark, asv, pyperf. No sampling here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = ("mean", "median", "min")  # that --benchmark-compare-fail is asked about
PERCENT = 5
ASV_FACTORS = {"asv": 1.1, "asv, factor 1.05": 1.05}  # its default first
PYPERF_MIN_SPEEDS: dict[str, float | None] = {"pyperf": None, "pyperf, min speed 5 %": 5.0}
NEVER = float("-inf")  # the score of a cell which no threshold would flag


@dataclass(frozen=True)
class Decision:
    """`score` is the number that the tool holds against a threshold: larger is slower."""

    name: str
    flagged: bool
    score: float


def by_pytest_benchmark(base: Mapping[str, float], head: Mapping[str, float]) -> list[Decision]:
    """`stats` of the saved JSON files -> --benchmark-compare-fail=FIELD:5% for three fields."""
    from pytest_benchmark.utils import parse_compare_fail

    found = []
    for field in FIELDS:
        check = parse_compare_fail(f"{field}:{PERCENT}%")
        flagged = check.fails(head, base) is not None
        found.append(Decision(f"pytest-benchmark {field}", flagged, check.compute(head, base) / 100))
    return found


def by_asv(base: Sequence[float], head: Sequence[float], numbers: tuple[int, int] = (1, 1)) -> list[Decision]:
    """Samples of all rounds -> what `asv continuous` marks with a plus and fails for."""
    from asv._stats import is_different  # type: ignore[import-untyped]
    from asv.commands.compare import _is_result_better  # type: ignore[import-untyped]
    from asv_runner.statistics import compute_stats  # type: ignore[import-untyped]

    base_value, base_stats = compute_stats(list(base), numbers[0])
    head_value, head_stats = compute_stats(list(head), numbers[1])
    sides: Any = ((base_stats, list(base)), (head_stats, list(head)))
    # The factor is the threshold; what the statistics do not tell apart is never flagged.
    differs = len(base) == 1 or len(head) == 1 or is_different(list(base), list(head), base_stats, head_stats)
    score = head_value / base_value - 1 if differs else NEVER
    return [
        Decision(name, bool(_is_result_better(base_value, head_value, *sides, factor)), score)
        for name, factor in ASV_FACTORS.items()
    ]


def by_pyperf(base: Sequence[float], head: Sequence[float]) -> list[Decision]:
    """Values of all processes -> what `pyperf compare_to` calls significant and slower; the score is its t."""
    import pyperf  # type: ignore[import-untyped]
    from pyperf._compare import CompareData, CompareResult  # type: ignore[import-untyped]

    def data(name: str, values: Sequence[float]) -> Any:
        run = pyperf.Run(list(values), metadata={"name": "cell", "unit": "second"}, collect_metadata=False)
        return CompareData(name, pyperf.Benchmark([run]))

    found = []
    for name, min_speed in PYPERF_MIN_SPEEDS.items():
        result = CompareResult(data("base", base), data("head", head), min_speed)
        slower = result.norm_mean > 1
        # Its t is negative where the head is slower; where it could not be computed, pyperf says significant.
        score = -result.t_score if result.t_score is not None else float("inf") if slower else NEVER
        if min_speed is not None:  # here the speed is the threshold, and the t-test a condition
            score = result.norm_mean - 1 if CompareResult(data("base", base), data("head", head)).significant else NEVER
        found.append(Decision(name, bool(result.significant and slower), score))
    return found
