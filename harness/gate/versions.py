"""The two versions that are timed: the working tree as it is, and a revision checked out beside it, or a folder."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from harness import store
from harness.errors import BadInput
from harness.workers.interrupts import Terminated

GIT_SECONDS = 60
MARK = Path("harness") / "__init__.py"


class VersionError(BadInput):
    """No such version; the message says what to give instead."""


@dataclass(frozen=True, slots=True)
class Version:
    """A tree of kernels, and the one that holds its `harness` package: the same, or where harness is installed.
    `commit` is None outside git."""

    name: str  # for people
    root: Path
    commit: str | None = None
    dirty: bool | None = None
    installed: Path | None = None  # what holds the `harness` package, where the tree itself does not

    @property
    def harness(self) -> Path:
        return self.installed or self.root


INSTALLED = Path(__file__).resolve().parents[2]


def own_repository(folder: Path | None = None) -> Path | None:
    """The top of the git repository around the folder (or the current one), if it is not harness's own."""
    top = _top_of(folder or Path.cwd())
    if top is None:
        return None
    is_ours = INSTALLED.is_relative_to(top) and _ask_git(top, "ls-files", "--error-unmatch", str(INSTALLED / MARK))
    return None if is_ours else top


def _top_of(folder: Path) -> Path | None:
    top = _ask_git(folder, "rev-parse", "--show-toplevel")
    return Path(top).resolve() if top else None


def working_tree(folder: Path | None = None, *, installed: Path | None = None) -> Version:
    """The tree that this very package was imported from (or `folder`), with whatever is not committed."""
    root = (folder or INSTALLED).resolve()
    if installed is None:
        _refuse_without_harness(root, str(root))
    commit = _ask_git(root, "rev-parse", "--verify", "HEAD")
    if commit is None or not _is_inside_git(root):
        return Version("working tree", root, installed=installed)
    # Of harness's own tree harness alone: a changed README times like an unchanged one.
    where = ("--", "harness") if installed is None else ("--untracked-files=no",)
    dirty = bool(_ask_git(root, "status", "--porcelain", *where))
    name = f"{commit[:9]}{' with changes that are not committed' if dirty else ''}"
    return Version(name, root, commit, dirty, installed)


def folder_version(folder: Path, *, installed: Path | None = None) -> Version:
    """A tree given as it is, by people without git."""
    root = Path(folder).resolve()
    if not root.is_dir():
        raise VersionError(f"--base-dir {folder}: there is no such folder")
    if installed is None:
        _refuse_without_harness(root, f"--base-dir {folder}")
    return Version(str(folder), root, installed=installed)


@contextlib.contextmanager
def checked_out(revision: str, repository: Path | None = None, *, installed: Path | None = None) -> Iterator[Version]:
    """A git worktree of the revision in a temporary folder, which is gone afterwards: also after Ctrl-C or SIGTERM."""
    repository = (repository or INSTALLED).resolve()
    commit = resolve(revision, repository)
    if installed is None and _ask_git(repository, "cat-file", "-e", f"{commit}:./{MARK.as_posix()}") is None:
        raise VersionError(f"--base {revision}: {commit[:9]} has no {MARK} to be timed")
    with tempfile.TemporaryDirectory(prefix="harness-gate-") as parent, _terminated_as_interrupt():
        tree = Path(parent) / "base"
        # --detach: a branch may be checked out only once. hooks off: someone's post-checkout is not ours to run.
        added = ("-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--force", str(tree), commit)
        try:
            _git(repository, *added, purpose=f"check out {commit[:9]} into a worktree")
            prefix = _ask_git(repository, "rev-parse", "--show-prefix") or ""
            name = commit[:9] if commit.startswith(revision) else f"{revision} ({commit[:9]})"
            yield Version(name, (tree / prefix).resolve(), commit, False, installed)
        finally:
            # This worktree and no other: `prune` would also take the user's own whose disk is away.
            remove = ("worktree", "remove", "--force", "--force", str(tree))
            if _ask_git(repository, *remove) is None:  # half made: git removes what is known of a folder that is gone
                shutil.rmtree(tree, ignore_errors=True)
                _ask_git(repository, *remove)


def resolve(revision: str, repository: Path) -> str:
    """The whole name of the commit."""
    if not _is_inside_git(repository):
        raise VersionError(
            f"--base {revision}: {repository} is no git repository; give a folder with another version by --base-dir"
        )
    commit = _ask_git(repository, "rev-parse", "--verify", f"{revision}^{{commit}}")  # so that -h is no option either
    if commit is None:
        shallow = _ask_git(repository, "rev-parse", "--is-shallow-repository") == "true"
        hint = "the clone is shallow: fetch more of the history (git fetch --unshallow)" if shallow else "see git log"
        raise VersionError(f"--base {revision}: git knows no such commit in {repository}; {hint}")
    return commit


def baseline_commit(suite: str, baseline_dir: Path) -> str:
    """The commit that the accepted baseline of a suite came from."""
    path = Path(baseline_dir) / f"{store.slug(suite)}.json"
    try:
        commit = json.loads(store.read_regular(path).decode())["commit"]
    except FileNotFoundError:
        raise VersionError(f"--base: there is no {path} to take the commit from; name a revision: --base REV") from None
    except (ValueError, KeyError, TypeError) as error:
        raise VersionError(f"--base: {path} is broken: {error!r}; name a revision: --base REV") from None
    if not isinstance(commit, str):
        raise VersionError(f"--base: {path} names no commit; name a revision: --base REV")
    return commit


def _refuse_without_harness(root: Path, named: str) -> None:
    if not (root / MARK).is_file():
        raise VersionError(f"{named}: there is no {MARK} in it")


def _is_inside_git(folder: Path) -> bool:
    return _ask_git(folder, "rev-parse", "--is-inside-work-tree") == "true"


def _ask_git(folder: Path, *words: str) -> str | None:
    """What git says; None where it refuses, or is not there."""
    try:
        done = _run_git(folder, *words)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _git(folder: Path, *words: str, purpose: str) -> None:
    try:
        done = _run_git(folder, *words)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VersionError(f"cannot {purpose}: {error}") from error
    if done.returncode != 0:
        raise VersionError(f"cannot {purpose}: {done.stderr.strip() or f'git gave exit code {done.returncode}'}")


def _run_git(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["git", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=GIT_SECONDS,
        # In a hook git names the index and the folder of a commit under way: a checkout would be made into that.
        env={name: value for name, value in os.environ.items() if name not in _repository_variables()},
        start_new_session=True,  # Ctrl-C must not end the git that cleans up
    )


@functools.cache
def _repository_variables() -> frozenset[str]:
    words = ["git", "rev-parse", "--local-env-vars"]
    listed = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_SECONDS)
    if listed.returncode != 0:
        raise VersionError(f"cannot ask git for its variables: {listed.stderr.strip()}")
    return frozenset(listed.stdout.split())


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end Python at once and would leave the worktree behind; as an
    exception they do not."""
    known = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in known if signal.getsignal(number) == signal.SIG_DFL]

    def stop(number: int, frame: FrameType | None) -> Any:
        raise Terminated

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
