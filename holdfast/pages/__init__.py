"""HTML pages, each one self-contained file: line charts, and the templates that hold all content."""

from holdfast.pages.accounts import account_tiles, draw_time
from holdfast.pages.charts import Chart, Series, draw_chart, number, points, smooth
from holdfast.pages.render import render
from holdfast.pages.training import draw_training

__all__ = [
    "Chart",
    "Series",
    "account_tiles",
    "draw_chart",
    "draw_time",
    "draw_training",
    "number",
    "points",
    "render",
    "smooth",
]
