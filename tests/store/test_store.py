"""Nothing measured is lost: records round-trip, damage is seen, tables keep types, folders are never overwritten."""

import json
import logging
import math
import os
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness import store
from harness.environment import collect
from harness.record import COLUMNS
from harness.store import RunFolder, StoreError
from harness.store.records import dumps, seal
from tests.support import python
from tests.support.records import bare_record as record


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "smoke")


def lines(run: RunFolder) -> list[str]:
    return (run.path / store.RECORDS).read_text(encoding="utf-8").split("\n")


def test_records_round_trip(run: RunFolder) -> None:
    records = [
        record("a", error="naïve ∞ \u2028 \x85 line\nbreak \x1b[31m 日本語", kv_heads=None, status="error"),
        record("b", max_abs_err=math.inf, mean_abs_err=-math.inf, params=2**53 + 1, kv_bytes_per_token=0.1),
        record("c", error="nan", mask="inf", samples_s={"candidate": [0.1, math.inf]}, equivalence=[{"m": math.inf}]),
    ]
    for one in records:
        run.append(one)
    assert store.read_records(run.path) == records


def test_nan_comes_back_as_nan_and_none_as_none(run: RunFolder) -> None:
    run.append(record(err_ratio=math.nan, equivalence=[{"err": math.nan, "deep": [math.nan]}]))
    (back,) = store.read_records(run.path)
    assert back.err_ratio is not None
    assert math.isnan(back.err_ratio)
    assert math.isnan(back.equivalence[0]["err"])
    assert math.isnan(back.equivalence[0]["deep"][0])
    assert back.max_abs_err is None


def test_lines_are_strict_json(run: RunFolder) -> None:
    run.append(record(err_ratio=math.nan, max_abs_err=-math.inf))
    first, end = lines(run)
    data = json.loads(first, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (data["err_ratio"], data["max_abs_err"], data["mean_abs_err"], end) == ("nan", "-inf", None, "")


def test_numpy_numbers_and_surrogates_are_kept(run: RunFolder) -> None:
    run.append(record(params=np.int64(7), err_ratio=np.float32(0.5), error="file \udcff"))
    (back,) = store.read_records(run.path)
    assert (back.params, back.err_ratio, back.error) == (7, 0.5, "file \\udcff")


def test_a_value_json_cannot_keep_is_refused_by_name(run: RunFolder) -> None:
    with pytest.raises(StoreError, match="equivalence holds a set"):
        run.append(record(equivalence=[{"x": {1}}]))
    assert lines(run) == [""]


def test_append_is_on_disk_at_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append((run.path / store.RECORDS).stat().st_size))
    run.append(record())
    assert synced
    assert synced[-1] > 0


def test_a_torn_last_line_is_skipped_with_a_warning(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    run.append(record("a"))
    run.append(record("b"))
    path = run.path / store.RECORDS
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1):
        caplog.clear()
        path.write_bytes(whole[:cut])
        with caplog.at_level(logging.WARNING):
            assert [one.case_id for one in store.read_records(run.path)] == ["a"]
        assert f"{path}:2: torn last line" in caplog.text


def test_a_last_line_that_only_lacks_its_newline_is_kept(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    run.append(record("a"))
    path = run.path / store.RECORDS
    path.write_bytes(path.read_bytes()[:-1])
    assert [one.case_id for one in store.read_records(run.path)] == ["a"]
    assert "torn" not in caplog.text


def sealed(text: str) -> bytes:
    """With a checksum that holds: damage that a checksum cannot see, such as a line of another version."""
    return seal(text.encode())


def broken(**changes: Any) -> bytes:
    fields = json.loads(dumps(record()))
    del fields["crc32"]
    return sealed(json.dumps(fields | changes))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken\n", "broken record: not one whole JSON object"),
        (b"\n", "broken record"),
        (b"[" * 100_000 + b"\n", "broken record"),
        (sealed('{"a": NaN}'), "NaN is not JSON"),
        (sealed("[1]"), "broken record"),
        (sealed('{"case_id": "x"}'), "missing fields batch, bias"),
        (b'{"case_id": "x"}\n', "written by an older version of harness"),
        (b'{"case_id": "x", "crc32": "12345678"}\n', "its crc32 is '12345678', but its bytes give"),
        (broken(status="fine"), "unknown status 'fine'; known: ok"),
        (broken(heads="8"), "field heads must be"),
        (broken(heads=True), "field heads must be"),
        (broken(variant=None), "field variant must be"),
        (broken(params=1.5), "field params must be"),
        (broken(err_ratio="much"), "field err_ratio must be"),
        (broken(samples_s=[]), "field samples_s must be"),
    ],
)
def test_a_broken_line_is_an_error_with_its_place(run: RunFolder, line: bytes, message: str) -> None:
    run.append(record())
    path = run.path / store.RECORDS
    before = path.read_bytes()
    run.append(record("later"))
    path.write_bytes(before + line + path.read_bytes()[len(before) :])
    with pytest.raises(StoreError) as caught:
        store.read_records(run.path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)


