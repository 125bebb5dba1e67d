"""One file a command, found by its name: `arguments` adds its options, `execute` does it and gives the exit code.

Here are the types of arguments that several commands have; each says the rule that its text broke.
"""

import argparse
import pkgutil
from typing import Any

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def override(text: str) -> tuple[str, Any]:
    from harness.yaml_lines import YamlError, parse

    key, equals, value = text.partition("=")
    if not (equals and key):
        raise argparse.ArgumentTypeError(f"{text!r}: must be KEY=VALUE, as in num_hidden_layers=4")
    try:
        return key, parse(value).plain() if value else None
    except YamlError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: the value {error.rule}") from error


def shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be I/N with 1 <= I <= N, as in 2/4")
    return int(index), int(count)


def positive(text: str, rule: str = "a positive number of processes") -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: must be {rule}")
    return int(text)
