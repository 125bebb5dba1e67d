"""Logging in the form `[LEVEL][MODULE][FUNC] message`, to standard error."""

import logging

import pytest

from harness import text as logs

log = logging.getLogger("harness.some.module")


def say() -> None:
    log.debug("dust %d", 1)
    log.info("news")
    log.warning("look %s", "here")
    log.error("broken")


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ({}, ["WARNING", "ERROR"]),
        ({"quiet": True}, ["ERROR"]),
        ({"verbose": True}, ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ({"quiet": True, "verbose": True}, ["ERROR"]),
    ],
)
def test_which_levels_are_shown(options: dict[str, bool], levels: list[str], capsys: pytest.CaptureFixture[str]):
    logs.configure(**options)
    say()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line[1:].partition("]")[0] for line in captured.err.splitlines()] == levels


def test_the_form(capsys: pytest.CaptureFixture[str]):
    logs.configure(verbose=True)
    say()
    assert capsys.readouterr().err.splitlines() == [
        "[DEBUG][test_logs][say] dust 1",
        "[INFO][test_logs][say] news",
        "[WARNING][test_logs][say] look here",
        "[ERROR][test_logs][say] broken",
    ]


def test_configured_again_it_says_everything_once(capsys: pytest.CaptureFixture[str]):
    for _ in range(3):
        logs.configure(verbose=True)
    logs.configure()
    say()
    assert capsys.readouterr().err.splitlines() == [
        "[WARNING][test_logs][say] look here",
        "[ERROR][test_logs][say] broken",
    ]


def test_other_loggers_are_left_alone(capsys: pytest.CaptureFixture[str]):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    logs.configure(verbose=True)
    assert (root.level, list(root.handlers)) == before
    logging.getLogger("somebody.else").info("not ours")
    assert capsys.readouterr().err == ""