def test_every_line_carries_the_checksum_of_what_stands_before_it(run: RunFolder) -> None:
    run.append(record(error="naïve"))
    line = (run.path / store.RECORDS).read_bytes()
    body, _, seal = line.rpartition(b',"crc32":"')
    assert seal == f'{zlib.crc32(body):08x}"}}\n'.encode()
    assert list(json.loads(line))[-1] == "crc32"


def test_every_flipped_bit_is_seen(run: RunFolder) -> None:
    for name in ("a", "b"):
        run.append(record(name))
    path = run.path / store.RECORDS
    honest = path.read_bytes()
    first = honest.index(b"\n")
    chance = random.Random(0)
    for at in [*chance.sample(range(first), 300), first]:
        for bit in range(8):
            path.write_bytes(honest[:at] + bytes([honest[at] ^ 1 << bit]) + honest[at + 1 :])
            with pytest.raises(StoreError, match=r"records\.jsonl:1: "):
                store.read_records(run.path)


def test_a_second_record_of_a_case_is_refused_with_both_lines(run: RunFolder) -> None:
    for name in ("a", "b", "a"):
        run.append(record(name))
    with pytest.raises(StoreError, match=r"jsonl:3: a is recorded twice; the other is .*jsonl:1$"):
        store.read_records(run.path)


def test_the_last_attempt_counts_and_none_may_be_lost(run: RunFolder) -> None:
    for name, attempt, status in (("a", 1, "error"), ("b", 1, "ok"), ("a", 3, "oom"), ("a", 2, "ok")):
        run.append(record(name, attempt=attempt, status=status))
    assert [(r.case_id, r.status) for r in store.read_records(run.path)] == [("a", "oom"), ("b", "ok")]
    run.append(record("b", attempt=3))
    with pytest.raises(StoreError, match=r"jsonl:5: attempt 3 of b, but attempt 2 is not there"):
        store.read_records(run.path)


FULL = """\
import resource, sys
from pathlib import Path
from harness import store
from tests.support.records import bare_record as record
run = store.RunFolder.create(Path(sys.argv[1]), "smoke")
run.append(record("a"))
size = (run.path / store.RECORDS).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
try:
    run.append(record("b"))
except store.StoreError as error:
    print(error)
print((run.path / store.RECORDS).stat().st_size == size, [r.case_id for r in store.read_records(run.path)])
"""


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    told, left = python("-c", FULL, tmp_path / "r").out.splitlines()
    assert told == f"{tmp_path}/r/records.jsonl: cannot be written: File too large; cut back to its last whole line"
    assert left == "True ['a']"


def test_bytes_that_are_no_utf8_are_an_error(run: RunFolder) -> None:
    (run.path / store.RECORDS).write_bytes(b'{"case_id": "\xff"}\n')
    with pytest.raises(StoreError, match=r"records\.jsonl:1: broken record"):
        store.read_records(run.path)


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run's folder"):
        store.read_records(tmp_path)


def test_a_used_folder_is_refused_and_untouched(run: RunFolder) -> None:
    run.append(record())
    before = lines(run)
    run.close()
    with pytest.raises(StoreError, match=r"already holds records\.jsonl.*--resume"):
        RunFolder.create(run.path, "smoke")
    assert lines(run) == before


