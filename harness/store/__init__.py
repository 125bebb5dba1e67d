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
    code_sha256,
    read_environment,
    sha256,
    take_shard,
    write_config,
    write_environment,
)
from harness.store.reading import CSV, PARQUET, Stored, dtype, load, read, read_records, some, table, write_tables
from harness.store.records import RECORDS

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
    "Manifest",
    "RunFolder",
    "StoreError",
    "Stored",
    "claim",
    "code_sha256",
    "dtype",
    "load",
    "new_folder",
    "read",
    "read_environment",
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
