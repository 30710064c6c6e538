"""The templates of pages, in the folder `templates`: every value that is put into one is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **values: Any) -> Markup:
    """The template filled with values, as markup: put into another template it is not escaped again."""
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
