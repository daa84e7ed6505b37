"""The schema as a flat table: every dotted key with its type in words, its default and its meaning.

One table serves the error messages of ``config.load`` and the generated ``docs/config.md``, so that what a message
expects and what the documentation says cannot differ.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qerl.config.schema import Config

_WORDS: dict[Any, str] = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
_BOUNDS = ((annotated_types.Ge, ">=", "ge"), (annotated_types.Gt, ">", "gt"), (annotated_types.Le, "<=", "le"), (annotated_types.Lt, "<", "lt"))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting."""

    name: str
    """Dotted name, e.g. ``optim.lr``."""
    expected: str
    """Accepted values in words, e.g. ``number > 0``."""
    default: Any
    meaning: str
    choices: tuple[str, ...]
    """Every literal value the key accepts, list elements included."""
    is_text: bool
    """Whether the only values are text (and perhaps null), so that a command-line value is taken as typed."""
    is_mapping: bool
    """Whether the value is a free mapping, whose own keys may hold dots."""


def section_names(model: type[BaseModel] = Config, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of all sections, outer before inner."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            names.append(prefix + name)
            names.extend(section_names(field.annotation, f"{prefix}{name}."))  # type: ignore[arg-type]
    return tuple(names)


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every dotted key of the schema, in the order of the schema."""
    return {key.name: key for key in _walk(Config, "")}


def _walk(model: type[BaseModel], prefix: str) -> list[Key]:
    keys: list[Key] = []
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            keys.extend(_walk(field.annotation, f"{prefix}{name}."))  # type: ignore[arg-type]
        else:
            keys.append(_key(prefix + name, field))
    return keys


def _key(name: str, field: FieldInfo) -> Key:
    members = _members(field.annotation)
    return Key(
        name=name,
        expected=describe(field.annotation, field.metadata),
        default=field.get_default(call_default_factory=True),
        meaning=" ".join((field.description or "").split()),
        choices=_choices(field.annotation),
        is_text=set(members) <= {str, type(None)},
        is_mapping=any(get_origin(member) is dict for member in members),
    )


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values a type accepts, in words.

    Args:
        annotation: a type as it stands in the schema.
        metadata: bounds that belong to it (``annotated_types`` objects).
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [bound for extra in arguments[1:] for bound in _bounds_of(extra)]
        return describe(arguments[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument, metadata) for argument in arguments)
    if origin is Literal:
        return ", ".join(map(str, arguments[:-1])) + (" or " if len(arguments) > 1 else "") + str(arguments[-1])
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of ({describe(arguments[0])})"
        return f"list of {len(arguments)}: " + ", ".join(f"({describe(argument)})" for argument in arguments)
    if origin is dict:
        return f"mapping from {describe(arguments[0])} to ({describe(arguments[1])})"
    assert annotation in _WORDS, f"the schema uses a type that has no description: {annotation}"
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in metadata
        for kind, sign, name in _BOUNDS
        if isinstance(bound, kind)
    ]
    return " ".join([_WORDS[annotation], " and ".join(bounds)]).strip()


def _bounds_of(extra: Any) -> Sequence[Any]:
    return extra.metadata if isinstance(extra, FieldInfo) else [extra]


def _members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union (a single type is its own only member), ``Annotated`` removed."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _members(arguments[0])
    if origin in (Union, types.UnionType):
        return tuple(member for argument in arguments for member in _members(argument))
    return (annotation,)


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(choice for argument in get_args(annotation) for choice in _choices(argument))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
