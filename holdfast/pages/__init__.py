"""HTML pages, each one self-contained file: line charts, and the templates that hold all content."""

from holdfast.pages.charts import Chart, Series, draw_chart, number, points, render, smooth
from holdfast.pages.training import account_tiles, answer_charts, draw_time, draw_training

__all__ = [
    "Chart",
    "Series",
    "account_tiles",
    "answer_charts",
    "draw_chart",
    "draw_time",
    "draw_training",
    "number",
    "points",
    "render",
    "smooth",
]
