"""Read a configuration: schema defaults, overridden by a YAML file, and that by dotted ``key=value`` arguments.

Everything wrong with a file or a command line is reported at once, each problem with its key, where it stands, the value,
what was expected and, for an unknown key, the nearest known one. Values are validated in strict JSON mode: a list is
accepted where the schema has a tuple, but ``"8"`` is no integer and ``1`` is no boolean.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from qerl.config.fields import Key, all_keys, section_names
from qerl.config.schema import Config
from qerl.config.section import RULE
from qerl.config.suggest import suggest_key
from qerl.config.yaml_io import dump_yaml, parse_yaml
from qerl.errors import ConfigError, nearest

_COMMAND_LINE = "command line"
EXTENDS = "extends"
"""Key of a file that names the file it changes."""

_Path = tuple[str, ...]
"""Where a value stands: the keys from the root of the configuration."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """One thing wrong: the four parts of an error message, before it is known whether there are others."""

    what: str
    got: str | None = None
    expected: str | None = None
    remedy: str | None = None


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The resolved, validated configuration.

    Args:
        path: YAML file; None takes the defaults alone. Its key ``extends`` names a file, relative to it, that it overrides.
        overrides: ``section.key=value`` texts, later ones win. A value is YAML, except that a key whose value is text
            takes it as typed (``null`` unsets an optional one; quotes around the whole value are removed).

    Raises:
        ConfigError: the file cannot be read, or a key or value is refused; the message lists every problem.
    """
    values: dict[str, Any] = {}
    origins: dict[_Path, str] = {}
    problems: list[_Problem] = []
    if path is not None:
        values, origins = _read_chain(Path(path), ())
    for override in overrides:
        problem = _apply_override(override, values, origins)
        if problem is not None:
            problems.append(problem)
    try:
        config = Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        config = None
        problems.extend(_problems_of(error, values, origins))
    if problems:
        raise _error(problems)
    assert config is not None
    return config


def dump_config(config: Config) -> str:
    """YAML text that :func:`load_config` reads back to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


def _read_chain(path: Path, readers: tuple[Path, ...]) -> tuple[dict[str, Any], dict[_Path, str]]:
    """Values of a file over those of the file that it extends, and where each stands."""
    values, lines = _read_file(path)
    origins = {keys: f"{path}, line {line}" for keys, line in lines.items()}
    base = values.pop(EXTENDS, None)
    if base is None:
        return values, origins
    if not isinstance(base, str) or Path(base).is_absolute():
        raise ConfigError(
            f"{EXTENDS} ({_origin((EXTENDS,), origins)}) names no file",
            got=_shown(base),
            expected=f"the path of a YAML file, relative to {path.parent}",
        )
    readers = (*readers, path.resolve())
    parent = path.parent / base
    if parent.resolve() in readers:
        raise ConfigError(f"{path} extends itself", got=" -> ".join(p.name for p in (*readers, parent)))
    inherited, inherited_origins = _read_chain(parent, readers)
    return _merged(inherited, values), {**inherited_origins, **origins}


def _merged(base: dict[str, Any], changes: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``changes`` over ``base``, section by section; any other value replaces the whole value."""
    result = dict(base)
    for name, value in changes.items():
        both_sections = f"{prefix}{name}" in section_names() and isinstance(value, dict)
        if both_sections and isinstance(base.get(name), dict):
            result[name] = _merged(base[name], value, f"{prefix}{name}.")
        else:
            result[name] = value
    return result


