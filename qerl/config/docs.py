"""Write ``docs/config.md`` from the schema: ``python -m qerl.config.docs > docs/config.md`` (``make docs``)."""

from __future__ import annotations

import json
import sys
from typing import Any

from qerl.config.fields import Key, all_keys, section_names
from qerl.config.schema import Config

_HEAD = """# Configuration

Generated from `qerl/config/` by `make docs`; do not edit.

Defaults are overridden by a YAML file, and that by `section.key=value` arguments on the command line. Unknown keys and wrong
types are errors, and so are integers beyond 1e9 and numbers beyond 1e36 where no other bound is given. `auto` values are resolved
when the configuration is read, where the text says so, and the resolved file is written to the run folder as
`config.resolved.yaml`.

A file may begin with `extends: OTHER.yaml` (a path relative to it): it then holds only what differs from that file.

Command-line values are YAML (`optim.lr=1e-5`, `lora.targets=[q_proj, v_proj]`), except that a key of type *text* takes what
is typed; `null` unsets it. Scalars follow YAML 1.2: only `true` and `false` are booleans, so `off` and `on` are words.
"""


def config_markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for section in section_names():
        keys = [key for key in all_keys().values() if key.name.rpartition(".")[0] == section]
        parts.append(_section(section, keys))
    return "\n".join(parts)


def _section(section: str, keys: list[Key]) -> str:
    lines = [f"## `{section}`", "", _summary(section), "", "| Key | Value | Default | Meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key.name}` | {_cell(key.expected)} | `{_cell(_default(key.default))}` | {_cell(key.meaning)} |"
        for key in keys
    ]
    return "\n".join(lines) + "\n"


def _summary(section: str) -> str:
    model: Any = Config
    for name in section.split("."):
        model = model.model_fields[name].annotation
    return " ".join((model.__doc__ or "").split())


def _default(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(config_markdown())
