"""Shards put together are the run they are shards of; what does not belong together, or is missing, is named."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import harness
from harness import environment, store
from harness.__main__ import main
from harness.runner import Interrupted, run
from harness.store import StoreError
from harness.store.merge import merge
from tests.support.runs import CONFIG, MadeUp

pytestmark = pytest.mark.usefixtures("beside_a_config")

OUT = Path("out")


def shards(count: int, **options: object) -> list[Path]:
    folders = [Path(f"s{at}") for at in range(1, count + 1)]
    for at, folder in enumerate(folders, start=1):
        run("c.yaml", folder, shard=(at, count), executor=MadeUp(**options))  # type: ignore[arg-type]
    return folders


@pytest.mark.parametrize("count", [1, 2, 4])
def test_merged_shards_have_the_table_of_the_whole_run(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run("c.yaml", "whole", executor=MadeUp())
    folders = shards(count, backwards=True)
    assert main(["merge", "out", *map(str, reversed(folders))]) == 0
    assert capsys.readouterr().out.startswith("EQUAL  6 cells: 6 ok")
    pd.testing.assert_frame_equal(harness.load(OUT), whole)
    for name in (store.CSV, store.PARQUET, store.CONFIG):
        assert (OUT / name).read_bytes() == (Path("whole") / name).read_bytes()
    manifest = json.loads((OUT / "run.json").read_text())
    assert (manifest["shard"], manifest["cells"]) == (None, 6)
    assert [part["shard"] for part in manifest["parts"]] == [[at, count] for at in range(count, 0, -1)]
    assert sum(part["cells"] for part in manifest["parts"]) == 6
    assert "6 ok" in (OUT / "summary.md").read_text()


def test_the_exit_code_is_the_verdict() -> None:
    for status, code in (("degraded", 0), ("mismatch", 1)):
        folder = Path(status)
        run("c.yaml", folder, executor=MadeUp(statuses={"mha": status}))
        assert main(["merge", f"{status}-out", str(folder), "--quiet"]) == code
        assert main(["merge", f"{status}-strict", str(folder), "--quiet", "--strict"]) == 1


def test_a_missing_shard_is_named_and_partial_says_so_for_ever() -> None:
    first, _, third = shards(3)
    with pytest.raises(StoreError) as caught:
        merge(OUT, [first, third])
    assert (
        "together they have 4 of 6 cells; missing: mha-e16-h2-kv2-d8-l6-b1-causal-prefill-float32-eager, mqa-"
        in str(caught.value)
    )
    assert "no folder holds shard 2/3" in str(caught.value)
    assert not OUT.exists()
    assert main(["merge", "out", str(first), str(third), "--partial", "--quiet"]) == 1
    assert len(harness.load(OUT).attrs["missing"]) == 2
    assert "incomplete: 4 of 6 cells, merged with --partial" in (OUT / "summary.md").read_text()
    with pytest.raises(StoreError, match="was merged from 2 folders"):
        run("c.yaml", OUT, executor=MadeUp(), resume=True)
    merge(Path("all"), [OUT, Path("s2")])
    assert len(harness.load("all")) == 6  # any parts will do


def test_an_unfinished_shard_is_missing_cells() -> None:
    first, second = shards(2)
    (second / store.RECORDS).unlink()
    with pytest.raises(Interrupted):
        run("c.yaml", "again", shard=(2, 2), executor=MadeUp(stop_after=1))
    with pytest.raises(StoreError, match="together they have 4 of 6 cells"):
        merge(OUT, [first, Path("again")])
    with pytest.raises(StoreError, match=r"s2 is not a run's folder"):
        merge(OUT, [first, second])


def test_a_cell_that_is_in_two_parts_is_refused_with_both_places() -> None:
    run("c.yaml", "whole", executor=MadeUp())
    first, _ = shards(2)
    for parts in ([Path("whole"), first], [Path("whole"), first, first]):
        with pytest.raises(StoreError, match=r"^s1/records\.jsonl:1: mha-\S+ is also in whole/records\.jsonl:1"):
            merge(OUT, parts, partial=True, even_if_changed=True)
    assert not OUT.exists()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("config", "config: line 2: 'threads: 1' -> 'threads: 2'"),
        ("code", "code: c0de -> other"),
        ("kernel", "kernel eager: mine.py sha256:1111 -> mine.py sha256:2222"),
        ("cpu", "-> abacus"),
    ],
)
def test_unlike_parts_are_refused_by_name(what: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("c.yaml", "s1", shard=(1, 2), executor=MadeUp())
    executor = MadeUp()
    if what == "config":
        Path("c.yaml").write_text(CONFIG.replace("threads: 1", "threads: 2"))
    elif what == "code":
        monkeypatch.setattr(store, "code_sha256", lambda: "other")
    elif what == "kernel":
        executor.origin = "mine.py sha256:2222"
    else:
        elsewhere = replace(environment.collect(1), cpu="abacus")
        monkeypatch.setattr(environment, "collect", lambda threads: elsewhere)
    run("c.yaml", "s2", shard=(2, 2), executor=executor)
    with pytest.raises(StoreError) as caught:
        merge(OUT, [Path("s1"), Path("s2")])
    assert told in str(caught.value)
    assert "s1 -> s2: " in str(caught.value)
    assert not OUT.exists()
    assert main(["merge", "out", "s1", "s2", "--even-if-changed", "--quiet"]) == 0
    assert len(harness.load(OUT)) == 6
    assert told.replace("'", "") in (OUT / "summary.md").read_text().replace("'", "")


def test_attempts_survive_a_merge() -> None:
    folders = shards(2, statuses={"mha": "error"})
    for at, folder in enumerate(folders, start=1):
        run("c.yaml", folder, shard=(at, 2), executor=MadeUp(), resume=True, retry=True)
    merge(OUT, folders)
    assert set(harness.load(OUT)["status"]) == {"ok"}
    assert len((OUT / store.RECORDS).read_text().splitlines()) == 9


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    folders = shards(2)
    assert main(["merge", "s1", *map(str, folders)]) == 2
    told = capsys.readouterr().err
    assert "s1 already holds records.jsonl of another run; name another folder" in told
    assert "--resume" not in told
    assert main(["merge", "out", "nowhere"]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    Path("empty").mkdir()
    assert main(["merge", "out", "empty"]) == 2
    assert "empty has no run.json" in capsys.readouterr().err
    path = folders[1] / store.RECORDS
    path.write_bytes(path.read_bytes().replace(b'"ok"', b'"OK"', 1))
    assert main(["merge", "out", *map(str, folders)]) == 2
    told = capsys.readouterr().err
    assert "s2/records.jsonl:1: broken record" in told
    assert "remove this line, and --resume measures its case again" in told
    path = folders[0] / store.MANIFEST
    path.write_text(path.read_text().replace("threads: 1", "threads: 2"))
    assert main(["merge", "out", *map(str, folders)]) == 2
    assert "s1/run.json: broken: ValueError: its config does not have the checksum" in capsys.readouterr().err
    assert not OUT.exists()
