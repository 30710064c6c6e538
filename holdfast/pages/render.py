"""HTML templates of the folder `templates`. Every inserted value is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **values: Any) -> Markup:
    """Fill the template with values. Returns markup, so another template does not escape it again."""
    return Markup(_environment().get_template(template).render(values))  # noqa: S704 - autoescaped


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("holdfast.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = lambda value: f"{value:.1f}"
    environment.filters["times"] = lambda count: f"{count} time{'s' if count != 1 else ''}"
    return environment
