"""The pandas table of a run's records, and its files. Derived: they can be written again at any time."""

import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness.record import COLUMNS, Record
from harness.store.files import write_atomically
from harness.store.line import TYPES

CSV, PARQUET = "results.csv", "results.parquet"
# Nullable, so that one missing count neither becomes 0 nor turns its column into floats.
DTYPES = {int: "Int64", float: "float64", str: "string", bool: "boolean"}


def dtype(column: str) -> str:
    return DTYPES[TYPES[column]]


def table(records: Sequence[Record]) -> pd.DataFrame:
    return pd.DataFrame(
        {name: pd.Series([getattr(r, name) for r in records], dtype=dtype(name)) for name in COLUMNS},
        columns=list(COLUMNS),
    )


def write_tables(folder: Path, records: Sequence[Record]) -> pd.DataFrame:
    frame = table(records)
    write_atomically(Path(folder) / CSV, frame.to_csv(index=False, lineterminator="\n").encode())
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    write_atomically(Path(folder) / PARQUET, buffer.getvalue())
    return frame
