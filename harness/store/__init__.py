"""The run's folder. `records.jsonl` is the truth, appended and synced case by case; tables are derived from it."""

from harness.errors import StoreError
from harness.store.files import claim, new_folder, slug, write_atomically
from harness.store.folder import LATEST, RunFolder
from harness.store.manifest import (
    COMPARED,
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    About,
    Manifest,
    Part,
    code_sha256,
    differences,
    read_environment,
    read_manifest,
    sha256,
    take_shard,
    write_config,
    write_environment,
)
from harness.store.reading import CSV, PARQUET, Stored, dtype, read, read_records, some, table, write_tables
from harness.store.reading import read_table as load
from harness.store.records import RECORDS, Line, latest, read_lines

__all__ = [
    "COMPARED",
    "CONFIG",
    "CSV",
    "ENVIRONMENT",
    "LATEST",
    "MANIFEST",
    "PARQUET",
    "RECORDS",
    "About",
    "Line",
    "Manifest",
    "Part",
    "RunFolder",
    "StoreError",
    "Stored",
    "claim",
    "code_sha256",
    "differences",
    "dtype",
    "latest",
    "load",
    "new_folder",
    "read",
    "read_environment",
    "read_lines",
    "read_manifest",
    "read_records",
    "sha256",
    "slug",
    "some",
    "table",
    "take_shard",
    "write_atomically",
    "write_config",
    "write_environment",
    "write_tables",
]