def test_an_existing_folder_without_records_is_used(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    assert RunFolder.create(tmp_path, "smoke").path == tmp_path
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_a_file_as_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        RunFolder.create(tmp_path / "x", "smoke")


def test_own_folders_are_unique_and_latest_follows(tmp_path: Path) -> None:
    root = tmp_path / "results"
    runs = [RunFolder.create(None, "smoke", root) for _ in range(5)]
    for one in runs:
        one.close()
    assert len({one.path for one in runs}) == 5
    assert all(one.path.name.startswith("smoke-") for one in runs)
    latest = root / "latest"
    assert latest.is_symlink()
    assert latest.resolve() == runs[-1].path.resolve()
    assert latest.readlink() == Path(runs[-1].path.name)  # relative: the tree may move
    assert sorted(path.name for path in root.iterdir()) == sorted([*(one.path.name for one in runs), "latest"])


def test_latest_never_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunFolder.create(None, "smoke", tmp_path)

    def fail(source: object, target: object) -> None:
        raise OSError("power")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="power"):
        RunFolder.create(None, "smoke", tmp_path)
    assert (tmp_path / "latest").resolve() == first.path.resolve()


def test_a_broken_latest_is_replaced_and_a_real_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    run = RunFolder.create(None, "smoke", tmp_path)
    assert (tmp_path / "latest").resolve() == run.path.resolve()
    (tmp_path / "other" / "latest").mkdir(parents=True)
    with pytest.raises(StoreError, match="not a symlink"):
        RunFolder.create(None, "smoke", tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["latest"]


def test_an_explicit_folder_leaves_latest_alone(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "mine", "smoke", tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ["../../etc", "/abs", "a/b", "..", "<b>", "", "名前"])
def test_a_hostile_suite_name_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    assert RunFolder.create(None, name, tmp_path).path.parent == tmp_path


def test_table_types(tmp_path: Path) -> None:
    frame = store.table([record(params=5, err_ratio=math.inf), record("b")])
    assert tuple(frame.columns) == COLUMNS
    assert {name: str(frame[name].dtype) for name in ("params", "err_ratio", "error", "bias")} == {
        "params": "Int64",
        "err_ratio": "float64",
        "error": "string",
        "bias": "boolean",
    }
    assert frame["params"].tolist()[0] == 5
    assert frame["params"].isna().tolist() == [False, True]
    assert str(store.table([])["params"].dtype) == "Int64"


def test_tables_on_disk(run: RunFolder) -> None:
    run.append(record(params=2**53 + 1, err_ratio=math.inf, error='a,"b"\nc'))
    run.append(record("b", mask="none"))
    store.write_tables(run.path, store.read_records(run.path))
    parquet = pd.read_parquet(run.path / store.PARQUET)
    pd.testing.assert_frame_equal(parquet, store.load(run.path))
    text = (run.path / store.CSV).read_text(encoding="utf-8")
    assert text.split("\n")[0] == ",".join(COLUMNS)
    back = pd.read_csv(run.path / store.CSV, dtype=str, keep_default_na=False)
    assert back["params"].tolist() == [str(2**53 + 1), ""]  # neither 0 nor a float
    assert back["err_ratio"].tolist() == ["inf", ""]
    assert back["error"].tolist() == ['a,"b"\\nc', ""]  # one line a cell


def test_tables_are_replaced_whole_or_not_at_all(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_tables(run.path, [record()])
    before = sorted((path.name, path.read_bytes()) for path in run.path.iterdir())

    def full(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.write_tables(run.path, [record("other")])
    assert sorted((path.name, path.read_bytes()) for path in run.path.iterdir()) == before


def test_config_and_environment(run: RunFolder) -> None:
    store.write_config(run.path, "name: smöke\n")
    assert (run.path / "config.yaml").read_text(encoding="utf-8") == "name: smöke\n"
    environment = replace(collect(2), commit="abc")
    store.write_environment(run.path, environment)
    assert store.read_environment(run.path) == environment
    (run.path / "environment.json").write_text("{}")
    with pytest.raises(StoreError, match=r"environment\.json: not an environment"):
        store.read_environment(run.path)


@pytest.mark.parametrize("module", ["harness.store", "harness.gate.exact", "harness.report", "harness.report.terminal"])
def test_imports_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = python("-c", code)
    assert done.code == 0, done.err
