"""A run's folder explains itself: elsewhere, later, and to other versions of harness."""

import json
import shutil
from pathlib import Path

import pytest

from harness import store
from harness.errors import StoreError
from harness.gate.baseline import accept
from harness.kernels.plugin import file_digest
from harness.kernels.sources import SourceFile, sources_of
from harness.reproduction import reproduce, unlike
from harness.store.records import seal
from harness.suite.config import load_suite
from tests.support import called

OLD = Path(__file__).parent / "folder_of_0_1"
KERNEL = """\
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch.nn.functional as F


def f(q, k, v, **options):
    from numbers_of_mine.scaling import FACTOR

    return F.scaled_dot_product_attention(q, k, v, **options) * FACTOR


COMPILED_FROM = "attention.cpp"
"""
CONFIG = """\
# of mine
name: mine
battery: {enabled: false}
timing: {enabled: false}
regimes: plain
grid: {variant: mha, embed_dim: 8, heads: 2, seq_len: [3, 4]}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of somebody's: a kernel, two helpers, a source that it compiles, and a config."""
    folder = tmp_path / "project"
    (folder / "numbers_of_mine").mkdir(parents=True)
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "attention.cpp").write_text("// C++\n")
    (folder / "numbers_of_mine" / "__init__.py").write_text("")
    (folder / "numbers_of_mine" / "scaling.py").write_text("from .one import ONE\nFACTOR = ONE\n")
    (folder / "numbers_of_mine" / "one.py").write_text("ONE = 1.0\n")
    (folder / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    return folder


RUN = ("run", "mine.yaml", "--kernel", "kernel.py:f", "--out", "out", "--quiet")
FILES = ["attention.cpp", "kernel.py", "numbers_of_mine/__init__.py", "numbers_of_mine/one.py",
         "numbers_of_mine/scaling.py"]  # fmt: skip


def test_a_folder_copied_elsewhere_is_reproduced_without_its_repository(
    project: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    ran = called(capsys, "run", "mine.yaml", "--kernel", "kernel.py:f", "--kernel", "eager", "--out", "out", "--quiet")
    assert ran.code == 0
    stored = project / "out" / "kernels"
    assert sorted(path.relative_to(stored).as_posix() for path in stored.rglob("*.*")) == FILES
    config = (project / "out" / "config.yaml").read_text()
    assert config.startswith("# of mine\n")  # the user's own words, and what the command line added
    assert (
        load_suite(project / "out" / "config.yaml").cases
        == load_suite("mine.yaml", kernels=["kernel.py:f", "eager"]).cases
    )
    sent = shutil.move(project / "out", tmp_path / "sent")
    shutil.rmtree(project)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = called(capsys, "reproduce", sent)
    assert again.code == 0, again.out + again.err
    assert "the same environment as then" in again.out
    assert "REPRODUCED  4 of 4 cells with the same verdict, 4 with the same numbers" in again.out
    # A kernel that was edited there is not what ran, and nobody runs it.
    (Path(sent) / "kernels" / "kernel.py").write_text(KERNEL.replace("* FACTOR", "* 2"))
    refused = called(capsys, "reproduce", sent)
    assert refused.code == 2 and "the stored source of kernel kernel.py:f is not what ran there" in refused.err


def test_another_verdict_is_told(project: Path, capsys) -> None:
    """As if the folder had said something else."""
    assert called(capsys, *RUN).code == 0
    lines = (project / "out" / store.RECORDS).read_bytes().splitlines()
    record = json.loads(lines[0])
    plain = {key: value for key, value in record.items() if key != "crc32"} | {"status": "mismatch"}
    lines[0] = seal(json.dumps(plain, separators=(",", ":")).encode()).rstrip()
    (project / "out" / store.RECORDS).write_bytes(b"\n".join(lines) + b"\n")
    again = called(capsys, "reproduce", "out", "--out", "again")
    assert again.code == 1
    assert f"{record['case_id']}: mismatch -> ok" in again.out
    assert "NOT REPRODUCED  1 of 2 cells with the same verdict" in again.out


def test_an_edited_helper_is_a_changed_kernel(project: Path, capsys) -> None:
    assert called(capsys, *RUN, "--shard", "1/2").code == 0
    digests = {file_digest("kernel.py:f")}
    for file in (name for name in FILES if "__init__" not in name):
        (project / file).write_text((project / file).read_text() + "\n")
        digests.add(file_digest("kernel.py:f"))
    assert len(digests) == len(FILES)
    resumed = called(capsys, *RUN, "--shard", "1/2", "--resume")
    assert resumed.code == 2
    assert "kernel kernel.py:f: kernel.py sha256:" in resumed.err


def test_merged_shards_keep_the_kernels_too(project: Path, capsys) -> None:
    for at in ("1/2", "2/2"):
        assert called(capsys, *RUN[:-2], at[0], "--quiet", "--shard", at).code == 0
    assert called(capsys, "merge", "whole", "1", "2").code == 0
    again = called(capsys, "reproduce", "whole", "--out", "again")
    assert again.code == 0 and "REPRODUCED  2 of 2 cells with the same verdict, 2 with" in again.out


def test_installed_packages_are_no_source_but_a_version(project: Path) -> None:
    (project / "kernel.py").write_text("import torch, numpy as np, harness, os\n" + KERNEL)
    assert sorted(each.place for each in sources_of("kernel.py:f")) == FILES
    assert sources_of("eager") == () and sources_of("torch.nn:Module") == ()


def test_what_differs_from_then_is_listed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD, tmp_path / "old"))
    data = json.loads((folder / "run.json").read_text())
    data["packages"] = {"torch": "0.1", "nobody-has-this": "7"}
    data["environment"]["torch"] = "0.1"
    (folder / "run.json").write_text(json.dumps(data))
    found = "\n".join(unlike(folder))
    assert (
        "torch: 0.1 -> 2" in found and "nobody-has-this 7 -> not installed" in found and "harness's own code" in found
    )


