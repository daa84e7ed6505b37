"""YAML as people expect it: the scalars of YAML 1.2, no duplicate keys, line numbers kept.

PyYAML follows YAML 1.1, in which ``1e-5`` is text, ``off`` is false, ``1:30`` is 90 and ``010`` is 8. Here a scalar is null,
true/false, a decimal integer, a finite decimal number, or text; nothing else is guessed. The writer quotes what either set
of rules would misread, so that its text reads back equal here and in any YAML library.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$")
_UNICODE_BREAK = re.compile("[\x85\u2028\u2029]")
_DEEPEST = 20
"""Levels of nesting; deeper is a mistake (or an anchor that contains itself)."""
_MOST_DIGITS = 400
"""Of an integer: about as many as the largest float has."""
_TOO_DEEP = "lists and mappings are nested too deeply"
_RESOLVERS = (
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"]),
)
_KNOWN_TAGS = (*(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "str", "seq", "map")), None)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors = {tag: build for tag, build in yaml.SafeLoader.yaml_constructors.items() if tag in _KNOWN_TAGS}


class _Dumper(yaml.SafeDumper):
    """Keeps PyYAML's own resolvers beside ours: text that either kind of reader would misread is quoted."""


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    text = loader.construct_scalar(node)
    # A number of so many digits stays text, too: Python refuses to read or to show thousands of them.
    return int(text) if len(text) <= _MOST_DIGITS else text


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float | str:
    text = loader.construct_scalar(node)
    value = float(text)
    # A number too large for a float stays text, so that validation refuses it by name instead of training on infinity.
    return value if math.isfinite(value) else text


def _represent_list(dumper: _Dumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


def _represent_text(dumper: _Dumper, value: str) -> yaml.Node:
    # Single quotes fold line breaks, and these count as line breaks too.
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if _UNICODE_BREAK.search(value) else None)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


def parse_yaml(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Parse one YAML document.

    Returns:
        The value, and for each mapping key, by its path from the root, the line (from 1) where it stands.

    Raises:
        yaml.MarkedYAMLError: the text is not YAML, repeats a key, nests too deeply, or uses a tag other than the plain ones.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _refuse_deep(node, 0)
        _refuse_mislabelled(node)
        lines: dict[tuple[str, ...], int] = {}
        _collect_lines(node, (), lines)
        return loader.construct_document(node), lines
    except RecursionError:
        raise yaml.constructor.ConstructorError(None, None, _TOO_DEEP, None) from None
    finally:
        loader.dispose()


def _refuse_deep(node: yaml.Node, level: int) -> None:
    if level > _DEEPEST:
        raise yaml.constructor.ConstructorError(None, None, _TOO_DEEP, node.start_mark)
    if isinstance(node, yaml.CollectionNode):
        for inner in node.value:
            # Of a mapping the value: a key that is no scalar is refused elsewhere.
            _refuse_deep(inner[1] if isinstance(inner, tuple) else inner, level + 1)


def _refuse_mislabelled(node: yaml.Node) -> None:
    """A scalar whose own tag says that it is what it does not look like, such as ``!!int ten``."""
    if isinstance(node, yaml.ScalarNode):
        looks = next((pattern for tag, pattern, _ in _RESOLVERS if tag == node.tag), None)
        if looks is not None and not looks.match(node.value) and not (looks is _FLOAT and _INT.match(node.value)):
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise yaml.constructor.ConstructorError(None, None, f"{node.value!r} is no {kind}", node.start_mark)
    for inner in node.value if isinstance(node, yaml.CollectionNode) else ():
        for one in inner if isinstance(inner, tuple) else (inner,):
            _refuse_mislabelled(one)


def _collect_lines(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands here and in line {seen[key]}", key_node.start_mark
            )
        seen[key] = line
        lines[(*path, key)] = line
        _collect_lines(value_node, (*path, key), lines)


def dump_yaml(value: Any) -> str:
    """YAML text of plain Python values: mappings in blocks, lists in one line, the order kept."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
