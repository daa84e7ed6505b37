"""In which format each group of linear layers is held. Free of torch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from qerl.config.schema import QuantConfig
from qerl.errors import ConfigError, nearest
from qerl.model.spec import ModelSpec


def part_formats(spec: ModelSpec, quant: QuantConfig) -> dict[str, str | None]:
    """What ``quant.overrides`` asks of each projection: its name -> format, None where no pattern matches.

    Patterns are matched against names such as ``layers.0.mlp.down_proj``; the last match wins.

    Raises:
        ConfigError: a pattern matches no projection.
    """
    names = [name for layer in range(spec.num_layers) for shape in spec.groups() for name in shape.part_names(layer)]
    formats: dict[str, str | None] = dict.fromkeys(names)
    for pattern, chosen in quant.overrides.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = nearest(pattern, names)
            raise ConfigError(
                "a pattern in quant.overrides matches no projection",
                got=repr(pattern),
                expected=f"a pattern for names such as {names[0]}",
                remedy=f"The nearest name is {close}." if close else None,
            )
        formats.update(dict.fromkeys(matched, chosen))
    return formats


def group_formats(spec: ModelSpec, quant: QuantConfig, packed: frozenset[str] = frozenset()) -> dict[str, str]:
    """Group name -> format for every group of every layer.

    Args:
        spec: the model.
        quant: what the user asked for.
        packed: projections that a quantized folder holds packed. Such a folder decides for itself: what it holds plain
            stays plain, and asking for anything else is an error.

    Raises:
        ConfigError: an override matches nothing, the members of one group would differ, or the request contradicts a
            quantized folder.
    """
    asked = part_formats(spec, quant)
    stored = spec.stored_format
    if stored is not None and quant.format != stored:
        raise ConfigError(
            f"the model folder holds {stored.upper()} weights",
            got=f"quant.format={quant.format}",
            expected=f"quant.format={stored}",
            remedy="Use the plain checkpoint to choose the format at load.",
        )
    formats: dict[str, str] = {}
    for layer in range(spec.num_layers):
        for shape in spec.groups():
            chosen = {
                name: quant.storage(asked[name] or quant.format)
                if stored is None
                else _stored(name, asked[name], stored if name in packed else "bf16")
                for name in shape.part_names(layer)
            }
            if len(set(chosen.values())) > 1:
                raise ConfigError(
                    f"projections that are held as one weight ({shape.group_name(layer)}) have different formats",
                    got=", ".join(f"{name}={value}" for name, value in chosen.items()),
                    expected="one format",
                    remedy="Let the patterns in quant.overrides cover the whole group.",
                )
            formats[shape.group_name(layer)] = next(iter(chosen.values()))
    return formats


def check_formats(spec: ModelSpec, quant: QuantConfig) -> None:
    """What :func:`group_formats` refuses, as far as it can be known without the weights of a quantized folder.

    Raises:
        ConfigError: see :func:`group_formats`.
    """
    asked = part_formats(spec, quant)
    group_formats(
        spec, quant, frozenset(name for name, chosen in asked.items() if chosen in (None, spec.stored_format))
    )


def _stored(name: str, asked: str | None, stored: str) -> str:
    """Format of a projection in a folder that is quantized already."""
    if asked not in (None, stored):
        raise ConfigError(
            f"quant.overrides contradicts the quantized model folder for {name}",
            got=asked,
            expected=stored,
            remedy="Use the plain checkpoint to choose formats at load.",
        )
    return stored
