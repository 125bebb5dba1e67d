"""Domains beside the kernels: `my_kernels.domain.yaml` says what each function of `my_kernels.py` is for.

    fast:
      dtypes: [bfloat16, float16]
      dropout: false

Whatever is wrong names file, line, key, value and rule. No torch.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.kernels.domain import BadDomain, Domain
from harness.registry import nearest
from harness.yaml_lines import Node, Where, YamlError, parse, read_text


class DomainFileError(BadInput):
    """The message gives file, line, key, value and rule."""


def domain_file(kernel_file: Path) -> Path:
    """Where the domains of a kernel's file may stand."""
    return kernel_file.with_suffix(".domain.yaml")


def read_domains(path: Path, functions: Collection[str]) -> dict[str, Domain]:
    """Function name -> what it is for. `functions`: those that the kernel's file has."""
    try:
        root = parse(read_text(path))
    except YamlError as error:
        raise _problem(path, error.line, ".".join(map(str, error.path)), rule=error.rule) from None
    if not isinstance(root.content, dict):
        raise _problem(path, root.line, "", root.plain(), rule="must be a mapping of function names to limits")
    return {name: _domain(path, name, node, functions) for name, node in root.content.items()}


def _domain(path: Path, name: str, node: Node, functions: Collection[str]) -> Domain:
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise _problem(path, node.line, name, rule=f"no such function{nearest(name, functions)} (known: {known})")
    if not isinstance(node.content, dict):
        raise _problem(path, node.line, name, node.plain(), rule="must be a mapping of limits to values")
    try:
        return Domain.of(**node.plain())
    except BadDomain as error:
        place: Where = (error.key, *_index(node.content[error.key], error.value))
        raise _problem(path, node.line_of(place), f"{name}.{error.key}", error.value, rule=error.rule) from None


def _index(node: Node, value: Any) -> tuple[int, ...]:
    """Which of a list's values it is: in a long list each has a line of its own."""
    inside = node.plain()
    return (inside.index(value),) if isinstance(inside, list) and value in inside else ()


def _problem(path: Path, line: int | None, key: str, *value: Any, rule: str) -> DomainFileError:
    place = str(path) if line is None else f"{path}:{line}"
    return DomainFileError(": ".join(part for part in (place, key, *map(repr, value), rule) if part))