def _read_file(path: Path) -> tuple[dict[str, Any], dict[_Path, int]]:
    if path.is_dir():
        raise ConfigError(f"configuration {path} is a folder", expected="a YAML file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"configuration {path} is no regular file", expected="a YAML file")
    if not path.is_file():
        folder = path.parent
        near = nearest(path.name, (entry.name for entry in folder.glob("*.y*ml"))) if folder.is_dir() else None
        remedy = f"Did you mean {folder / near}?" if near else "Check the path; configs/ holds the recipes."
        raise ConfigError(f"configuration file {path} does not exist", remedy=remedy)
    try:
        values, lines = parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a text file", got=f"byte {error.start}: {error.reason}", expected="UTF-8 YAML"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}{_line_of(error)} is not valid YAML", got=_yaml_complaint(error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML", got=str(error)) from error
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds no sections", got=_shown(values), expected="a mapping such as `model: {path: demo}`"
        )
    return _without_empty_sections(values), lines


def _without_empty_sections(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Drop sections whose keys are all commented out: they read as null and change nothing."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        is_section = f"{prefix}{name}" in section_names()
        if is_section and isinstance(value, dict):
            kept[name] = _without_empty_sections(value, f"{prefix}{name}.")
        elif not (is_section and value is None):
            kept[str(name)] = value
    return kept


def _line_of(error: yaml.MarkedYAMLError) -> str:
    return f", line {error.problem_mark.line + 1}," if error.problem_mark is not None else ""


def _yaml_complaint(error: yaml.MarkedYAMLError) -> str:
    return " ".join(part for part in (error.context, error.problem) if part)


def _apply_override(override: str, values: dict[str, Any], origins: dict[_Path, str]) -> _Problem | None:
    """Write one ``key=value`` into ``values``; the problem with it, if it cannot be read at all."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not name:
        return _Problem(f"argument {override!r} is no setting", expected="section.key=value, such as optim.lr=1e-5")
    known = all_keys()
    mapping = next((key for key in known if known[key].is_mapping and name.startswith(f"{key}.")), None)
    # What follows a free mapping's name is one key of it, dots included: quant.overrides.layers.0.*=bf16.
    path = [*mapping.split("."), name[len(mapping) + 1 :]] if mapping else name.split(".")
    try:
        value = _override_value(known.get(name), text)
    except yaml.YAMLError as error:
        complaint = _yaml_complaint(error) if isinstance(error, yaml.MarkedYAMLError) else str(error)
        return _Problem(f"value of {name} ({_COMMAND_LINE}) is not valid YAML", got=f"{text!r}: {complaint}")
    section = values
    for part in path[:-1]:
        inner = section.get(part)
        if not isinstance(inner, dict):
            inner = section[part] = {}
        section = inner
    if name in section_names() and isinstance(value, dict) and isinstance(section.get(path[-1]), dict):
        section[path[-1]] = {**section[path[-1]], **value}
    else:
        section[path[-1]] = value
    origins[tuple(path)] = _COMMAND_LINE
    return None


def _override_value(key: Key | None, text: str) -> Any:
    if key is not None and key.is_text:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return parse_yaml(text)[0] if quoted or text == "null" else text
    return parse_yaml(text)[0]


def _problems_of(error: ValidationError, values: dict[str, Any], origins: dict[_Path, str]) -> list[_Problem]:
    """One problem a key: pydantic reports each member of a union and each element of a list on its own."""
    problems: dict[tuple[_Path, str], _Problem] = {}
    for detail in error.errors():
        path = _key_path(detail["loc"])
        rule = detail["msg"] if detail["type"] == "value_error" else ""
        problems.setdefault((path, rule), _problem(path, detail, values, origins))
    return list(problems.values())


def _key_path(loc: tuple[int | str, ...]) -> _Path:
    """The part of a pydantic location that leads to a key; union tags and list indices after it are left out."""
    known = all_keys()
    path: _Path = ()
    for part in map(str, loc):
        path = (*path, part)
        if len(path) > 1 and ".".join(path) in known:
            break
    return path


def _problem(path: _Path, detail: ErrorDetails, values: dict[str, Any], origins: dict[_Path, str]) -> _Problem:
    if detail["type"] == "value_error":
        return _Problem(str(detail["ctx"]["error"]))
    if detail["type"] == "json_invalid":
        keys = " ".join(_no_text(values)) or "a key"
        return _Problem(f"{keys} holds what is no text", got=str(detail["ctx"]["error"]), expected="UTF-8")
    name = ".".join(path)
    where = f"{name} ({_origin(path, origins)})"
    if detail["type"] == "extra_forbidden":
        return _unknown(name, where, detail["input"])
    key = all_keys().get(name)
    if key is None:
        keys = ", ".join(known.removeprefix(f"{name}.") for known in all_keys() if known.startswith(f"{name}."))
        return _Problem(f"{where} is a section", got=_shown(detail["input"]), expected=f"a mapping with some of {keys}")
    near = nearest(detail["input"], key.choices) if isinstance(detail["input"], str) else None
    expected = f"{key.expected}, {detail['ctx'][RULE]}" if detail["type"] == RULE else key.expected
    got = _shown(functools.reduce(operator.getitem, path, values))
    return _Problem(where, got=got, expected=expected, remedy=f"Did you mean {near}?" if near else None)


def _no_text(value: Any, name: str = "") -> Iterator[str]:
    """Dotted keys whose text has half characters, as an argument has whose bytes are not UTF-8."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _no_text(inner, f"{name}.{key}" if name else str(key))
    elif any("\ud800" <= character <= "\udfff" for character in str(value)):
        yield name


def _unknown(name: str, where: str, value: Any) -> _Problem:
    if name in all_keys():
        section, _, leaf = name.rpartition(".")
        return _Problem(f"{where} is written flat", expected=f"`{section}:` with `{leaf}:` indented below it")
    near = nearest(name, section_names()) if isinstance(value, dict) else suggest_key(name, all_keys())
    remedy = f"Did you mean {near}?" if near else "docs/config.md lists all keys."
    return _Problem(f"unknown key {where}", got=f"value {_shown(value)}", remedy=remedy)


def _origin(path: _Path, origins: dict[_Path, str]) -> str:
    while path not in origins and len(path) > 1:
        path = path[:-1]
    return origins.get(path, _COMMAND_LINE)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _error(problems: Sequence[_Problem]) -> ConfigError:
    errors = [ConfigError(p.what, got=p.got, expected=p.expected, remedy=p.remedy) for p in problems]
    if len(errors) == 1:
        return errors[0]
    return ConfigError(f"{len(errors)} problems in the configuration:" + "".join(f"\n  - {error}" for error in errors))
