"""Planner: fit, speed, duration and cost of a training before any accelerator is paid for.

It is arithmetic alone: memory of a rank term by term, communication by the alpha-beta model, pipeline schedules, and a
search over layouts. It needs neither torch nor an accelerator. docs/planner.md has its validation and its errors.
`pipelines.view` displays the results.
"""

from holdfast.planning.hardware import ACCELERATORS, Accelerator, accelerator
from holdfast.planning.layout import Layout
from holdfast.planning.memory import Memory, memory
from holdfast.planning.practice import Updates, practice_here
from holdfast.planning.run_estimate import RunEstimate, estimate_run
from holdfast.planning.search import Candidate, Found, Task, reasons, search
from holdfast.planning.shape import Architecture
from holdfast.planning.speed import Speed, speed
from holdfast.planning.spot import Spot, spot

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Architecture",
    "Candidate",
    "Found",
    "Layout",
    "Memory",
    "RunEstimate",
    "Speed",
    "Spot",
    "Task",
    "Updates",
    "accelerator",
    "estimate_run",
    "memory",
    "practice_here",
    "reasons",
    "search",
    "speed",
    "spot",
]
