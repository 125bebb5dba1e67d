"""YAML text -> plain data that remembers its lines. Never more than `safe_load`, often less, and always bounded.

Built from parser events rather than with `yaml.load`, which overwrites repeated keys in silence, forgets lines,
recurses as deep as the file asks, and expands a billion laughs.
"""

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import Reader

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32
MAX_NODES = 20_000  # after aliases are expanded; half a second of reading
# `1:1:1:...` is a base-60 number in YAML 1.1, and reading a long one takes quadratic time. So it stays text.
MAX_NUMBER_CHARS = 100

# Octal without a word (017 is 15) and base 60 (12:30:45 is 45045): what YAML 1.2 and people read otherwise.
OLD_NUMBER = re.compile(r"[-+]?0[0-7_]+|[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")

Where = tuple[str | int, ...]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_STAY_TEXT = frozenset({_TAG + "str", _TAG + "merge", _TAG + "value"})


class YamlError(ValueError):
    """What is wrong and where: `line` counts from 1, None if the trouble is the file itself."""

    def __init__(self, rule: str, line: int | None = None, path: Where = ()) -> None:
        super().__init__(rule, line, path)
        self.rule, self.line, self.path = rule, line, path


@dataclass(frozen=True)
class Node:
    """One value of the file. The line of a mapping's entry is its key's; of an alias, where it is used."""

    line: int
    content: Any  # a scalar, list[Node] or dict[str, Node]
    size: int = 1
    depth: int = 0  # levels below this one

    def plain(self) -> Any:
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content

    def line_of(self, path: Sequence[str | int]) -> int:
        """The line of the value at `path`, or of its nearest ancestor that the file has."""
        node = self
        for part in path:
            inside = node.content
            present = (
                part in inside if isinstance(inside, dict) else isinstance(inside, list) and part in range(len(inside))
            )
            if not present:
                break
            node = inside[part]
        return node.line


def read_text(path: Path) -> str:
    try:
        # A named pipe would block for ever, a device may never end.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise YamlError("is a directory, not a file" if stat.S_ISDIR(mode) else "is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise YamlError(f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"cannot be read: {error}") from error  # a NUL in the file's name
    if len(data) > MAX_BYTES:
        raise YamlError(f"is larger than {MAX_BYTES // 2**20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise YamlError(f"must be UTF-8 text, but byte {data[error.start]:#04x} is not", line) from error


def parse(text: str) -> Node:
    if unprintable := Reader.NON_PRINTABLE.search(text):
        raise YamlError(f"character {unprintable.group()!r} is not allowed", _line_at(text, unprintable.start()))
    # Thousands of %TAG lines take libyaml quadratic time, and a config needs none.
    if directive := re.search(r"^%", text, re.MULTILINE):
        raise YamlError("YAML directives (%) are not allowed", _line_at(text, directive.start()))
    loader = _Loader(text)
    try:
        return _Builder(loader).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context or "syntax error"
        raise YamlError(f"is not valid YAML: {said}", None if mark is None else mark.line + 1) from error
    except yaml.YAMLError as error:
        raise YamlError(f"is not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class _Builder:
    """Recursive descent over the events; MAX_DEPTH keeps it far from Python's own limit."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.anchors: dict[str, Node | None] = {}  # None: still open, so that an alias to it would be endless
        self.nodes = 0

    def document(self) -> Node:
        self.loader.get_event()  # stream start
        if self.loader.check_event(yaml.StreamEndEvent):
            raise YamlError("is empty")
        self.loader.get_event()  # document start
        root = self.node(())
        self.loader.get_event()  # document end
        event = self.loader.get_event()
        if not isinstance(event, yaml.StreamEndEvent):
            raise YamlError("holds more than one YAML document", event.start_mark.line + 1)
        return root

    def node(self, path: Where) -> Node:
        event = self.loader.get_event()
        line = event.start_mark.line + 1
        self.nodes += 1
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor, line, path)
        if event.tag is not None:
            raise YamlError(f"YAML tags are not allowed, found {event.tag!r}", line, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = Node(line, self.scalar(event, line, path))
        else:
            if len(path) >= MAX_DEPTH:
                raise YamlError(f"is nested more than {MAX_DEPTH} deep", line)
            content: Any = self.mapping(path) if isinstance(event, yaml.MappingStartEvent) else self.sequence(path)
            children = content.values() if isinstance(content, dict) else content
            size = 1 + sum(child.size for child in children)
            node = Node(line, content, size, 1 + max((child.depth for child in children), default=0))
        if max(node.size, self.nodes) > MAX_NODES:
            raise YamlError(f"holds more than {MAX_NODES} values once its aliases are expanded", line)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def alias(self, anchor: str | None, line: int, path: Where) -> Node:
        if anchor is None or anchor not in self.anchors:
            raise YamlError(f"alias *{anchor} has no anchor", line, path)
        target = self.anchors[anchor]
        if target is None:
            raise YamlError(f"alias *{anchor} refers to a value that contains it", line, path)
        # The expanded depth counts too: ten aliases can nest what no single part of the file does.
        if len(path) + target.depth > MAX_DEPTH:
            raise YamlError(f"is nested more than {MAX_DEPTH} deep", line)
        return replace(target, line=line)

    def scalar(self, event: Any, line: int, path: Where) -> Any:
        text = event.value
        if not event.implicit[0] or len(text) > MAX_NUMBER_CHARS:
            return text
        tag = self.loader.resolve(yaml.ScalarNode, text, event.implicit)
        if tag in _STAY_TEXT:
            return text
        if OLD_NUMBER.fullmatch(text):
            value = self.loader.construct_object(yaml.ScalarNode(tag, text, event.start_mark, event.end_mark))
            rule = f"{text} would be the number {value} in YAML 1.1, and to few people; write {value}, or quotes"
            raise YamlError(rule, line, path)
        try:
            return self.loader.construct_object(yaml.ScalarNode(tag, text, event.start_mark, event.end_mark))
        except (ValueError, OverflowError) as error:  # 2024-99-99, 0x_
            raise YamlError(f"cannot read {text!r}: {error}", line, path) from error

    def sequence(self, path: Where) -> list[Node]:
        items: list[Node] = []
        while not self.loader.check_event(yaml.SequenceEndEvent):
            items.append(self.node((*path, len(items))))
        self.loader.get_event()
        return items

    def mapping(self, path: Where) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not self.loader.check_event(yaml.MappingEndEvent):
            # Refused before it is read: a mapping as a key of a key of a key would not count as depth.
            if not self.loader.check_event(yaml.ScalarEvent, yaml.AliasEvent):
                raise YamlError("keys must be text", self.loader.peek_event().start_mark.line + 1, path)
            key = self.node(path)
            if not isinstance(key.content, str):
                raise YamlError("keys must be text; put the key in quotes", key.line, path)
            inner = (*path, key.content)
            if key.content in entries:
                raise YamlError(f"duplicate key, first given on line {entries[key.content].line}", key.line, inner)
            value = self.node(inner)
            entries[key.content] = replace(value, line=key.line)
        self.loader.get_event()
        return entries
