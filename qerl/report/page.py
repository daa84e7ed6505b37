"""What all pages share: one HTML file with style, script and figures in it, from a template of ``assets/``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from qerl.errors import MissingDependencyError
from qerl.report import text
from qerl.report.plot_parts import Panel
from qerl.units import bytes_text


def fill(template: str, panels: Sequence[Panel], **values: Any) -> str:
    """The text of a page.

    Args:
        template: file name under ``assets/``; text from ``values`` is escaped.
        panels: figures; the template holds a place for each (``data-figure``).
        values: what the template names.

    Raises:
        MissingDependencyError: plotly or jinja2 is not installed.
    """
    _, plotlyjs = import_renderers()
    page = _template(template).render(
        style=asset("page.css"),
        script=asset("page.js"),
        plotlyjs=plotlyjs() if panels else "",
        figures=figures_json(panels),
        **values,
    )
    return str(page)


@cache
def _template(name: str) -> Any:
    """The compiled template ``name`` of ``assets/``."""
    jinja2, _ = import_renderers()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(interval=text.interval)
    environment.filters.update(
        percent=text.percent, decimals=text.decimals, points=text.points, plain=text.plain, size=bytes_text
    )
    environment.filters.update(seconds=text.seconds, amount=text.count, brief=text.brief)
    return environment.from_string(asset(name))


def import_renderers() -> tuple[Any, Callable[[], str]]:
    """jinja2, and what gives plotly's script.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependencyError(
            f"the report needs {error.name}, which is not installed", remedy="Run `pip install plotly jinja2`"
        ) from error
    return jinja2, get_plotlyjs


def asset(name: str) -> str:
    """A file of ``assets/``."""
    return resources.files("qerl.report").joinpath("assets", name).read_text(encoding="utf-8")


def figures_json(panels: Sequence[Panel]) -> str:
    """Figures by panel id, safe inside a script element."""
    figures = {panel.id: panel.figure.to_plotly_json() for panel in panels}
    return json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