def test_a_folder_of_the_previous_release_is_read(tmp_path: Path, capsys) -> None:
    folder = shutil.copytree(OLD, tmp_path / "old")
    frame = store.load(folder)
    assert list(frame["status"]) == ["ok"] * 4 and frame["latency_ms"].notna().all()
    assert called(capsys, "report", folder, "--format", "md").code == 0
    assert called(capsys, "show", folder).code == 0
    assert called(capsys, "compare", folder, folder).code == 0
    assert "4 cells" in accept(Path(folder), tmp_path / "baseline")
    with pytest.raises(StoreError, match=r"the source of kernel mine\.py:f is not in it"):
        reproduce(Path(folder))


def test_a_folder_of_a_later_release_is_read(tmp_path: Path) -> None:
    """What is new there is left out, and does not make the rest unreadable."""
    folder = Path(shutil.copytree(OLD, tmp_path / "new"))
    data = json.loads((folder / "run.json").read_text()) | {"schema": 99, "mood": "good"}
    data["environment"]["gpu"] = "none"
    (folder / "run.json").write_text(json.dumps(data))
    lines = []
    for line in (folder / store.RECORDS).read_bytes().splitlines():
        plain = {key: value for key, value in json.loads(line).items() if key != "crc32"} | {"watts": 3.5}
        lines.append(seal(json.dumps(plain, separators=(",", ":")).encode()))
    (folder / store.RECORDS).write_bytes(b"".join(lines))
    assert list(store.load(folder)["status"]) == ["ok"] * 4


def test_nothing_is_stored_or_read_outside_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="would be stored outside"):
        store.write_sources(tmp_path / "run", [SourceFile("../evil.py", tmp_path / "x.py", b"")])
    folder = Path(shutil.copytree(OLD, tmp_path / "old"))
    data = json.loads((folder / "run.json").read_text()) | {"sources": {"mine.py:f": ["../../../etc/passwd"]}}
    (folder / "run.json").write_text(json.dumps(data))
    with pytest.raises(StoreError, match="lies outside of it"):
        reproduce(folder)


def test_latest_follows_out(project: Path, capsys) -> None:
    (project / "results").mkdir()
    for out in ("results/a", "b"):
        assert called(capsys, "run", "mine.yaml", "--out", out, "--quiet", "--shard", "1/2").code == 0
        assert (project / "results" / "latest").resolve() == (project / out).resolve()
    assert called(capsys, "run", "mine.yaml", "--out", project.parent / "c", "--quiet", "--shard", "1/2").code == 0
    assert (project / "results" / "latest").resolve() == (project / "b").resolve()  # elsewhere it is not ours
